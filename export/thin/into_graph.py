"""Thin keys of an export: calibrated or brought along by the model, written into the graph, and said in the manifest."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from edgekv import layout
from edgekv.errors import UserError
from edgekv.export.load import Source
from edgekv.export.passes import match, thin_keys
from edgekv.export.thin import make, map_file, pairs, ranks, rounding
from edgekv.export.thin.calibrate import Calibrated
from edgekv.export.thin.maps import Maps
from edgekv.geometry import LayerGeometry

NEAR = 0.02  # root mean square, relative; rounding to 4 bits moves what was on no grid by about 0.08


@dataclasses.dataclass(frozen=True)
class Thin:
    """What the cache stores now, the maps that do it, and what the manifest says of it under `keys` (without bytes, see `record`)."""

    geometry: list[LayerGeometry]
    maps: list[Maps]
    form: str
    origin: dict[str, Any]
    errors: Calibrated | None  # None: the model was trained for its maps and brought them
    gone: int  # parameters that the matrices which make queries and keys have lost, biases among them

    def off_grid(self, traced: Any) -> list[Any]:
        """The graph's products whose weights a training has moved off any 4-bit grid: rounding those would cost much of what was learned.
        Of latent keys the maps alone have learned; `edgekv finetune --weights int4` leaves weights on a grid."""
        if self.errors is not None or self.form == "latent":
            return []
        found = []
        for node, g in zip(_nodes(traced), self.geometry, strict=True):
            rows = (g.q_heads + g.kv_heads) * g.given_dim
            packed = rows + g.kv_heads * g.value_dim
            first = node.inputs[1] is None and node.inputs[0].producer().outputs[0] is node.inputs[0]  # also of a product that makes the MLP's numbers too
            found += [product for product in thin_keys.products(node) if not _on_grid(product, rows, packed, first)]
        return found

    def in_cache(self, boundary: int) -> list[Maps]:
        """The maps as a cache with this boundary interval has them at work: its tail holds whole keys beside what is latent."""
        return [dataclasses.replace(layer, interval=boundary) for layer in self.maps] if self.form == "latent" else self.maps


def brought(source: Source, options: make.KeyOptions | None, positions: str) -> list[Maps] | None:
    """The maps that a model has brought along, if it has. UserError, before there is a graph, when they are damaged, when others are asked for,
    and when positions `cache` are with these or those."""
    saved = map_file.load(source.folder)
    if saved is not None and options is not None and options.rank is not None:
        raise UserError(f"{source.name} brings its own thin keys ({source.folder / map_file.FILE}); leave out --key-rank.")
    if saved is None and options is not None and options.rank is None:
        raise UserError(f"--key-form says how keys get thinner, and {source.name} brings no thin keys; give --key-rank too.")
    if positions == "cache" and (saved is not None or options is not None):
        form = saved[0].form if saved else options.form
        whose = f"The thin keys of {source.name} need" if saved else "--key-rank needs"
        why = "each head turns at frequencies of its own and is not turned again" if form == "pairs" else "keys that were mapped to fewer numbers cannot be turned to another position"
        raise UserError(f"{whose} --positions original: {why}.")
    return saved


def apply(
    traced: Any, source: Source, saved: Sequence[Maps] | None, options: make.KeyOptions | None, geometry: Sequence[LayerGeometry], context: int,
    report: make.Report,
) -> Thin | None:  # fmt: skip
    """Changes the graph; saved: see brought. None when neither the options nor the model ask for thin keys. UserError when they cannot be had."""
    if saved is None and (options is None or options.rank is None):
        return None
    nodes = _nodes(traced)
    form = _form(saved, options, traced, source.name)
    check(traced, form, geometry, options.rank if options else None)
    if saved is not None:
        made, errors = map_file.fitted(saved, geometry, str(source.folder / map_file.FILE)), None
        origin = {"rank": "of the model", "text": None, "tokens": 0}
    else:
        found = errors = make.from_text(source, options, form, geometry, context, report)
        made, text = found.maps, options.text
        origin = {"rank": str(options.rank), "text": text.name if text else "the text that comes with edgekv", "tokens": options.tokens}
    thinner, turned, gone = [], [], 0
    for node, g, layer in zip(nodes, geometry, made, strict=True):
        if form == "latent":
            thin_keys.make_latent(traced, node, *layer.arrays())
            thinner.append(dataclasses.replace(g, latent=layer.rank))
            continue
        if form == "pairs":
            gone += thin_keys.leave_out(traced, node, layer.numbers.numpy(), g.key_dim, g.value_dim)
            turned.append((node, layer.pairs.numpy()))
            left = 2 * layer.pairs.shape[1]
            thinner.append(dataclasses.replace(g, key_dim=layer.rank, rotary_dim=left, inv_freq=()))
            continue
        query, key = layer.query.numpy(), layer.key.numpy()
        if form == "absorbed":
            gone += thin_keys.absorb(traced, node, query, key, g.value_dim)
            thinner.append(dataclasses.replace(g, key_dim=layer.rank))
        else:
            thin_keys.project(traced, node, query, key)
            thinner.append(dataclasses.replace(g, key_dim=layer.rank, head_dim=g.key_dim))
    thin_keys.turn_by_head(traced, turned)
    return Thin(thinner, list(made), form, origin, errors, gone)


def _on_grid(product: Any, rows: int, packed: int, first: bool) -> bool:
    """Whether 4 bits hold the weights of a MatMul as they are, but for what their number format changes. Of one with `packed` outputs, or
    more behind those (first), the first `rows` are queries and keys, and all others, which no training has changed, do not count."""
    data = match.tensor(product.inputs[1])
    if data is None:
        return False
    weight = torch.from_numpy(np.ascontiguousarray(data.numpy().T))
    if len(weight) == packed or first and len(weight) > packed:
        weight = weight[:rows]
    return float((rounding.rounded(weight) - weight).square().mean()) <= NEAR**2 * float(weight.square().mean())


def _nodes(traced: Any) -> list[Any]:
    return sorted(match.attentions(traced), key=lambda node: node.attributes["layer"].value)


def _bent(traced: Any) -> list[int]:
    """Layers that do something between their linear layer and their scores."""
    return [layer for layer, node in enumerate(_nodes(traced)) if thin_keys.straight(node) is None]


def _fixed(traced: Any, geometry: Sequence[LayerGeometry]) -> list[int]:
    """Layers whose rotary pairs cannot leave their weights."""
    return [layer for layer, node in enumerate(_nodes(traced)) if not geometry[layer].rotary_dim or thin_keys.straight(node, rotates=True) is None]


def to_train(traced: Any, geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank | None) -> str:
    """The form that a model which will be trained for thin keys of these ranks decodes fastest with: pairs where they can be left out."""
    if _fixed(traced, geometry):
        return "projected"
    try:
        pairs.check(geometry, wanted)
    except UserError:
        return "projected"
    return "pairs"


def _form(saved: Sequence[Maps] | None, options: make.KeyOptions | None, traced: Any, name: str) -> str:
    """What keys get thinner by; UserError when the model was trained for something else."""
    wanted, trained = options.form if options else None, saved[0].form if saved else None
    if trained and wanted and trained != wanted and (trained, wanted) != ("projected", "absorbed"):
        raise UserError(f"The thin keys that {name} brings were trained as {trained} ones; leave out --key-form {wanted}.")
    if trained in ("latent", "pairs"):
        return trained
    return wanted or ("projected" if _bent(traced) else "absorbed")


def check(traced: Any, form: str, geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank | None, rounded: bool = False) -> None:
    """UserError when keys of this graph cannot be had in the form, of the ranks that are wanted (None: of those of a model), or weights not
    on a 4-bit grid (rounded) with it."""
    nodes, bent = _nodes(traced), _bent(traced)
    if rounded and form == "projected" and not bent:
        raise UserError("Maps of this model are multiplied into its weights, which takes those off any grid; leave out --weights int4.")
    if form == "absorbed" and bent:
        raise UserError(thin_keys.WHY_NOT.format(layer=bent[0]))
    if form == "pairs" and (fixed := _fixed(traced, geometry)):
        raise UserError(
            f"Rotary pairs can be left out where a rotation is all that comes between a linear layer and the scores, and in layer {fixed[0]} it is not; use --key-form projected."
        )
    if form == "pairs":
        pairs.check(geometry, wanted)
    if form != "latent":
        return
    for layer in bent:
        turns = len(nodes[layer].inputs) > 6 and nodes[layer].inputs[5] is not None
        if not turns or not geometry[layer].inv_freq:
            raise UserError(
                f"Latent keys are made before the rotation, and that of layer {layer} was not recognised in the graph; use --key-form projected."
            )


def record(thin: Thin, params: Sequence[dict], whole: Sequence[LayerGeometry]) -> dict[str, Any]:
    """Section `keys` of the manifest: form, ranks, bytes of one token's keys over all layers now and before, errors per layer."""
    size = [layout.element_bytes(p) for p in params]
    section = {
        "form": thin.form,
        **thin.origin,
        "ranks": [g.latent or g.key_dim for g in thin.geometry],
        "token_bytes": sum(layout.latent_bytes(p) or e * g.key_numbers for p, e, g in zip(params, size, thin.geometry, strict=True)),
        "token_bytes_whole": sum(e * g.key_numbers for e, g in zip(size, whole, strict=True)),
        "score_error": None,
        "attention_kl": None,
    }
    if thin.errors is not None:
        section["score_error"] = [round(e.score_error, 5) for e in thin.errors.errors]
        section["attention_kl"] = [round(e.attention_kl, 6) for e in thin.errors.errors]
    return section

