"""From a traced graph to the one in the bundle: weights bound, constants folded, rules applied, cache parameters filled in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass
from onnxscript import optimizer

from edgekv import layout
from edgekv.errors import BundleError
from edgekv.export import weights
from edgekv.export.checkpoint import Reader
from edgekv.export.passes import gelu, heads, linear, match, rms_norm, rotary, siblings

SLOTS, QUERY_MAP, KEY_MAP = 7, 8, 9  # the attention node's inputs for chosen slots and for maps to thin keys
KEY_ENCODE, KEY_DECODE = 10, 11  # and for what latent keys are made and rebuilt with
FOLD_BYTES = 1 << 18  # constants up to this size are folded; larger ones are weights


def bind(model: ir.Model, readers: Mapping[str, Reader]) -> None:
    """Gives hollow initialisers their numbers, read from the checkpoint whenever they are asked for."""
    for name, value in model.graph.initializers.items():
        if name in readers:
            value.const_value = weights.Lazy(readers[name], [int(d) for d in value.shape], name)


def clean(model: ir.Model) -> None:
    """Folds small constants, shares equal expressions, drops what nothing reads."""
    optimizer.optimize_ir(
        model,
        onnx_shape_inference=False,
        input_size_limit=FOLD_BYTES,
        output_size_limit=FOLD_BYTES,
        should_fold=lambda node: False if node.op_type == "Transpose" else None,
    )


def sweep(model: ir.Model) -> None:
    """Removes nodes and constants that nothing reads."""
    RemoveUnusedNodesPass()(model)


def simplify(model: ir.Model, fuse_rotary: bool = True) -> dict[int, rotary.Rotation]:
    """Applies the rules that need nothing but standard operators and edgekv's own; returns the rotation of each layer. See widen."""
    clean(model)
    linear.apply(model)
    rms_norm.apply(model)
    gelu.apply(model)
    sweep(model)
    rotations = rotary.apply(model) if fuse_rotary else {}
    sweep(model)
    heads.apply(model)
    sweep(model)
    siblings.pack(model)
    sweep(model)
    return rotations


def widen(model: ir.Model) -> None:
    """The last rule: linear layers of one input become one. What makes queries and keys smaller comes before it."""
    sweep(model)
    siblings.join(model)
    sweep(model)


def set_cache(model: ir.Model, params: Sequence[Mapping], inv_freq: Sequence[Sequence[float]]) -> None:
    """Writes every field of attributes.def, the frequency tables and the state sizes into the graph.

    In front of the attention node of a compressed layer stands a node that chooses the tokens; other layers have none, nor do those of latent
    keys, whose attention node chooses them itself.
    """
    sizes = [layout.state_bytes(p) for p in params]
    for node in match.attentions(model):
        index = node.attributes["layer"].value
        complete = layout.complete(params[index])
        for name, code, _ in layout.FIELDS:
            value = complete[name]
            node.attributes[name] = ir.AttrFloat32(name, float(value)) if code == "f" else ir.AttrInt64(name, int(value))
        node.attributes.pop("query_factor", None)
        node.attributes["inv_freq"] = ir.AttrFloat32s("inv_freq", [float(np.float32(f)) for f in inv_freq[index]])
        node.attributes["plugin_namespace"] = ir.AttrString("plugin_namespace", "")
        node.attributes["plugin_version"] = ir.AttrString("plugin_version", "1")
        node.inputs[4].shape = ir.Shape([sizes[index]])
        node.outputs[1].shape = ir.Shape([sizes[index]])
        _drop_retrieval(model, node)
        _retype_maps(model, node, layout.element_dtype(complete["element"]))
        if layout.is_selfindex(complete) and not complete["latent"]:
            _add_retrieval(node, complete["kv_heads"])


def _retype_maps(model: ir.Model, node: ir.Node, dtype: np.dtype) -> None:
    """Maps to thin keys have the type of what the cache stores: what they make is rounded to it anyway, and every step reads them."""
    for index in range(QUERY_MAP, min(KEY_MAP + 1, len(node.inputs))):
        held = node.inputs[index]
        if held is None or held.const_value is not None and held.const_value.dtype.numpy() == dtype:
            continue
        numbers = _numbers(held)
        node.replace_input_with(index, None)
        if not held.uses():
            del model.graph.initializers[held.name]
        node.replace_input_with(index, match.initialiser(model, held.name, numbers.astype(dtype)))


def _numbers(value: ir.Value) -> np.ndarray:
    """A constant of a graph that may be a bundle's: its data lies inside the bundle (bundle.open_bundle), whatever else is wrong with it."""
    tensor = value.const_value
    try:
        if not isinstance(tensor, ir.ExternalTensor):
            return tensor.numpy()
        # tensor.numpy() refuses files with several names, which those of bundles that share their weights have
        data = np.fromfile(tensor.path, np.uint8, tensor.nbytes, offset=tensor.offset or 0)
        return data.view(tensor.dtype.numpy()).reshape(tensor.shape.numpy())
    except (AttributeError, OSError, TypeError, ValueError):
        raise BundleError(f"The graph's constant {value.name!r} cannot be read; export the model again.") from None


def _drop_retrieval(model: ir.Model, node: ir.Node) -> None:
    if len(node.inputs) <= SLOTS:
        return
    chosen = node.inputs[SLOTS]
    node.replace_input_with(SLOTS, None)
    if len(node.inputs) <= QUERY_MAP:
        node.resize_inputs(SLOTS)
    if chosen is not None and chosen.producer() is not None:
        model.graph.remove(chosen.producer(), safe=True)


def _add_retrieval(node: ir.Node, kv_heads: int) -> None:
    """slots int32 [kv_heads, T, k] from the node's own inputs, read before it appends the new rows to the state."""
    node.resize_inputs(max(len(node.inputs), SLOTS + 1))
    inputs = [*node.inputs[:SLOTS], *node.inputs[QUERY_MAP : QUERY_MAP + 1]]
    retrieval = ir.Node(
        match.EDGEKV, match.RETRIEVAL, inputs, list(node.attributes.values()), num_outputs=1, version=node.version
    )
    slots = retrieval.outputs[0]
    slots.name = f"slots.{node.attributes['layer'].value}"
    slots.shape, slots.type = ir.Shape([kv_heads, None, None]), ir.TensorType(ir.DataType.INT32)
    match.before(node, retrieval)
    node.replace_input_with(SLOTS, slots)


def finish(model: ir.Model) -> None:
    """Names the dynamic sizes, drops traces of the exporter, sorts, declares the operator sets."""
    names = {}
    for value in (*model.graph.inputs, *model.graph.outputs):
        for size in value.shape:
            if isinstance(size, ir.SymbolicDim):
                names.setdefault(str(size), "T" if value.name == "input_ids" else "R")
    for value in (*model.graph.inputs, *model.graph.outputs):
        value.shape = ir.Shape([names.get(str(d), d) if isinstance(d, ir.SymbolicDim) else d for d in value.shape])
    for node in model.graph:
        node.metadata_props.clear()
        node.doc_string = None
        for value in node.outputs:
            value.metadata_props.clear()
            if not value.is_graph_output():
                value.shape = value.type = None
    model.metadata_props.clear()
    model.graph.metadata_props.clear()
    sweep(model)
    TopologicalSortPass()(model)
    used = {node.domain for node in model.graph}
    for domain in list(model.graph.opset_imports):
        if domain not in used:
            del model.graph.opset_imports[domain]
    for domain in used - set(model.graph.opset_imports):
        model.graph.opset_imports[domain] = 1
    model.producer_name, model.producer_version = "edgekv", None
