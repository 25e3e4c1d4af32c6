"""Linear layers with the same input become one: q, k and v feed the attention node packed, gate and up share one MatMul.

One wide MatMul reads its weights faster than three narrow ones, and every node costs a few microseconds per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgekv.export.passes import match
from edgekv.export.weights import joined


@dataclass(frozen=True)
class Linear:
    """x @ weight (+ bias), weight [K, N] constant; `result` is what the rest of the graph reads."""

    product: ir.Node
    weight: ir.TensorProtocol
    bias: ir.TensorProtocol | None
    result: ir.Value


def linear(product: ir.Node) -> Linear | None:
    """A MatMul with a constant matrix, together with the Add of a constant bias that alone reads it."""
    if product.op_type != "MatMul" or product.domain:
        return None
    weight = match.tensor(product.inputs[1])
    if weight is None or len(weight.shape) != 2 or weight.shape[1] < 2:
        return None
    user = match.only_use(product.outputs[0])
    if user is not None and user.op_type == "Add" and user.domain == "":
        other = user.inputs[1] if user.inputs[0] is product.outputs[0] else user.inputs[0]
        bias = match.tensor(other)
        if bias is not None and list(bias.shape) == [weight.shape[1]]:
            return Linear(product, weight, bias, user.outputs[0])
    return Linear(product, weight, None, product.outputs[0])


def apply(model: ir.Model) -> int:
    return pack(model) + join(model)


def pack(model: ir.Model) -> int:
    """Attention nodes take queries, keys and values in one piece where one linear layer can make them."""
    return sum(_pack(model, node) or _take_packed(node) for node in match.attentions(model))


def join(model: ir.Model) -> int:
    """All other linear layers of one input become one; where attention and MLP are parallel, what `pack` has made is among them, so thin keys,
    which make that smaller, come before."""
    return sum(_join(model, group) for group in _groups(model))


def _pack(model: ir.Model, node: ir.Node) -> int:
    """q, k and v straight from linear layers of one input: the node takes them packed."""
    if any(v is None or v.producer() is None for v in node.inputs[:3]):
        return 0
    parts = []
    for value in node.inputs[:3]:
        maker = value.producer()
        product = maker if maker.op_type == "MatMul" else next(
            (v.producer() for v in maker.inputs if v is not None and match.producer(v, "MatMul")), None
        )  # fmt: skip
        found = linear(product) if product is not None else None
        if found is None or found.result is not value or match.only_use(value) is not node:
            return 0
        parts.append(found)
    if len({id(p.product.inputs[0]) for p in parts}) != 1 or len({p.bias is None for p in parts}) != 1:
        return 0
    packed = _wide(model, parts)
    node.replace_input_with(0, packed)
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    return 1


def _take_packed(node: ir.Node) -> int:
    """q, k and v cut from one value in this order (GPT-2, phi3): the node takes that value as it is."""
    parts = [match.sliced(value) if value is not None else None for value in node.inputs[:3]]
    if any(part is None for part in parts):
        return 0
    (source, start, a), (second, b, c), (third, d, end) = parts
    if source is not second or source is not third or len(source.shape) != 3:
        return 0
    if (start, a, c, end) != (0, b, d, match.width(source)):
        return 0
    node.replace_input_with(0, source)
    node.replace_input_with(1, None)
    node.replace_input_with(2, None)
    return 1


def _groups(model: ir.Model) -> list[list[Linear]]:
    by_input: dict[int, list[Linear]] = {}
    for node in model.graph:
        found = linear(node)
        if found is not None and match.width(found.result) is not None and any(found.result.uses()):
            by_input.setdefault(id(node.inputs[0]), []).append(found)
    groups = []
    for members in by_input.values():
        for biased in (False, True):
            group = [m for m in members if (m.bias is not None) == biased]
            if len(group) > 1:
                groups.append(group)
    return groups


def _join(model: ir.Model, group: list[Linear]) -> int:
    widths = [part.weight.shape[1] for part in group]
    results = [part.result for part in group]
    packed = _wide(model, group)
    sizes = match.initialiser(model, "split." + "_".join(map(str, widths)), np.array(widths, np.int64))
    split = match.node("Split", [packed, sizes], outputs=len(group), axis=-1)
    match.after(packed.producer(), split)
    for old, new in zip(results, split.outputs, strict=True):
        new.shape, new.type = old.shape, old.type
        match.replace(old, new)
    return 1


def _wide(model: ir.Model, parts: list[Linear]) -> ir.Value:
    """One linear layer for all parts, put where the first of them is; they are left without readers by the caller."""
    first = parts[0].product
    name = "+".join(p.product.inputs[1].name.removesuffix(".t") for p in parts)
    weight = match.initialiser(model, f"{name}.t", joined([p.weight for p in parts], f"{name}.t"))
    product = match.node("MatMul", [first.inputs[0], weight])
    new = [product]
    if parts[0].bias is not None:
        bias = match.initialiser(model, f"{name}.bias", joined([p.bias for p in parts], f"{name}.bias"))
        new.append(match.node("Add", [product.outputs[0], bias]))
    shape = first.inputs[0].shape
    for made in new:
        made.outputs[0].shape = ir.Shape([*shape[:-1], weight.shape[-1]]) if shape is not None else None
        made.outputs[0].type = parts[0].result.type
    match.before(first, *new)
    return new[-1].outputs[0]
