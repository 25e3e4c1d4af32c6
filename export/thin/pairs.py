"""Thin keys by leaving out rotary pairs: every kv head keeps the frequencies that its scores live on, and the others leave the weights.

A rotation turns each pair of numbers by its own angle, so a pair that is left out takes nothing of the others with it: what remains is a
rotated key like any other, of fewer numbers, and a score still depends on how far apart two tokens are and on nothing else. No map is read
in a step and the matrices that make queries and keys get smaller. Which pairs a head needs differs from head to head (RAP, arXiv 2602.02599;
EliteKV, arXiv 2503.01586). The choice by variance is ours.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgekv.errors import UserError
from edgekv.export.thin import ranks
from edgekv.export.thin.stream import LayerText
from edgekv.geometry import LayerGeometry

CHUNKS = 8  # of the text that the choice looks at, at most
EVERY = 16  # n-th query of them


@dataclass(frozen=True)
class PairMaps:
    """Of one layer: pairs int64 [kv_heads, n], ascending, the rotary pairs of a head that its keys and queries keep; numbers that are not
    rotated stay. geometry: of the layer with whole keys; None when the pairs have just been read from a file."""

    pairs: torch.Tensor
    geometry: LayerGeometry | None

    form = "pairs"
    interval = 0

    @property
    def rank(self) -> int:
        return 2 * int(self.pairs.shape[1]) + self.geometry.key_dim - self.geometry.rotary_dim

    @property
    def whole(self) -> bool:
        return self.rank == self.geometry.key_dim

    def at(self, start: int) -> PairMaps:
        return self

    def parts(self) -> tuple[torch.Tensor, ...]:
        return ()  # what is left out is settled; only weights learn

    def with_parts(self, parts: Sequence[torch.Tensor]) -> PairMaps:
        return self

    @property
    def numbers(self) -> torch.Tensor:
        """int64 [kv_heads, rank]: the numbers of a head that stay, in the order in which fewer pairs lie in a head."""
        g, pairs = self.geometry, self.pairs
        two = torch.stack((2 * pairs, 2 * pairs + 1), -1).flatten(1) if g.rotary_interleaved else torch.cat((pairs, pairs + g.rotary_dim // 2), 1)
        rest = torch.arange(g.rotary_dim, g.key_dim, device=pairs.device)
        return torch.cat((two, rest.expand(len(pairs), -1)), 1)

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotated q [..., q_heads, T, head_dim] and k [..., kv_heads, T, head_dim] with the last axis replaced by `rank` numbers."""
        numbers = self.numbers.to(k.device)[:, None]
        group = q.shape[-3] // k.shape[-3]
        return tuple(torch.take_along_dim(x, n[(None,) * (x.dim() - 3)], -1) for x, n in ((q, numbers.repeat_interleave(group, 0)), (k, numbers)))


def check(geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank | None = None) -> None:
    """UserError when a layer has no rotation that is known, or what is wanted does not leave whole pairs in every layer."""
    for layer, g in enumerate(geometry):
        if not g.rotary_dim:
            raise UserError(f"Layer {layer} has no rotary pairs that could be left out; use --key-form projected.")
    if wanted is None:
        return
    if wanted.rank is not None:
        _check_rank(ranks.choose(wanted, [(g.kv_heads, g.key_dim) for g in geometry])[0], geometry)
    elif not _reaches(wanted, geometry, [_possible(g) for g in geometry]):
        shares = [_possible(g)[0] / g.key_dim for g in geometry]
        least = sum(g.key_numbers * share for g, share in zip(geometry, shares, strict=True)) / sum(g.key_numbers for g in geometry) if wanted.spread else max(shares)
        percent = f"{math.ceil(1000 * least - 1e-6) / 10:g}%"
        raise UserError(
            f"With --key-form pairs keys keep a rotary pair in every head and all numbers that are not rotated, {percent} of their bytes, which --key-rank "
            f"{wanted} does not reach; give {'auto:' if wanted.spread else ''}{percent} or more, or use --key-form projected."
        )


def _check_rank(rank: int, geometry: Sequence[LayerGeometry]) -> None:
    common = sorted(set.intersection(*(set(_possible(g)) for g in geometry)))
    for g in geometry:
        if rank in _possible(g):
            continue
        rest = g.key_dim - g.rotary_dim
        remedy = f"give {' or '.join(map(str, common))}, or" if len(common) in (1, 2) else f"give {common[0]}, {common[1]} and so on to {common[-1]}, or" if common else ""
        raise UserError(
            f"With --key-form pairs a key keeps an even number of its {g.rotary_dim} rotated numbers{f' and all {rest} others' if rest else ''}, which "
            f"--key-rank {rank} does not give; {remedy}{' ' if remedy else ''}use --key-form projected."
        )


def steps(wanted: ranks.KeyRank, geometry: Sequence[LayerGeometry]) -> list[list[int]]:
    """For each layer the ranks, ascending, that a share chooses from: those multiples of ranks.STEP that leave whole pairs, and where the share does not reach
    one of them that leaves something out, all ranks that do."""
    every = [_possible(g) for g in geometry]
    usual = [[rank for rank in possible if rank % ranks.STEP == 0] for possible in every]
    return usual if all(found and found[0] < g.key_dim for found, g in zip(usual, geometry, strict=True)) and _reaches(wanted, geometry, usual) else every


def _possible(g: LayerGeometry) -> list[int]:
    """Every rank that leaves whole pairs, at least one, beside what is not rotated."""
    return list(range(g.key_dim - g.rotary_dim + 2, g.key_dim + 1, 2))


def _reaches(wanted: ranks.KeyRank, geometry: Sequence[LayerGeometry], choices: Sequence[Sequence[int]]) -> bool:
    """Whether a share gives every layer the first of its choices; one of ranks.STEP numbers or fewer is given whatever the share."""
    least = [(g, choice[0]) for g, choice in zip(geometry, choices, strict=True) if choice[0] > ranks.STEP]
    if not wanted.spread:
        return all(g.key_dim * wanted.share + 1e-9 >= rank for g, rank in least)
    return sum(g.kv_heads * rank for g, rank in least) <= wanted.share * sum(g.key_numbers for g in geometry) + 1e-9


def variances(text: LayerText, g: LayerGeometry) -> torch.Tensor:
    """float32 [kv_heads, rotary_dim/2]: variance, under the full attention, of each pair's part of the logits, mean over queries and
    query heads of a kv head. A part that is the same for all keys changes no attention and has none."""
    heads, half = text.k.shape[1], g.rotary_dim // 2
    group = text.q.shape[1] // heads
    first = 2 * torch.arange(half) if g.rotary_interleaved else torch.arange(half)
    second = first + (1 if g.rotary_interleaved else half)
    found, chosen = torch.zeros(heads, half), range(0, len(text.q), -(-len(text.q) // CHUNKS))
    rows = torch.arange(text.q.shape[2] // 8, text.q.shape[2], EVERY)
    for chunk in chosen:
        q, k = text.q[chunk][:, rows], text.k[chunk]
        attention = text.scores.logits(q, k, rows).softmax(-1).unflatten(0, (heads, group)).flatten(1, 2)
        q = (text.scores.scale * q).unflatten(0, (heads, group)).flatten(1, 2)
        for pair in range(half):
            both = [int(first[pair]), int(second[pair])]
            part = q[..., both] @ k[..., both].transpose(1, 2)
            mean = (attention * part).sum(-1, keepdim=True)
            found[:, pair] += (attention * (part - mean).square()).sum(-1).mean(-1)
    return found / len(chosen)


def choose(found: torch.Tensor, g: LayerGeometry, rank: int) -> PairMaps:
    """Each head's pairs of largest variance; `rank` leaves whole ones (check)."""
    return PairMaps(found.topk((rank - g.key_dim + g.rotary_dim) // 2, 1).indices.sort(1).values, g)


def spectrum(found: torch.Tensor, g: LayerGeometry) -> np.ndarray:
    """float64 [kv_heads, head_dim] as ranks.choose takes it: a pair counts as two numbers, and what is not rotated is never left out."""
    largest = found.sort(1, descending=True).values.double().repeat_interleave(2, 1) / 2
    rest = torch.full((len(found), g.key_dim - g.rotary_dim), float(largest.max()) + 1.0, dtype=torch.float64)
    return torch.cat((rest, largest), 1).numpy()
