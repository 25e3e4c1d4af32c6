"""The Walsh-Hadamard transform of a head: orthogonal, its own inverse, n log n additions and no table.

Sign codes and 2-bit magnitudes treat all numbers of a head alike, but keys hold most of their energy in few of them. After
the transform every number carries about the same share, and q . k does not change as long as both are transformed.
"""

from __future__ import annotations

import numpy as np


def hadamard(x: np.ndarray) -> np.ndarray:
    """Transform the last axis in blocks of the largest power of two that divides its length: float32, the shape of x.

    Sylvester's order: within a block of P numbers, y[i] = sum_j (-1)^popcount(i & j) x[j] / sqrt(P). Applying it twice gives x.
    """
    dim = x.shape[-1]
    block = dim & -dim
    y = x.astype(np.float32).reshape(*x.shape[:-1], dim // block, block)
    half = 1
    while half < block:
        pairs = y.reshape(*y.shape[:-1], block // (2 * half), 2, half)
        y = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], axis=-2).reshape(y.shape)
        half *= 2
    return (y * np.float32(1 / np.sqrt(block))).reshape(x.shape)
