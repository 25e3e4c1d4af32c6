"""Quantised latents: a record per token for the keys of all kv heads, and a decoder of whole numbers that rebuilds keys from it.

The first latents carry most; the Walsh-Hadamard transform spreads the numbers of a group over all of them before they are quantised, and its
inverse is part of the decoder. A rebuilt number is its mean, and for every group of 32 latents scale * step * (codes . levels) + zero * sum: products of codes of 4 bits and
levels of 8 bits are whole numbers, which every implementation adds up alike.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from edgekv.layout import GROUP
from edgekv.reference.self_index.quantise import quantise, unbiased
from edgekv.reference.self_index.transform import hadamard

BITS = 4
MOST_LEVEL = np.float32(127)


class Levels(NamedTuple):
    """A decoder [kv_heads, latent + 1, key_dim] in whole numbers, its rows spread as latents are, in groups of 32 rows, the last one filled up with zeros.

    numbers  int32 [kv_heads, groups, 32, key_dim], -127..127
    step     float32 [kv_heads, groups, key_dim], what a level stands for
    sums     float32 [kv_heads, groups, key_dim], of the numbers themselves
    mean     float32 [kv_heads, key_dim]
    """

    numbers: np.ndarray
    step: np.ndarray
    sums: np.ndarray
    mean: np.ndarray


def spread(x: np.ndarray) -> np.ndarray:
    """x [..., latent], every group of 32 transformed by itself: float32 of the same shape."""
    return np.concatenate([hadamard(x[..., at : at + GROUP]) for at in range(0, x.shape[-1], GROUP)], axis=-1)


def levels_of(decoder: np.ndarray) -> Levels:
    """Every column of a group has a step of its own: its largest number becomes 127 or -127."""
    heads, rows, dim = decoder.shape
    padded = np.zeros((heads, -(-(rows - 1) // GROUP) * GROUP, dim), np.float32)
    padded[:, : rows - 1] = np.swapaxes(spread(np.swapaxes(decoder[:, :-1], 1, 2)), 1, 2)
    groups = padded.reshape(heads, -1, GROUP, dim)
    step = np.abs(groups).max(2) / MOST_LEVEL
    numbers = np.rint(groups / np.where(step > 0, step, np.float32(1))[:, :, None])
    return Levels(numbers.astype(np.int32), step, groups.sum(2, dtype=np.float32), decoder[:, -1].astype(np.float32))


def pack(latents: np.ndarray) -> np.ndarray:
    """Records uint8 [n, latent_bytes] of latents float32 [n, latent]: codes in runs of 16, byte j of which holds number j in its low and number
    8 + j in its high half, then the fp16 pairs (zero point, scale) of groups of 32."""
    n, count = latents.shape
    numbers = spread(latents)
    codes, pairs = quantise(numbers, BITS)
    pairs = unbiased(numbers, codes, pairs)
    codes = codes.reshape(n, -1)[:, : -(-count // 16) * 16].copy()
    codes[:, count:] = 0
    runs = codes.reshape(n, -1, 2, 8)
    packed = (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(n, -1)
    return np.concatenate([packed, np.ascontiguousarray(pairs).view(np.uint8).reshape(n, -1)], axis=1)


def unpack(records: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Codes uint8 [n, groups, 32], 0 beyond the latents, and pairs float32 [n, groups, 2] of records uint8 [n, latent_bytes] of `count` latents."""
    n, runs, groups = len(records), -(-count // 16), -(-count // GROUP)
    packed = records[:, : 8 * runs].reshape(n, runs, 8)
    codes = np.zeros((n, 2 * groups, 16), np.uint8)
    codes[:, :runs] = np.concatenate([packed & 15, packed >> 4], axis=-1)
    pairs = np.ascontiguousarray(records[:, 8 * runs :]).view(np.float16).reshape(n, groups, 2)
    return codes.reshape(n, groups, GROUP), pairs.astype(np.float32)


def rebuild(records: np.ndarray, count: int, levels: Levels) -> np.ndarray:
    """Keys before their rotation, float32 [kv_heads, n, key_dim], of records uint8 [n, latent_bytes] of `count` latents."""
    codes, pairs = unpack(records, count)
    products = np.einsum("ngj,hgjd->hngd", codes.astype(np.int32), levels.numbers).astype(np.float32)
    keys = products * (levels.step[:, None] * pairs[None, :, :, 1:]) + levels.sums[:, None] * pairs[None, :, :, :1]
    return keys.sum(2, dtype=np.float32) + levels.mean[:, None]
