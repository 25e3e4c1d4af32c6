"""The index plane of a selfindex state (edgekv/layout.py): sign codes of 32 tokens side by side."""

from __future__ import annotations

import numpy as np

from edgekv.layout import INDEX_TOKENS


def read(plane: np.ndarray, first: int, last: int) -> np.ndarray:
    """Sign codes uint8 [heads, slots, key_dim/4] of slots first..last-1 of the index plane."""
    slots = np.arange(first, last)
    byte = plane[:, slots // INDEX_TOKENS, :, slots % 16].transpose(1, 0, 2)
    high = (slots % INDEX_TOKENS >= 16)[None, :, None]
    return np.where(high, byte >> 4, byte & 15)


def write(plane: np.ndarray, codes: np.ndarray) -> None:
    """Write sign codes uint8 [heads, n, key_dim/4] to slots 0..n-1 and clear the rest of the last block of 32."""
    heads, n, groups = codes.shape
    blocks = -(-n // INDEX_TOKENS)
    padded = np.zeros((heads, blocks * INDEX_TOKENS, groups), np.uint8)
    padded[:, :n] = codes
    halves = padded.reshape(heads, blocks, 2, 16, groups)
    plane[:, :blocks] = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1, 3, 2)
