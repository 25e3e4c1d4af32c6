"""Another cache for the weights of a bundle: the graph's cache parameters and the manifest are written anew, the weights are shared.

Which tokens a cache keeps, how many, and in which precision are attributes of the attention nodes and sizes of the states.
So a policy can be tried in seconds, without the original model. The new bundle must agree with the old one on the parity text.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from tokenizers import Tokenizer

from edgekv import bundle, layout
from edgekv.budget import Budget
from edgekv.bundle import Bundle
from edgekv.errors import BundleError, UserError
from edgekv.export import graph, parity
from edgekv.export.passes import match
from edgekv.geometry import LayerGeometry
from edgekv.policy import CachePolicy, Plan, plan

Report = Callable[[str, int | None, int | None], None]


def is_bundle(model: str) -> bool:
    return (Path(model) / bundle.MANIFEST).is_file()


def geometries(source: Bundle) -> list[LayerGeometry]:
    """What each layer stores per token, read from the manifest."""
    shared = ("q_heads", "kv_heads", "key_dim", "value_dim", "scale", "softcap", "sliding_window", "rotary_dim", "head_dim", "latent")
    return [
        LayerGeometry(
            **{name: layout.complete(layer["params"])[name] for name in shared},
            rotary_interleaved=bool(layer["params"]["rotary_interleaved"]),
            inv_freq=tuple(source.inv_freq(index)),
        )
        for index, layer in enumerate(source.layers)
    ]


def replan(
    source: Bundle,
    target: Path,
    policy: CachePolicy,
    budget: Budget | None,
    chunk: int | None = None,
    check_parity: bool = True,
    force: bool = False,
    report: Report = lambda stage, done, total: None,
) -> Bundle:
    """Writes a bundle with the weights of `source` and another cache to `target`; UserError when that is not possible.

    Weights are hard links where the file system has them, so that a variant takes no room; bundles are never changed in place.
    chunk None: the boundary interval, at most the exporter's default.
    """
    from edgekv.export.exporter import DEFAULT_CHUNK

    planned = plan(policy, geometries(source), budget, source.model["context"])
    params = [
        {**p, "fused_rotary": layer["params"].get("fused_rotary", 0)} for p, layer in zip(planned.layers, source.layers, strict=True)
    ]
    with bundle.create(target, force=force) as partial:
        report("rewriting the graph", None, None)
        _write_graph(source, params, partial)
        for name in source.manifest["files"]:
            if name != source.manifest["graph"]["file"]:
                _share(source.folder / name, partial / name)
        manifest = _manifest(source, planned, params, budget, min(chunk or DEFAULT_CHUNK, planned.boundary))
        if check_parity:
            report("comparing with the first bundle", None, None)
            _compare(source, Bundle(partial, _with_sizes(manifest, partial)), planned)
        report("sealing", None, None)
        bundle.seal(partial, manifest)
    return bundle.open_bundle(target, verify=False)


def _write_graph(source: Bundle, params: list[dict], folder: Path) -> None:
    try:
        model = ir.load(source.graph_path)
    except Exception as error:  # the reader's errors have no common base
        raise BundleError(f"{source.graph_path} cannot be read as an ONNX graph: {error}.") from None
    layers = sorted(node.attributes["layer"].value for node in match.attentions(model) if "layer" in node.attributes)
    if layers != list(range(len(params))):
        raise BundleError(f"{source.graph_path} does not have one attention node per layer of its manifest; export the model again.")
    graph.set_cache(model, params, [source.inv_freq(index) for index in range(len(params))])
    ir.save(model, folder / source.manifest["graph"]["file"])


def _share(existing: Path, new: Path) -> None:
    new.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(existing, new)
    except OSError:  # another file system, or one without hard links
        shutil.copyfile(existing, new)


def _manifest(source: Bundle, planned: Plan, params: list[dict], budget: Budget | None, chunk: int) -> dict[str, Any]:
    old = source.manifest
    layers = [
        {**layer, "params": p, "bytes": size} for layer, p, size in zip(source.layers, params, planned.state_bytes, strict=True)
    ]
    same_numbers = (old["policy"].get("element"), old["policy"].get("format", "dense")) == (planned.policy.element, planned.policy.format)
    return {
        **{name: value for name, value in old.items() if name not in ("format", "version", "created_by", "files")},
        "graph": {**old["graph"], "chunk": chunk},
        "policy": {
            **planned.policy.to_json(),
            "budget": str(budget) if budget else "the model's context",
            "words": planned.describe(),
        },
        "layers": layers,
        "memory": {**old.get("memory", {}), "arena": planned.arena_bytes},
        # the weights are the same: their comparison with the original model holds while keys and values are stored alike
        "parity": old.get("parity") if same_numbers else None,
    }


def _with_sizes(manifest: dict[str, Any], folder: Path) -> dict[str, Any]:
    return {**manifest, "files": {path.name: {"bytes": path.stat().st_size} for path in folder.iterdir()}}


def _compare(source: Bundle, new: Bundle, planned: Plan) -> None:
    """Both read the parity text as far as neither evicts a token; only how keys and values are stored may differ."""
    room = min(planned.held, max(layout.held_tokens(layer["params"]) for layer in source.layers), planned.context)
    text = Tokenizer.from_file(str(source.folder / "tokenizer.json")).encode(parity.TEXT).ids
    ids = np.asarray([i for i in text if i < source.model["vocab"]][: min(room, parity.MOST_TOKENS)], np.int64)
    if ids.size < 2:
        raise UserError(f"The caches are too small to compare {new.folder.name} with {source.folder}; use --no-parity.")
    with parity.running(f"{source.folder} with another cache"):
        logits = parity.bundle_logits(source, ids), parity.bundle_logits(new, ids)
    elements = {source.manifest["policy"].get("element"), planned.policy.element}
    # Integer formats round activations as well, and another boundary makes other blocks of rows: the last bit of a sum can move a code.
    stored = "int8" if source.manifest["weights"]["format"] in ("int8", "int4") else "fp32"
    exact = min((b.boundary for b in (source, new) if b.compressed or b.latent), default=None)
    parity.judged(*logits, ids, parity.LIMITS[stored, "fp32" if elements == {"fp32"} else "fp16"], exact)
