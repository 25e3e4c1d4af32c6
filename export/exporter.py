"""The whole way from a model to a sealed bundle: find, plan, trace, simplify, put in a weight format, write, compare."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edgekv import bundle, layout
from edgekv.bundle import Bundle
from edgekv.errors import UserError
from edgekv.export import checkpoint, formats, graph, load, parity, refuse, rope, short_head, trace, write
from edgekv.export.attention import NAME
from edgekv.export.passes import match
from edgekv.export.passes.rotary import Rotation
from edgekv.export.thin import into_graph, ranks
from edgekv.export.thin.make import KeyOptions
from edgekv.generation.text import DRAFT_TOKENS
from edgekv.geometry import LayerGeometry
from edgekv.memory import on_device
from edgekv.memory.model import shape_from_config
from edgekv.memory.profiles import Profile
from edgekv.memory.weights import weight_format
from edgekv.policy import Budget, CachePolicy, Plan, format_bytes, plan

DEFAULT_CHUNK = 512
SPARE_DISK = 64 << 20  # free bytes that are left alone

Report = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True)
class Options:
    """What `edgekv export` was asked for. context None: the model's own; chunk None: the boundary interval; device: the
    profile that the budget is chosen for, or judged by when one is given; keys: how keys are stored in fewer numbers, None: as they are;
    head: which rows of the output layer stay, None: all.
    """

    policy: CachePolicy
    budget: Budget | None
    weights: str = "fp16"
    context: int | None = None
    chunk: int | None = None
    check_parity: bool = True
    force: bool = False
    device: Profile | None = None
    keys: KeyOptions | None = None
    head: short_head.HeadOptions | None = None


def export(model: str, target: Path, options: Options, report: Report = lambda stage, done, total: None) -> Bundle:
    """Writes a bundle of `model` to `target`; UserError (nothing left behind) when that is not possible.

    report(stage, done, total) is told what is going on; done and total are None while a stage cannot count.
    """
    source = load.find(model, lambda text: report(f"loading: {text}", None, None))
    if options.head is not None:
        source = short_head.shorten(source, options.head)
    return export_source(source, target, options, report)


def export_source(source: load.Source, target: Path, options: Options, report: Report = lambda stage, done, total: None) -> Bundle:
    """The same for a model that was found."""
    context = rope.choose_context(source.config, options.context)
    saved = into_graph.brought(source, options.keys, options.policy.positions)
    if options.check_parity:
        parity.check_memory(source)
    said = None
    if options.device is not None:
        shape = shape_from_config(source.config.to_dict(), source.name)
        said = on_device.choose(shape, options.policy, options.budget, weight_format(options.weights), options.device, context)
        options = dataclasses.replace(options, budget=said.budget)
    with bundle.create(target, force=options.force) as partial:
        report("looking at the layers", None, None)
        hollow, geometry = _examine(source, context)
        if options.policy.positions == "original":  # fail early; rotary frequencies are known only after tracing
            plan(options.policy, geometry, options.budget, context)
        traced, rotations = _trace(source, hollow, len(geometry), report)
        geometry = whole = _complete(traced, geometry, rotations)
        thin = into_graph.apply(traced, source, saved, options.keys, geometry, context, report)
        graph.widen(traced)
        geometry = thin.geometry if thin else geometry
        planned = plan(options.policy, geometry, options.budget, context)
        turned = layout.BY_HEAD if thin and thin.form == "pairs" else 1
        params = [{**p, "fused_rotary": turned if i in rotations else 0} for i, p in enumerate(planned.layers)]
        formats.apply(traced, options.weights, thin.off_grid(traced) if thin and options.weights == "int4" else ())
        graph.set_cache(traced, params, [g.inv_freq for g in geometry])
        graph.finish(traced)

        _check_disk(partial, write.external_bytes(traced) + len(source.tokenizer), target)
        write.write(traced, partial, lambda done, total: report("writing weights", done, total))
        (partial / "tokenizer.json").write_text(source.tokenizer, encoding="utf-8")
        if source.token_ids is not None:
            (partial / DRAFT_TOKENS).write_bytes(source.token_ids.astype("<i4").tobytes())
        if source.chat_template:
            (partial / "chat_template.jinja").write_text(source.chat_template, encoding="utf-8")
        manifest = _manifest(source, hollow, options, planned, params, geometry, context, partial)
        if thin is not None:
            manifest["keys"] = into_graph.record(thin, params, whole)
            manifest["model"]["parameters"] -= thin.gone  # pairs and absorbed keys make matrices smaller
        if source.cut_head:
            manifest["draft"] = {"head_tokens": len(source.token_ids), "coverage": source.coverage}
        if said is not None:
            manifest["device"] = {"name": options.device.name, "words": said.words}
        if options.check_parity:
            report("comparing with the original model", None, None)
            files = {p.name: {"bytes": p.stat().st_size} for p in partial.iterdir()}
            found = parity.check(source, Bundle(partial, {**manifest, "files": files}), _room(planned), thin.in_cache(planned.boundary) if thin else None)
            manifest["parity"] = found.to_json()
        report("sealing", None, None)
        bundle.seal(partial, manifest)
    return bundle.open_bundle(target, verify=False)


def whole_geometry(
    source: load.Source, context: int, report: Report, form: str | None, rounded: bool = False, wanted: ranks.KeyRank | None = None
) -> tuple[list[LayerGeometry], str]:
    """What every layer of a model stores, its rotation included, and the form of thin keys: the one given, or the one to be trained when none
    is (into_graph.to_train). The graph that tells is thrown away. UserError as for an export with thin keys of this form; see into_graph.check."""
    hollow, geometry = _examine(source, context)
    traced, rotations = _trace(source, hollow, len(geometry), report)
    complete = _complete(traced, geometry, rotations)
    form = form or into_graph.to_train(traced, complete, wanted)
    into_graph.check(traced, form, complete, wanted, rounded)
    return complete, form


def layer_shapes(source: load.Source, context: int) -> list[LayerGeometry]:
    """What every layer of a model stores, without its rotation, which only a graph tells."""
    return _examine(source, context)[1]


def _examine(source: load.Source, context: int) -> tuple[Any, list[LayerGeometry]]:
    """The model without its weights, and the shapes of its layers."""
    hollow = _build(source)
    rope.freeze(hollow, context)
    with _sentences(f"The layers of {source.name} ({source.config.model_type}) could not be examined"):
        return hollow, trace.discover(hollow)


def _trace(source: load.Source, hollow: Any, layers: int, report: Report) -> tuple[Any, dict[int, Rotation]]:
    """The simplified graph of a hollow model, with weights that are read when they are asked for, and the rotation of each layer."""
    if source.cut_head:
        readers = short_head.readers(source, hollow)
    else:
        readers = checkpoint.match(hollow, source.checkpoint) or checkpoint.load_whole(source.folder, source.config, hollow)
    report("tracing", None, None)
    with _sentences(f"{source.name} ({source.config.model_type}) could not be turned into a graph"):
        traced = trace.trace(hollow, layers)
        graph.bind(traced, readers)
        report("simplifying the graph", None, None)
        return traced, graph.simplify(traced)


@contextlib.contextmanager
def _sentences(what: str) -> Iterator[None]:
    """Errors of torch's and onnxscript's own, which no list of unsupported features can foresee, as one sentence."""
    try:
        yield
    except (UserError, OSError, MemoryError):
        raise
    except Exception as error:
        while error.__cause__ is not None:  # the innermost says what happened, those around it where
            error = error.__cause__
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{what}: {reason}") from error


def _build(source: load.Source) -> Any:
    try:
        model = checkpoint.ghost(source.config)
    except UserError:
        raise
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (NAME,):  # a class that knows its own attentions only
            raise UserError(
                f"{source.config.model_type} does not route its attention through transformers' attention interface, so edgekv cannot export it."
            ) from None
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"transformers cannot build {source.name} ({source.config.model_type}) as a causal language model: {reason}") from None
    refuse.check_model(model)
    if source.token_ids is not None:
        checkpoint.fit_head(model, len(source.token_ids), hollow=True)
    return model


def _complete(traced: Any, geometry: Sequence[LayerGeometry], rotations: dict[int, Rotation]) -> list[LayerGeometry]:
    """Adds what only the graph tells: rotations, and factors that the model applies to its queries."""
    factors = {n.attributes["layer"].value: n.attributes["query_factor"].value for n in match.attentions(traced) if "query_factor" in n.attributes}
    complete = []
    for index, layer in enumerate(geometry):
        layer = dataclasses.replace(layer, scale=layer.scale * factors.get(index, 1.0))
        if (rotation := rotations.get(index)) is not None:
            layer = dataclasses.replace(
                layer, rotary_dim=rotation.dim, rotary_interleaved=rotation.interleaved, inv_freq=rotation.inv_freq
            )
        complete.append(layer)
    return complete


def _room(planned: Plan) -> int:
    """Tokens that fit without evicting any: a compaction when the text ends exactly at a boundary needs them all in the body."""
    return min(planned.held, planned.context)


def _check_disk(folder: Path, needed: int, target: Path) -> None:
    free = shutil.disk_usage(folder).free
    if needed + SPARE_DISK > free:
        raise UserError(f"{target} needs {format_bytes(needed)} and the disk has {format_bytes(free)} free; choose another disk or smaller --weights.")


def _manifest(
    source: load.Source, model: Any, options: Options, planned: Plan, params: list[dict], geometry: list[LayerGeometry], context: int, folder: Path
) -> dict[str, Any]:
    tables: list[list[float]] = []
    for layer in geometry:
        if layer.inv_freq and list(layer.inv_freq) not in tables:
            tables.append(list(layer.inv_freq))
    head = model.get_output_embeddings()
    vocab, hidden = head.weight.shape
    weight_bytes = sum((folder / name).stat().st_size for name in (write.GRAPH, write.DATA) if (folder / name).is_file())
    return {
        "model": {
            "name": source.name,
            "architecture": source.config.model_type,
            "layers": len(geometry),
            "hidden": int(hidden),
            "vocab": int(vocab),
            "context": context,
            "bos_token_id": source.bos_token_id,
            "eos_token_ids": source.eos_token_ids,
            "parameters": sum(math.prod(p.shape) for p in model.parameters()),
            "tied_embedding": model.get_input_embeddings().weight is head.weight,  # a step reads the table only if it is the output matrix
        },
        "graph": {"file": write.GRAPH, "chunk": min(options.chunk or DEFAULT_CHUNK, planned.boundary), "opset": trace.OPSET},
        "policy": {**planned.policy.to_json(), "budget": str(options.budget) if options.budget else "the model's context", "words": planned.describe()},
        "layers": [
            {"params": p, "bytes": size, "inv_freq": tables.index(list(g.inv_freq)) if g.inv_freq else None}
            for p, size, g in zip(params, planned.state_bytes, geometry, strict=True)
        ],
        "inv_freq": tables,
        "memory": {"arena": planned.arena_bytes, "weights": weight_bytes, "logits": 4 * int(vocab)},
        "weights": {"format": options.weights, "bytes": weight_bytes},
        "parity": None,
        "generation": source.generation,
    }
