"""What heavy hitters are chosen by: accumulated attention (H2O, arXiv 2306.14048) or their keys (KeyDiff, arXiv 2504.15364).

The decode step keeps no attention matrix. Instead the tail also holds its last queries, and compaction recomputes their
softmax rows once per boundary interval, so only committed queries ever count. Ranking by keys needs no query and stores nothing.
"""

from __future__ import annotations

import numpy as np

from edgekv.reference.attention import softmax_row, visible


def observe(
    queries: np.ndarray,
    query_pos: np.ndarray,
    keys: np.ndarray,
    key_pos: np.ndarray,
    scale: float,
    softcap: float,
    sliding_window: int,
) -> tuple[np.ndarray, np.ndarray]:
    """What each key received from these queries: (sum of weights, number of observing (query, head) pairs), float32 [kv_heads, n].

    queries float32 [q_heads, rows, key_dim] with positions query_pos int [rows]; keys float32 [kv_heads, n, key_dim] with
    positions key_pos int [kv_heads, n]. Weights are summed over rows and over the query heads that share a kv head.
    """
    kv_heads, n, dim = keys.shape
    group = queries.shape[0] // kv_heads
    score = np.zeros((kv_heads, n), np.float32)
    pairs = np.zeros((kv_heads, n), np.float32)
    for row, position in enumerate(query_pos):
        seen = visible(key_pos, int(position), sliding_window)
        query = queries[:, row].reshape(kv_heads, group, dim)
        score += softmax_row(query, keys, seen, scale, softcap).sum(axis=1, dtype=np.float32)
        pairs += seen * np.float32(group)
    return score, pairs


def ranking(score: np.ndarray, pairs: np.ndarray, normalise: bool) -> np.ndarray:
    """What tokens are ranked by: the sum, or the mean per observing pair (0 for a token nobody has observed)."""
    return score / np.maximum(pairs, np.finfo(np.float32).tiny) if normalise else score


def key_ranking(keys: np.ndarray) -> np.ndarray:
    """How little each key points where all of them together point: float32 [kv_heads, n] of keys float32 [kv_heads, n, key_dim].

    Minus the cosine between a key and the sum of all keys at unit length, times that sum's length, which is the same for all
    tokens of a head and does not change their order. Keys like many others are worth least; a key of zeros has rank 0.
    """
    length = np.sqrt(np.maximum((keys * keys).sum(-1, keepdims=True, dtype=np.float32), np.finfo(np.float32).tiny))
    unit = keys / length
    return -(unit * unit.sum(1, keepdims=True, dtype=np.float32)).sum(-1, dtype=np.float32)
