"""Groups of 32 numbers as 2, 4 or 8-bit codes with a zero point and a scale in fp16, and their order in bytes."""

from __future__ import annotations

import numpy as np

from edgekv.layout import GROUP


def quantise(x: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [..., groups, 32] and (zero point, scale) fp16 [..., groups, 2] of x float32 [..., dim]; x ~ zero + scale * code.

    Start: zero = min, scale = (max - min) / (2^bits - 1), as published. One least-squares refit of (zero, scale) to these
    codes follows, and the codes are chosen again for the rounded pair: a fifth less error in the attention output for the
    same bytes. A constant group has scale 0 and codes 0. When dim is no multiple of 32 the last group repeats its last number.
    """
    y, levels = _grouped(x), np.float32(2**bits - 1)
    zero = y.min(-1, keepdims=True)
    scale = (y.max(-1, keepdims=True) - zero) / levels
    codes = _nearest(y, zero, scale, levels)
    centred = codes - codes.mean(-1, keepdims=True, dtype=np.float32)
    spread = (centred * centred).sum(-1, keepdims=True, dtype=np.float32)
    slope = (centred * y).sum(-1, keepdims=True, dtype=np.float32) / np.where(spread > 0, spread, 1)
    mean = y.mean(-1, keepdims=True, dtype=np.float32)
    scale = np.where(spread > 0, slope, 0).astype(np.float16)
    zero = np.where(spread > 0, mean - slope * codes.mean(-1, keepdims=True, dtype=np.float32), zero).astype(np.float16)
    codes = _nearest(y, zero.astype(np.float32), scale.astype(np.float32), levels)
    return codes.astype(np.uint8), np.concatenate([zero, scale], axis=-1)


def unbiased(x: np.ndarray, codes: np.ndarray, pairs: np.ndarray) -> np.ndarray:
    """Pairs of quantise(x, bits), scaled such that in every group the stored numbers y' keep the product y . y' = y . y.

    Numbers rounded for the least square error are too short by as much as the error is large: along y they miss its square. Few would
    notice, but a softmax weighs exp(q . k), and a query that looks for a key points along it: the key that is looked for would lose a
    fixed share of its score, every other key nothing on average. A group whose product is not positive stays as it is.
    """
    y = _grouped(x)
    pairs32 = pairs.astype(np.float32)
    stored = pairs32[..., :1] + pairs32[..., 1:] * codes.astype(np.float32)
    square = (y * y).sum(-1, keepdims=True, dtype=np.float32)
    product = (y * stored).sum(-1, keepdims=True, dtype=np.float32)
    factor = np.where(product > 0, square / np.where(product > 0, product, 1), np.float32(1))
    return (pairs32 * factor).astype(np.float16)


def dequantise(codes: np.ndarray, pairs: np.ndarray, dim: int) -> np.ndarray:
    """The numbers back: float32 [..., dim]."""
    y = pairs[..., :1].astype(np.float32) + pairs[..., 1:].astype(np.float32) * codes.astype(np.float32)
    return y.reshape(*codes.shape[:-2], codes.shape[-2] * GROUP)[..., :dim]


def pack(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes uint8 [..., groups, 32] as bytes uint8 [..., groups * 4 * bits].

    A group's 4*bits bytes are planes of as many codes: bits b*i .. b*i+b-1 of byte j hold code i * (4*bits) + j, so that one
    shift and one mask of a vector give consecutive codes.
    """
    per_byte = 8 // bits
    planes = codes.reshape(*codes.shape[:-1], per_byte, 4 * bits)
    shifts = (bits * np.arange(per_byte, dtype=np.uint8))[:, None]
    packed = np.bitwise_or.reduce(planes << shifts, axis=-2).astype(np.uint8)
    return packed.reshape(*codes.shape[:-2], codes.shape[-2] * 4 * bits)


def unpack(packed: np.ndarray, bits: int) -> np.ndarray:
    """Inverse of pack."""
    per_byte = 8 // bits
    groups = packed.shape[-1] // (4 * bits)
    planes = packed.reshape(*packed.shape[:-1], groups, 1, 4 * bits)
    shifts = (bits * np.arange(per_byte, dtype=np.uint8))[:, None]
    return ((planes >> shifts) & np.uint8(2**bits - 1)).reshape(*packed.shape[:-1], groups, GROUP)


def _grouped(x: np.ndarray) -> np.ndarray:
    """float32 [..., groups, 32] of x [..., dim]; the last group repeats the last number."""
    pad = -x.shape[-1] % GROUP
    y = np.concatenate([x, np.repeat(x[..., -1:], pad, axis=-1)], axis=-1) if pad else x
    return y.astype(np.float32).reshape(*x.shape[:-1], y.shape[-1] // GROUP, GROUP)


def _nearest(y: np.ndarray, zero: np.ndarray, scale: np.ndarray, levels: np.float32) -> np.ndarray:
    codes = np.rint((y - zero) / np.where(scale > 0, scale, 1))
    return np.where(scale > 0, np.clip(codes, 0, levels), 0).astype(np.float32)
