"""The second ranking of a retrieval: candidates by their stored keys, in whole numbers (docs/self_index.md, "Choice").

What is not a whole number here is float32 in one order of operations, so that kernels rank exactly as this does.
"""

from __future__ import annotations

import numpy as np

from edgekv.reference.self_index.signs import dot_in_order

QUERY_LEVELS = 64  # of a query's numbers, either sign
MOST_LEVEL = 63  # of a key's numbers
LEVEL_SHIFT = 8  # bits of a zero point or scale below a level
LARGEST_KEY = np.float32(16320)  # what a token's largest magnitude becomes before that shift: 63.75 levels
WEIGHT_UNIT = np.float32(65536)  # weights are counted in its inverse
LOG2_E = np.float32(1.44269504088896341)
POLYNOMIAL = [np.float32(c) for c in (0.00132647273, 0.00967151299, 0.0555073358, 0.240222424, 0.693147004, 1.0)]


def whole_queries(turned: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Transformed query heads float32 [group, dim] as whole numbers -64..64, int32 [group, dim], and the largest of each, float32 [group]."""
    largest = np.abs(turned).max(-1)
    inverse = np.where(largest >= 1e-30, np.float32(QUERY_LEVELS) / np.maximum(largest, np.float32(1e-30)), np.float32(0))
    return np.rint(turned * inverse[:, None]).astype(np.int32), largest


def whole_keys(codes: np.ndarray, pairs: np.ndarray, signs: np.ndarray, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Stored keys as odd whole numbers -127..127, int32 [n, dim], and their largest magnitudes, float32 [n].

    codes uint8 [n, groups, 32] of `bits` bits, pairs fp16 [n, groups, 2] of zero point and scale, signs [n, dim] +1 or -1. The largest
    magnitude that a token's groups could hold becomes 63.75 levels; a level stands for the middle between it and the next.
    """
    pairs = pairs.astype(np.float32)
    largest = np.maximum((pairs[..., 0] + pairs[..., 1] * np.float32(2**bits - 1)).max(-1), np.float32(0))
    factor = np.where(largest > 0, LARGEST_KEY / np.where(largest > 0, largest, np.float32(1)), np.float32(0))
    whole = np.rint(pairs * factor[:, None, None]).astype(np.int16)
    level = (whole[..., :1] + whole[..., 1:] * codes.astype(np.int16)) >> LEVEL_SHIFT
    odd = 2 * np.clip(level, 0, MOST_LEVEL).astype(np.int32) + 1
    return signs.astype(np.int32) * odd.reshape(len(odd), 32 * pairs.shape[1])[:, : signs.shape[1]], largest


def exp2(x: np.ndarray) -> np.ndarray:
    """2^x in float32, by a polynomial of the part behind the nearest whole number."""
    whole = np.rint(x)
    rest = x - whole
    p = np.full_like(rest, POLYNOMIAL[0])
    for c in POLYNOMIAL[1:]:
        p = p * rest + c
    return np.ldexp(p, whole.astype(np.int32))


def scores(
    query: np.ndarray, turned: np.ndarray, codes: np.ndarray, pairs: np.ndarray, signs: np.ndarray, bits: int, means: np.ndarray, interval: np.ndarray,
    scale: float, softcap: float,
) -> np.ndarray:  # fmt: skip
    """Scores of stored keys for the query heads of a kv head, in units of log2 or, with softcap, as the argument of tanh: float32 [group, n].

    query and turned float32 [group, dim], the latter transformed; codes, pairs, signs, bits as in whole_keys; means float32 [intervals, dim],
    interval [n] which of them each token was coded against.
    """
    scale, softcap = np.float32(scale), np.float32(softcap)
    factor = scale / softcap if softcap > 0 else scale * LOG2_E
    whole, top_query = whole_queries(turned)
    keys, largest = whole_keys(codes, pairs, signs, bits)
    unit = largest * (np.float32(128) / LARGEST_KEY)
    out = np.empty((len(query), len(keys)), np.float32)
    for head in range(len(query)):
        step = top_query[head] * factor * np.float32(1 / QUERY_LEVELS)
        of_mean = dot_in_order(means, query[head]) * factor
        out[head] = (keys @ whole[head]).astype(np.float32) * (unit * step) + of_mean[interval]
    return out


def weights(score: np.ndarray, softcap: float) -> np.ndarray:
    """Attention that candidates with these scores [group, n] get among themselves, summed over the query heads of a kv head: float32 [n]."""
    softcap = np.float32(softcap)
    total = np.zeros(score.shape[1], np.float32)
    for x in score:
        if softcap > 0:
            bounded = np.clip(x, np.float32(-20), np.float32(20))
            x = (np.float32(1) - np.float32(2) / (exp2(bounded * (np.float32(2) * LOG2_E)) + np.float32(1))) * (softcap * LOG2_E)
        weight = exp2(np.maximum(x - x.max(), np.float32(-100)))
        counted = np.rint(weight * WEIGHT_UNIT).astype(np.int64).sum()
        total = total + weight * (WEIGHT_UNIT / np.float32(counted))
    return total
