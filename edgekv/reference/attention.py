"""Softmax attention of single query rows over the keys they may see."""

from __future__ import annotations

import numpy as np


def visible(key_pos: np.ndarray, query_pos: int, sliding_window: int) -> np.ndarray:
    """Which keys a query at query_pos sees, from stored positions alone: bool, the shape of key_pos (int, -1 = empty slot)."""
    seen = (key_pos >= 0) & (key_pos <= query_pos)
    if sliding_window:
        seen &= query_pos - key_pos < sliding_window
    return seen


def key_scores(query: np.ndarray, keys: np.ndarray, scale: float, softcap: float) -> np.ndarray:
    """Scores of the keys for one row, float32 [kv_heads, group, n].

    query float32 [kv_heads, group, key_dim], the query heads that share a kv head side by side; keys float32 [kv_heads, n, key_dim].
    """
    scores = np.float32(scale) * np.matmul(query, keys.transpose(0, 2, 1))
    return np.float32(softcap) * np.tanh(scores / np.float32(softcap)) if softcap else scores


def softmax(scores: np.ndarray, seen: np.ndarray) -> np.ndarray:
    """Attention weights, the shape of scores float32 [kv_heads, group, n]; seen bool [kv_heads, n].

    Keys that are not seen weigh exactly 0; a row that sees nothing is all 0.
    """
    scores = np.where(seen[:, None, :], scores, np.float32(-np.inf))
    highest = scores.max(axis=-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0), dtype=np.float32)
    total = weights.sum(axis=-1, keepdims=True, dtype=np.float32)
    return weights / np.where(total > 0, total, 1)


def softmax_row(
    query: np.ndarray, keys: np.ndarray, seen: np.ndarray, scale: float, softcap: float
) -> np.ndarray:
    """Attention weights of one row, float32 [kv_heads, group, n]: key_scores() of what is seen, then softmax()."""
    return softmax(key_scores(query, keys, scale, softcap), seen)
