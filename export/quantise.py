"""Block-wise integer weights: w ~ (q - zero_point) * scale, with one scale and zero point per row and block of 32 columns.

Four bits get an offset as well (quantise_with_offsets): w ~ scale * q + offset is what 4-bit GGUF formats hold, so that their
weights pass into a bundle as they are, and it fits any weights better than a zero point that must be a whole number.

Scales are numbers of half precision as long as those are near enough: the CPU kernels then keep them in two bytes (plugins/cpu/weights.h).

The layout is that of ONNX Runtime's MatMulNBits and GatherBlockQuantized: codes of one row in order of columns, for 4 bits the
even column in the low half of a byte, blocks padded to the full length; zero points packed likewise, row by row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

BLOCK = 32
ROWS = 1 << 20  # weights quantised at a time, which bounds the memory of the search
SHRINK = (1.0, 0.97, 0.94, 0.91, 0.88, 0.85, 0.8, 0.75)  # shares of a block's range that are tried


@dataclass(frozen=True)
class Blocks:
    """codes uint8 [N, blocks, BLOCK * bits / 8], scales float32 [N, blocks], zero_points uint8 [N, ceil(blocks * bits / 8)]."""

    codes: np.ndarray
    scales: np.ndarray
    zero_points: np.ndarray


def blocks_of(columns: int) -> int:
    return -(-columns // BLOCK)


def quantise(weight: np.ndarray, bits: int) -> Blocks:
    """Quantises float32 [N, K] row by row."""
    rows, columns = weight.shape
    step = max(1, ROWS // columns)
    parts = [_quantise_rows(torch.from_numpy(weight[i : i + step]), bits) for i in range(0, rows, step)]
    codes, scales, zeros = (torch.cat(p).numpy() for p in zip(*parts, strict=True))
    count = blocks_of(columns)
    return Blocks(
        _pack(codes, bits).reshape(rows, count, BLOCK * bits // 8), scales.reshape(rows, count), _pack(zeros.reshape(rows, count), bits)
    )


def widened(columns: int) -> int:
    """Columns of a matrix with offsets: its own and one per block, each padded to whole blocks (plugins/ort/append_block_sums.cpp)."""
    return (blocks_of(columns) + blocks_of(blocks_of(columns))) * BLOCK


def quantise_with_offsets(weight: np.ndarray) -> Blocks:
    """Quantises float32 [N, K] to 4 bits as a matrix [N, widened(K)] for x with its block sums appended.

    A block is scale * code + offset, as near to the weights as can be. The whole-numbered part of -offset / scale becomes the zero
    point; what is left of the offset, at most half a scale, is an entry of the further columns, which are quantised like weights.
    """
    rows, columns = weight.shape
    step = max(1, ROWS // columns)
    parts = [_offset_rows(torch.from_numpy(weight[i : i + step])) for i in range(0, rows, step)]
    codes, scales, zeros = (torch.cat(p).numpy() for p in zip(*parts, strict=True))
    return Blocks(_pack(codes, 4).reshape(rows, scales.shape[1], BLOCK // 2), scales, _pack(zeros, 4))


def _offset_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows, columns = weight.shape
    count, top = blocks_of(columns), 15
    x = torch.nn.functional.pad(weight, (0, count * BLOCK - columns), mode="replicate").reshape(rows, count, BLOCK)
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    middle, half = (high + low) / 2, (high - low) / 2
    best = None
    for share in SHRINK:
        scale = half * (2 * share / top)
        scale = torch.where(scale > 0, scale, torch.ones_like(scale))
        codes = torch.round((x - (middle - half * share)) / scale).clamp(0, top)
        # the least-squares line through (code, weight) is at least as good as the range it came from
        mean_code, mean = codes.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
        spread = (codes - mean_code).square().sum(-1, keepdim=True)
        slope = ((codes - mean_code) * (x - mean)).sum(-1, keepdim=True) / spread.clamp(min=1e-12)
        scale = torch.where((spread > 0) & (slope > 0), slope, scale)
        offset = mean - scale * mean_code
        error = (codes * scale + offset - x).square().sum(-1, keepdim=True)
        if best is None:
            best = [error, codes, scale, offset]
        else:
            better = error < best[0]
            best = [torch.where(better, new, old) for new, old in zip((error, codes, scale, offset), best, strict=True)]
    _, codes, scale, _ = best
    scale = _half(scale)
    offset = x.mean(-1, keepdim=True) - scale * codes.mean(-1, keepdim=True)
    zero = torch.round(-offset / scale).clamp(0, top)
    left = (offset + zero * scale)[..., 0]
    more_codes, more_scales, more_zeros = _quantise_rows(left, 4)
    return (
        torch.cat([codes.to(torch.uint8).reshape(rows, -1), more_codes], dim=1),
        torch.cat([scale[..., 0], more_scales], dim=1),
        torch.cat([zero.to(torch.uint8)[..., 0], more_zeros], dim=1),
    )


def _quantise_rows(weight: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes [N, blocks * BLOCK], scales and zero points [N, blocks], of the range that gives the least squared error per block."""
    rows, columns = weight.shape
    count, top = blocks_of(columns), (1 << bits) - 1
    x = torch.nn.functional.pad(weight, (0, count * BLOCK - columns)).reshape(rows, count, BLOCK)
    low = x.amin(-1, keepdim=True).clamp(max=0.0)  # zero stays exact: padding and pruned weights
    high = x.amax(-1, keepdim=True).clamp(min=0.0)
    best = None
    for share in SHRINK if bits < 8 else SHRINK[:1]:
        scale = (high - low) * (share / top)
        scale = _half(torch.where(scale > 0, scale, torch.ones_like(scale)))
        zero = torch.round(-low * share / scale).clamp(0, top)
        codes = torch.round(x / scale + zero).clamp(0, top)
        error = ((codes - zero) * scale - x).square().sum(-1, keepdim=True)
        if best is None:
            best = [error, codes, scale, zero]
        else:
            better = error < best[0]
            best = [torch.where(better, new, old) for new, old in zip((error, codes, scale, zero), best, strict=True)]
    _, codes, scale, zero = best
    return codes.to(torch.uint8).reshape(rows, -1), scale.reshape(rows, count), zero.to(torch.uint8).reshape(rows, count)


def _half(scale: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of half precision; where that moves one by more than a hundredth (those below 3e-6 or above 65,504), itself."""
    near = scale.half().float()
    return torch.where((near - scale).abs() <= scale.abs() * 1e-2, near, scale)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """uint8 [N, n] numbers below 2^bits -> [N, ceil(n * bits / 8)]."""
    if bits == 8:
        return codes
    if codes.shape[1] % 2:
        codes = np.pad(codes, ((0, 0), (0, 1)))
    return codes[:, 0::2] | codes[:, 1::2] << 4


def unpack(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    """Inverse of _pack for `count` numbers per row."""
    if bits == 8:
        return packed[:, :count]
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(packed.shape[0], -1)[:, :count]


def dequantise(blocks: Blocks, columns: int, bits: int) -> np.ndarray:
    """float32 [N, columns] that ONNX Runtime computes with."""
    rows, count = blocks.scales.shape
    codes = unpack(blocks.codes.reshape(rows, -1), count * BLOCK, bits).reshape(rows, count, BLOCK).astype(np.float32)
    zeros = unpack(blocks.zero_points, count, bits).astype(np.float32)
    return ((codes - zeros[..., None]) * blocks.scales[..., None]).reshape(rows, -1)[:, :columns]
