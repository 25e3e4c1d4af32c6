"""Sign codes: the signs of 4 numbers as one 4-bit code, a codebook of what such numbers are on average, and scores by look-up."""

from __future__ import annotations

import numpy as np

DIMS = 4  # numbers per code
CODES = 16
LEVELS = 63  # table entries are 0..63: the sum of four fits a byte
BIAS_LIMIT = 16383  # a score (sum of at most 256 table entries plus bias) then fits int16


def sign_codes(x: np.ndarray) -> np.ndarray:
    """Codes uint8 [..., dim/4] of x [..., dim]: bit i of code g is 1 when x[4g + i] >= 0. Zero counts as positive."""
    bits = (x >= 0).reshape(*x.shape[:-1], x.shape[-1] // DIMS, DIMS).astype(np.uint8)
    return (bits << np.arange(DIMS, dtype=np.uint8)).sum(-1, dtype=np.uint8)


def signs_of(codes: np.ndarray) -> np.ndarray:
    """Signs +1 or -1 float32 [..., dim] of codes [..., dim/4]."""
    bits = (codes[..., None] >> np.arange(DIMS, dtype=np.uint8)) & 1
    return (2 * bits.astype(np.float32) - 1).reshape(*codes.shape[:-1], codes.shape[-1] * DIMS)


def learn(codebook: np.ndarray, seen: np.ndarray, x: np.ndarray, codes: np.ndarray) -> None:
    """Move the centroids to the mean of all sub-vectors seen so far, in place, token after token.

    codebook float32 [dim/4, 16, 4], seen float32 [dim/4, 16] how many sub-vectors each centroid stands for;
    x float32 [n, dim], codes uint8 [n, dim/4]. A code that never occurred keeps 0: no token will look it up.
    """
    groups = np.arange(codebook.shape[0])
    for token, code in zip(x.reshape(len(x), x.shape[-1] // DIMS, DIMS), codes):
        seen[groups, code] += 1
        codebook[groups, code] += (token - codebook[groups, code]) / seen[groups, code, None]


def score_table(query: np.ndarray, codebook: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Integer table uint8 [dim/4, 16] and its step: table * step = <query, centroid> up to a constant per group.

    query float32 [dim], the transformed query heads of one kv head added up, times the score scale. The order of additions is
    fixed, so that kernels round as this does and fill the same table.
    """
    products = query.reshape(-1, 1, DIMS) * codebook
    exact = (products[..., 0] + products[..., 1]) + (products[..., 2] + products[..., 3])
    above = exact - exact.min(axis=1, keepdims=True)
    widest = above.max()
    step = widest / np.float32(LEVELS) if widest > 0 else np.float32(1)
    return np.floor(above / step + np.float32(0.5)).astype(np.uint8), step


def scan(table: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Sum of table entries of every token: int32 [n] for codes uint8 [n, dim/4]. Look-ups and additions only."""
    return table[np.arange(table.shape[0]), codes].sum(axis=1, dtype=np.int32)


def interval_bias(query: np.ndarray, means: np.ndarray, newest: int, step: np.float32) -> np.ndarray:
    """What the mean key of each interval adds, in table steps, relative to interval `newest`: int32 [intervals]."""
    bias = np.rint(dot_in_order(means - means[newest], query) / step)
    return np.clip(bias, -BIAS_LIMIT, BIAS_LIMIT).astype(np.int32)


def dot_in_order(rows: np.ndarray, query: np.ndarray) -> np.ndarray:
    """rows @ query in float32, added up as a register of 16 numbers does: float32 [n] for rows [n, dim] and query [dim]."""
    products = rows * query
    lanes = np.zeros((len(rows), 16), np.float32)
    for at in range(0, products.shape[1], 16):
        part = products[:, at : at + 16]
        lanes[:, : part.shape[1]] += part
    half = 8
    while half:
        lanes = lanes[:, :half] + lanes[:, half : 2 * half]
        half //= 2
    return lanes[:, 0]


def best(score: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest scores, ascending; ties go to the lowest index."""
    return np.sort(np.argsort(-score, kind="stable")[:count])
