"""Latent keys: the keys of all kv heads of a token, before their rotation, as a few numbers that are turned back into keys where they are read.

Rotation comes after the map, so nothing of it has to survive: a frequency pair that never matters takes no number, and kv heads that say
the same share one. The closed form is the principal components of keys weighted by the root of the energy that queries have in each
frequency pair, which is what an error there does to scores. The refinement (calibrate.py) is what makes it good: it sees the softmax.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

import torch

from edgekv import layout
from edgekv.errors import UserError
from edgekv.export.thin import calibrate, ranks
from edgekv.export.thin.latent_maps import LatentMaps, joint
from edgekv.export.thin.rotation import rotated
from edgekv.export.thin.stream import LayerText
from edgekv.geometry import LayerGeometry

FIRST = 16.0  # how often the first token of a piece counts: much attention rests on it, and its key is unlike all others


@torch.no_grad()
def closed_form(text: LayerText, g: LayerGeometry) -> LatentMaps:
    """Maps of full rank, whose first r columns and rows are the best of rank r for keys and queries that know nothing of each other."""
    heads, dim = g.kv_heads, g.key_dim
    group, half = g.q_heads // heads, g.rotary_dim // 2
    energy = text.q.square().sum((0, 2)).view(heads, group, dim).sum(1)
    if half:  # both numbers of a pair count alike: the rotation mixes them
        first, second = (slice(0, g.rotary_dim, 2), slice(1, g.rotary_dim, 2)) if g.rotary_interleaved else (slice(0, half), slice(half, g.rotary_dim))
        pair = (energy[:, first] + energy[:, second]) / 2
        energy[:, first], energy[:, second] = pair, pair
    weight = energy.clamp(min=float(energy.mean()) * 1e-6).sqrt().flatten().double()
    keys = joint(rotated(text.k, g, back=True)).double()
    count = torch.ones(keys.shape[1], dtype=torch.float64)
    count[0] = FIRST
    mean = keys[:, 1:].mean((0, 1)) if keys.shape[1] > 1 else keys.new_zeros(heads * dim)
    centred = (keys - mean) * weight
    basis = torch.linalg.eigh(torch.einsum("t,ctd,cte->de", count, centred, centred))[1].flip(1)
    return LatentMaps((weight[:, None] * basis).float(), (basis.T / weight).float(), mean.float(), g)


def cut(maps: LatentMaps, rank: int) -> LatentMaps:
    """The first `rank` numbers. At full rank the keys themselves, so that a cache of whole keys stays exact."""
    if rank == maps.encoder.shape[0]:
        unit = torch.eye(rank)
        return dataclasses.replace(maps, encoder=unit, decoder=unit, mean=torch.zeros(rank))
    return maps.with_parts((maps.encoder[:, :rank].contiguous(), maps.decoder[:rank].contiguous()))


def curves(texts: Iterable[LayerText], geometry: Sequence[LayerGeometry], note: Callable[[int], None]) -> list[list[tuple[int, float]]]:
    """Of every layer: ranks in eighths, and the KL of its attention with the closed form's maps of each."""
    found = []
    for text in texts:
        full = closed_form(text, geometry[text.layer])
        size = full.encoder.shape[0]
        tried = sorted({min(size, max(ranks.STEP, size * part // 8 // ranks.STEP * ranks.STEP)) for part in range(1, 9)})
        found.append([(rank, calibrate.measure(text, cut(full, rank)).attention_kl if rank < size else 0.0) for rank in tried])
        note(text.layer)
    return found


def check(geometry: Sequence[LayerGeometry], scaled: bool) -> None:
    """UserError for models that latent keys are not for. scaled: the model multiplies its rotations by a factor."""
    if scaled:
        raise UserError("This model scales its rotated keys, which latent keys are not made for yet; use --key-form projected.")
    if any(g.kv_heads * g.key_dim > layout.MOST_LATENT for g in geometry):
        raise UserError(f"Latent keys are for layers whose keys have at most {layout.MOST_LATENT} numbers in all; use --key-form projected.")
