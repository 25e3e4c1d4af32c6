"""Maps from a text, without training the model: the best low-rank score of each layer in closed form, then refined on its softmax.

The closed form is KQ-SVD (arXiv 2512.05916): with K^T K = Lk Lk^T, Q^T Q = Lq Lq^T and Lk^T Lq = U S V^T, the maps Lk^-T U_r S_r^1/2 and
Lq^-T V_r S_r^1/2 leave the least square error of all scores q . k, and a direction left out adds its S^2. Two things are ours: keys
count by the attention they receive, and the first token of a text, an outlier that much attention rests on, is left out of the statistics.
It is then the refinement, a short descent on KL(softmax of the full scores || softmax of the thin ones), that sees what matters to a softmax.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgekv.export.thin.maps import KeyMaps, Maps
from edgekv.export.thin.stream import LayerText

ROWS = 128  # query rows of one step of the refinement
RATE = 0.03  # of the refinement, relative to the mean size of a map's numbers
HELD_OUT = 8  # every n-th chunk is kept for measuring
DAMPING = 1e-6  # of the moments, relative to their mean diagonal


@dataclass(frozen=True)
class Moments:
    """Of one layer over a text: float64 [kv_heads, head_dim, head_dim] each, means of k k^T over attention and of q q^T over queries."""

    keys: torch.Tensor
    queries: torch.Tensor


@dataclass(frozen=True)
class LayerError:
    """Of the thin scores of one layer on text that was not calibrated on: root mean square error of the softmax's logits over the
    attention of the full ones, and mean KL(full || thin) of the attention in nats per query and head."""

    score_error: float
    attention_kl: float


@torch.no_grad()
def moments(text: LayerText) -> Moments:
    """Over all chunks; memory of one chunk's attention at a time."""
    heads, dim = text.k.shape[1], text.k.shape[3]
    keys = torch.zeros(heads, dim, dim, dtype=torch.float64)
    queries = torch.zeros_like(keys)
    mass = torch.zeros(heads, dtype=torch.float64)
    for q, k in zip(text.q, text.k, strict=True):
        group = q.shape[0] // heads
        weight = text.scores.logits(q, k).softmax(-1).sum(1).view(heads, group, -1).sum(1)  # attention that each key receives
        weight[:, 0] = 0.0
        keys += torch.einsum("htd,ht,hte->hde", k, weight, k).double()
        mass += weight.sum(-1).double()
        grouped = q.reshape(heads, -1, dim)
        queries += torch.einsum("htd,hte->hde", grouped, grouped).double() / (grouped.shape[1] * len(text.q))
    return Moments(keys / mass.clamp(min=1e-12)[:, None, None], queries)


def spectrum_and_maps(found: Moments, scale: float, group: int) -> tuple[np.ndarray, KeyMaps]:
    """float64 [kv_heads, head_dim]: what each direction left out adds to the mean square error of the logits; and the maps of full rank,
    whose first r columns are the best maps of rank r."""
    dim = found.keys.shape[-1]
    unit = torch.eye(dim, dtype=torch.float64)

    def root(x: torch.Tensor) -> torch.Tensor:
        ridge = DAMPING * x.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
        return torch.linalg.cholesky(x + ridge[:, None, None] * unit)

    lk, lq = root(found.keys), root(found.queries)
    u, s, vh = torch.linalg.svd(lk.transpose(-1, -2) @ lq)
    half = s.sqrt()[:, None, :]
    key = torch.linalg.solve_triangular(lk.transpose(-1, -2), u, upper=True) * half
    query = torch.linalg.solve_triangular(lq.transpose(-1, -2), vh.transpose(-1, -2), upper=True) * half
    return (scale * s).square().numpy(), KeyMaps(query.float().repeat_interleave(group, 0), key.float())


def cut(maps: KeyMaps, rank: int) -> KeyMaps:
    """The first `rank` columns. At full rank the identity, so that a cache of whole keys stays exact."""
    if rank == maps.key.shape[1]:
        unit = torch.eye(rank)
        return KeyMaps(unit.repeat(maps.query.shape[0], 1, 1), unit.repeat(maps.key.shape[0], 1, 1))
    return KeyMaps(maps.query[..., :rank].contiguous(), maps.key[..., :rank].contiguous())


def refine(text: LayerText, maps: Maps, steps: int, seed: int = 0) -> Maps:
    """The maps after `steps` of Adam on the mean KL of the attention, each on ROWS queries of one chunk; the best of start and end on
    the held-out chunks is returned. When the end is no better, shorter steps are tried. Projected, each query head gets a map of its own;
    keys still have one per kv head."""
    if steps == 0 or maps.whole or not maps.parts():
        return maps
    start = measure(text, maps).attention_kl
    for rate in (RATE, RATE / 6):
        better = _descend(text, maps, steps, rate, torch.Generator().manual_seed(seed + text.layer))
        if measure(text, better).attention_kl < start:
            return better
    return maps


def _descend(text: LayerText, maps: Maps, steps: int, rate: float, generator: torch.Generator) -> Maps:
    training = [i for i in range(len(text.q)) if not held_out(i, len(text.q))]
    parts = [x.clone().requires_grad_() for x in maps.parts()]

    def loss(step: int) -> torch.Tensor:
        rows = torch.randperm(text.q.shape[2], generator=generator)[:ROWS]
        return _divergence(text, training[step % len(training)], maps.with_parts(parts), rows)

    descend(parts, loss, [rate * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in range(steps)])
    return maps.with_parts([x.detach() for x in parts])


def descend(
    trained: Sequence[torch.Tensor], loss: Callable[[int], torch.Tensor], rates: Sequence[float], stop: Callable[[int], bool] = lambda done: False
) -> bool:
    """Adam on loss(step), a step for each rate, relative to the size of every tensor's own numbers; False when `stop` ended it early."""
    optimizer = torch.optim.Adam([{"params": [x], "size": max(float(x.detach().abs().mean()), 1e-8)} for x in trained], betas=(0.9, 0.95))
    for step, rate in enumerate(rates):
        for group in optimizer.param_groups:
            group["lr"] = rate * group["size"]
        error = loss(step)
        optimizer.zero_grad(set_to_none=True)
        error.backward()
        optimizer.step()
        if stop(step + 1):
            return False
    optimizer.zero_grad(set_to_none=True)
    return True


def held_out(chunk: int, chunks: int) -> bool:
    """Whether a chunk is measured on and not fitted to; of one chunk alone none is, of a few the last."""
    if chunks < HELD_OUT:
        return 0 < chunk == chunks - 1
    return chunk % HELD_OUT == HELD_OUT - 1


def _divergence(text: LayerText, chunk: int, maps: Maps, rows: torch.Tensor) -> torch.Tensor:
    q, k = text.q[chunk][:, rows], text.k[chunk]
    with torch.no_grad():
        full = text.scores.logits(q, k, rows)
    return divergence(full, text.scores.logits(*maps.apply(q, k), rows))


def divergence(full: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
    """Mean over heads and rows of KL(full attention || thin attention), nats, of logits [heads, R, T] with -inf where nothing is seen."""
    return _Divergence.apply(full, thin).mean()


class _Divergence(torch.autograd.Function):
    """KL of every row. Written out because it is most of a step on long texts: its gradient is what the thin attention has too much."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, thin: torch.Tensor) -> torch.Tensor:
        full, thin = full.log_softmax(-1), thin.log_softmax(-1)
        p = full.exp()
        kl = full.sub_(thin).nan_to_num_(0.0).mul_(p).sum(-1)  # what is not seen is the difference of two infinities
        ctx.save_for_backward(p, thin.exp_())
        return kl

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        p, found = ctx.saved_tensors
        return None, (found - p) * grad[..., None]


@torch.no_grad()
def measure(text: LayerText, maps: Maps) -> LayerError:
    """On the held-out chunks, every eighth query."""
    square = kl = count = 0.0
    rows = torch.arange(text.q.shape[2] // 8, text.q.shape[2], 8)
    for chunk in range(len(text.q)):
        if len(text.q) > 1 and not held_out(chunk, len(text.q)):
            continue
        q, k = text.q[chunk][:, rows], text.k[chunk]
        full, thin = text.scores.logits(q, k, rows), text.scores.logits(*maps.apply(q, k), rows)
        weight = full.softmax(-1)
        error = torch.where(weight > 0, thin - full, 0.0)
        error = error - (weight * error).sum(-1, keepdim=True)  # what is the same for all keys changes no attention
        square += float((weight * error.square()).sum(-1).mean())
        kl += float(_divergence(text, chunk, maps, rows))
        count += 1
    return LayerError(math.sqrt(square / count), kl / count)


@dataclass(frozen=True)
class Calibrated:
    """Maps of every layer, and what they cost on held-out text."""

    maps: list[Maps]
    errors: list[LayerError]


def closed_form_of(text: LayerText) -> tuple[np.ndarray, KeyMaps]:
    return spectrum_and_maps(moments(text), text.scores.scale, text.q.shape[1] // text.k.shape[1])


def closed_form(texts: Iterable[LayerText], note: Callable[[int], None] = lambda layer: None) -> tuple[list[np.ndarray], list[KeyMaps]]:
    """Spectra and maps of full rank of every layer, each from its own statistics alone."""
    spectra, maps = [], []
    for text in texts:
        spectrum, full = closed_form_of(text)
        spectra.append(spectrum)
        maps.append(full)
        note(text.layer)
    return spectra, maps


def fit(
    texts: Iterable[LayerText], start: Callable[[LayerText], Maps], steps: int, note: Callable[[int], None] = lambda layer: None
) -> Calibrated:
    """Every layer's maps to start from refined and measured, layer by layer."""
    made, errors = [], []
    for text in texts:
        best = refine(text, start(text), steps)
        made.append(best)
        errors.append(measure(text, best))
        note(text.layer)
    return Calibrated(made, errors)
