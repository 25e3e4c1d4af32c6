"""Rotary positions: turning keys from one position to another."""

from __future__ import annotations

import numpy as np


def rotate(
    x: np.ndarray, positions: np.ndarray, inv_freq: np.ndarray, rotary_dim: int, interleaved: bool = False
) -> np.ndarray:
    """Rotate the pairs of the first rotary_dim numbers by positions * inv_freq radians, in float32.

    x float32 [..., n, dim]; positions int [n], negative ones turn back; inv_freq float32 [rotary_dim/2].
    Pairs are (i, i + rotary_dim/2), or (2i, 2i + 1) when interleaved. Rotations add up: turning a key that carries position a
    by b - a gives the key at position b.
    """
    half = rotary_dim // 2
    angle = positions.astype(np.float32)[:, None] * inv_freq.astype(np.float32)[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    first = slice(0, rotary_dim, 2) if interleaved else slice(0, half)
    second = slice(1, rotary_dim, 2) if interleaved else slice(half, rotary_dim)
    turned = x.astype(np.float32)
    a, b = x[..., first].astype(np.float32), x[..., second].astype(np.float32)
    turned[..., first] = a * cos - b * sin
    turned[..., second] = b * cos + a * sin
    return turned
