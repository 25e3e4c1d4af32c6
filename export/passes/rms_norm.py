"""x * rsqrt(mean(x^2) + eps) * weight, as transformers spells it -> RMSNormalization (opset 23).

The same of x - mean(x) (Cohere) is a LayerNormalization without bias.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgekv.export.passes import match


def apply(model: ir.Model) -> int:
    changes = 0
    for node in list(model.graph):
        if node.op_type != "Mul" or node.domain:
            continue
        for x, scale in match.operands(node):
            epsilon = _epsilon(x, scale)
            if epsilon is not None:
                changes += _fuse(model, node, x, epsilon)
                break
    return changes


def _epsilon(x: ir.Value, scale: ir.Value) -> float | None:
    """eps when scale = 1 / sqrt(mean(x^2 over the last axis) + eps)."""
    inverse = match.producer(scale, "Reciprocal")
    root = match.producer(inverse.inputs[0], "Sqrt") if inverse else None
    if root is None:
        power = match.producer(scale, "Pow")
        if power is None or match.scalar(power.inputs[1]) != -0.5:
            return None
        total = match.producer(power.inputs[0], "Add")
    else:
        total = match.producer(root.inputs[0], "Add")
    if total is None:
        return None
    for mean, epsilon in match.operands(total):
        reduced = match.producer(mean, "ReduceMean")
        number = match.scalar(epsilon)
        if reduced is None or number is None or len(reduced.inputs) < 2:
            continue
        axes, keep = match.constant(reduced.inputs[1]), reduced.attributes.get("keepdims")
        rank = len(x.shape) if x.shape is not None else None
        if axes is None or axes.tolist() not in ([-1], [rank and rank - 1]) or (keep is not None and keep.value == 0):
            continue
        if _is_square(reduced.inputs[0], x):
            return number
    return None


def _is_square(value: ir.Value, x: ir.Value) -> bool:
    power = match.producer(value, "Pow")
    if power is not None:
        return power.inputs[0] is x and match.scalar(power.inputs[1]) == 2.0
    product = match.producer(value, "Mul")
    return product is not None and product.inputs[0] is x and product.inputs[1] is x


def _fuse(model: ir.Model, normalised: ir.Node, x: ir.Value, epsilon: float) -> int:
    size = match.width(x)
    if size is None:
        return 0
    last, weight = normalised, None
    user = match.only_use(normalised.outputs[0])
    if user is not None and user.op_type == "Mul" and user.domain == "":
        other = user.inputs[1] if user.inputs[0] is normalised.outputs[0] else user.inputs[0]
        data = match.tensor(other)
        if data is not None and list(data.shape) == [size]:
            last, weight = user, other
    if weight is None:
        weight = match.initialiser(model, f"ones.{size}", np.ones(size, np.float32))
    op_type, source = ("RMSNormalization", x) if (centred := _centred(x)) is None else ("LayerNormalization", centred)
    new = match.node(op_type, [source, weight], like=last.outputs[0], axis=-1, epsilon=float(epsilon))
    match.before(last, new)
    match.replace(last.outputs[0], new.outputs[0])
    return 1


def _centred(value: ir.Value) -> ir.Value | None:
    """x when value = x - mean(x over the last axis)."""
    difference = match.producer(value, "Sub")
    mean = match.producer(difference.inputs[1], "ReduceMean") if difference is not None else None
    if mean is None or mean.inputs[0] is not difference.inputs[0] or len(mean.inputs) < 2:
        return None
    axes, keep = match.constant(mean.inputs[1]), mean.attributes.get("keepdims")
    last = axes is not None and axes.tolist() in ([-1], [len(value.shape or ()) - 1])
    return difference.inputs[0] if last and (keep is None or keep.value == 1) else None
