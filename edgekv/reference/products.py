"""Oracle of quantised products (plugins/cpu/products.h): integer sums block by block, scaled and added in single precision."""

from __future__ import annotations

import numpy as np

BLOCK = 32


def quantise_rows(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """float32 [R, 32 B] -> q int8 [R, B, 32] and scales float32 [R, B], x ~ scale * q with the largest number of a block at 127.

    Ties round to even. A block with a number that is not finite has a scale that is not a number.
    """
    blocks = x.reshape(len(x), -1, BLOCK).astype(np.float32)
    largest = np.abs(blocks).max(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        factor = np.where(largest > 0, np.float32(127) / largest, np.float32(0))
        whole = np.rint(blocks * factor[..., None])
        scales = largest / np.float32(127) + np.where(np.isfinite(blocks).all(-1), np.float32(0), np.float32(np.nan))
    return np.where(np.isfinite(whole), whole, 0).clip(-127, 127).astype(np.int8), scales.astype(np.float32)


def unpack(codes: np.ndarray, zeros: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """codes uint8 [N, B, 4 * bits], zeros uint8 [N, ceil(B * bits / 8)] -> int32 [N, B, 32] and [N, B], as MatMulNBits packs them."""
    if bits == 8:
        return codes.astype(np.int32), zeros.astype(np.int32)
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:2], BLOCK)
    zero_halves = np.stack([zeros & 15, zeros >> 4], -1).reshape(len(zeros), -1)
    return halves.astype(np.int32), zero_halves[:, : codes.shape[1]].astype(np.int32)


def multiply(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, bits: int, bias: np.ndarray | None = None
) -> np.ndarray:
    """float32 [R, N] of x float32 [R, 32 B] and the weights scale * (code - zero) of N outputs, scales float32 [N, B].

    sum over b of (q . code - zero * sum of q) * (weight scale * activation scale): the integer part is exact, the rest is one fused
    multiply-add per block, in order (here by way of double precision, which may round a sum's last bit otherwise).
    """
    q, x_scales = quantise_rows(x)
    whole, zero_points = unpack(codes, zeros, bits)
    total = np.zeros((len(x), len(codes)), np.float32)
    for b in range(codes.shape[1]):
        part = q[:, b].astype(np.int64) @ (whole[:, b] - zero_points[:, b, None]).T
        factor = scales[:, b] * x_scales[:, b, None]
        total = (part * factor.astype(np.float64) + total).astype(np.float32)
    return total if bias is None else total + bias
