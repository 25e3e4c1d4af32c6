"""How many numbers each layer's keys keep: what `--key-rank` says, and one budget spread over the layers by their spectra."""

from __future__ import annotations

import heapq
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgekv.errors import UserError

AUTO_SHARE = 0.5
STEP = 4  # ranks are multiples of this where a share decides: compressed caches take keys in groups of four numbers


@dataclass(frozen=True)
class KeyRank:
    """What was asked for: the same `rank` in every layer, or a `share` of the key bytes, the same everywhere or spread by spectrum."""

    rank: int | None = None
    share: float | None = None
    spread: bool = False

    def __str__(self) -> str:
        if self.rank is not None:
            return str(self.rank)
        percent = f"{100 * self.share:g}%"
        return f"auto:{percent}" if self.spread else percent


def parse(text: str) -> KeyRank:
    """`32`, `25%`, `auto` (half of the key bytes) or `auto:25%`; UserError for anything else."""
    found = re.fullmatch(r"(auto)?(?:(?(1):)(\d+(?:\.\d+)?)%)?|(\d+)", text.strip())
    if found and found[3] and int(found[3]) > 0:
        return KeyRank(rank=int(found[3]))
    if found and (found[1] or found[2]):
        share = float(found[2]) / 100 if found[2] else AUTO_SHARE
        if 0 < share <= 1:
            return KeyRank(share=share, spread=bool(found[1]))
    raise UserError(f"--key-rank takes numbers per key (32), a share of the key bytes (25%), auto or auto:25%, not {text!r}.")


def choose(
    wanted: KeyRank, heads: Sequence[tuple[int, int]], spectra: Sequence[np.ndarray] = (), steps: Sequence[Sequence[int]] | None = None
) -> list[int]:
    """Rank of each layer. heads: (kv_heads, head_dim) of each; spectra (needed when the budget is spread): for each layer, float
    [kv_heads, head_dim], what the mean square error of its scores grows by when a direction is left out, largest first. steps: for each
    layer the ranks, ascending, that a share may give it; None: multiples of STEP and all numbers, and STEP where the share is less.
    """
    if wanted.rank is not None:
        least = min(dim for _, dim in heads)
        if wanted.rank > least:
            raise UserError(f"--key-rank {wanted.rank} is more than the {least} numbers that a key of this model has.")
        return [wanted.rank] * len(heads)
    if not wanted.spread:
        usual = [min(dim, max(STEP, round(dim * wanted.share / STEP) * STEP)) for _, dim in heads]
        if steps is None:
            return usual
        return [min(choice, key=lambda rank: (abs(rank - dim * wanted.share), abs(rank - rounded)))
                for choice, rounded, (_, dim) in zip(steps, usual, heads, strict=True)]  # fmt: skip
    return _spread(wanted.share, heads, spectra, steps or [[*range(STEP, dim, STEP), dim] for _, dim in heads])


def by_curves(share: float, heads: Sequence[tuple[int, int]], curves: Sequence[Sequence[tuple[int, float]]]) -> list[int]:
    """Ranks under one budget from measured costs: for each layer pairs (rank, cost), ascending in rank, of which the last is of full rank.

    What lies between two measured ranks is taken to cost what lies between; of a curve that does not bend one way its lower hull counts.
    """
    budget = share * sum(kv * dim for kv, dim in heads)
    hulls = [_hull(curve) for curve in curves]
    chosen = [hull[0][0] for hull in hulls]
    pieces = sorted(
        ((a[1] - b[1]) / (heads[layer][0] * (b[0] - a[0])), -layer, a[0], b[0])
        for layer, hull in enumerate(hulls) for a, b in zip(hull, hull[1:], strict=False)
    )[::-1]  # fmt: skip
    left = budget - sum(kv * rank for (kv, _), rank in zip(heads, chosen, strict=True))
    for _, layer, first, last in pieces:
        kv = heads[-layer][0]
        taken = min(last - first, int(left / kv + 1e-9) // STEP * STEP)
        if chosen[-layer] == first and taken > 0:
            chosen[-layer] += taken
            left -= kv * taken
    return chosen


def _hull(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """The corners of the largest convex curve below the points."""
    corners: list[tuple[int, float]] = []
    for rank, cost in curve:
        while len(corners) > 1 and (corners[-1][1] - corners[-2][1]) * (rank - corners[-1][0]) >= (cost - corners[-1][1]) * (corners[-1][0] - corners[-2][0]):
            corners.pop()
        corners.append((rank, cost))
    return corners


def _spread(share: float, heads: Sequence[tuple[int, int]], spectra: Sequence[np.ndarray], steps: Sequence[Sequence[int]]) -> list[int]:
    """Step by step to the layer where it takes most error away per number stored (errors fall ever slower, so that is the best choice)."""
    taken = [0] * len(heads)
    left = share * sum(kv * dim for kv, dim in heads) - sum(kv * choice[0] for (kv, _), choice in zip(heads, steps, strict=True))

    def gain(layer: int) -> tuple[float, int]:
        first, last = steps[layer][taken[layer] :][:2]
        part = spectra[layer][:, first:last]
        return -float(part.sum()) / max(part.size, 1), layer

    queue = [gain(layer) for layer, choice in enumerate(steps) if len(choice) > 1]
    heapq.heapify(queue)
    while queue:
        _, layer = heapq.heappop(queue)
        first, last = steps[layer][taken[layer] :][:2]
        cost = heads[layer][0] * (last - first)
        if cost > left + 1e-9:
            continue
        left -= cost
        taken[layer] += 1
        if taken[layer] + 1 < len(steps[layer]):
            heapq.heappush(queue, gain(layer))
    return [choice[index] for choice, index in zip(steps, taken, strict=True)]
