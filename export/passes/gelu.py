"""0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), spelled out by GPT-2, GPT-J and phi -> Gelu with the tanh approximation."""

from __future__ import annotations

import math

import onnx_ir as ir

from edgekv.export.passes import match


def apply(model: ir.Model) -> int:
    changes = 0
    for node in list(model.graph):
        if node.op_type != "Tanh" or node.domain:
            continue
        x = _cubic(node.inputs[0])
        shifted = match.only_use(node.outputs[0])
        result = match.only_use(shifted.outputs[0]) if shifted is not None else None
        if x is None or result is None or not _is_half_of(result, shifted.outputs[0], x) or not _adds_one(shifted, node.outputs[0]):
            continue
        new = match.node("Gelu", [x], like=result.outputs[0], approximate="tanh")
        match.before(result, new)
        match.replace(result.outputs[0], new.outputs[0])
        changes += 1
    return changes


def _near(value: ir.Value, number: float) -> bool:
    found = match.scalar(value)
    return found is not None and abs(found - number) <= 1e-6


def _scaled(value: ir.Value, number: float) -> ir.Value | None:
    """y when value = y * number."""
    product = match.producer(value, "Mul")
    if product is None:
        return None
    return next((y for y, factor in match.operands(product) if _near(factor, number)), None)


def _cubic(value: ir.Value) -> ir.Value | None:
    """x when value = sqrt(2 / pi) * (x + 0.044715 * x^3)."""
    inner = _scaled(value, math.sqrt(2.0 / math.pi))
    total = match.producer(inner, "Add")
    if total is None:
        return None
    for x, third in match.operands(total):
        power = match.producer(_scaled(third, 0.044715), "Pow")
        if power is not None and power.inputs[0] is x and match.scalar(power.inputs[1]) == 3.0:
            return x
    return None


def _adds_one(node: ir.Node, value: ir.Value) -> bool:
    return node.op_type == "Add" and any(a is value and _near(b, 1.0) for a, b in match.operands(node))


def _is_half_of(node: ir.Node, value: ir.Value, x: ir.Value) -> bool:
    """Whether node = (0.5 * x) * value."""
    return node.op_type == "Mul" and any(a is value and _scaled(b, 0.5) is x for a, b in match.operands(node))
