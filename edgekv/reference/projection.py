"""Thin keys: what a step makes of the numbers that a layer gives when the cache stores fewer of them (docs/thin_keys.md)."""

from __future__ import annotations

import numpy as np


def project(x: np.ndarray, maps: np.ndarray) -> np.ndarray:
    """Rotated queries or keys float32 [T, heads, head_dim] times a map of each head, [heads, head_dim, key_dim]: [T, heads, key_dim].

    Four sums, of every fourth product, are added in pairs, all in float32, as the kernels do it.
    """
    sums = np.zeros((4, *x.shape[:2], maps.shape[2]), np.float32)
    for d in range(maps.shape[1]):
        sums[d % 4] += x[:, :, d, None].astype(np.float32) * maps[None, :, d].astype(np.float32)
    return (sums[0] + sums[1]) + (sums[2] + sums[3])
