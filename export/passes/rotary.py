"""x * cos + rotate_half(x) * sin in front of the attention node -> the node rotates queries and keys itself (fused_rotary = 1).

That saves about ten nodes per layer, and tells which rotation a model uses: the frequencies behind cos and sin, the number of
rotated dimensions and how they are paired. All of it is read from the graph, none of it from the model's class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from edgekv.export.passes import frequencies, match


@dataclass(frozen=True)
class Rotation:
    """Of one layer: cos and sin are [1, T, dim or dim / 2] values of the graph, inv_freq [dim / 2] or, when unknown, empty."""

    cos: ir.Value
    sin: ir.Value
    dim: int
    interleaved: bool
    inv_freq: tuple[float, ...]


@dataclass(frozen=True)
class _Rotated:
    source: ir.Value  # what is rotated, [1, heads, T, key_dim]
    cos: ir.Value
    sin: ir.Value
    dim: int
    interleaved: bool


def apply(model: ir.Model) -> dict[int, Rotation]:
    """Layer -> its rotation, for the layers where both queries and keys matched."""
    found: dict[int, Rotation] = {}
    halved: dict[ir.Value, ir.Value] = {}
    known: dict[tuple[ir.Value, ir.Value], tuple[float, ...]] = {}
    for node in match.attentions(model):
        q, k = _rotated(node.inputs[0]), _rotated(node.inputs[1])
        if q is None or k is None or (q.cos, q.sin, q.dim, q.interleaved) != (k.cos, k.sin, k.dim, k.interleaved):
            continue
        cos, sin = _table(q.cos), _table(q.sin)
        if cos is None or sin is None:
            continue
        if (cos, sin) not in known:
            known[cos, sin] = frequencies.find(model, cos, sin, q.dim, q.interleaved)
        inv_freq = known[cos, sin]
        if q.interleaved:  # such tables hold every number twice in a row
            cos, sin = (_every_second(model, table, halved) for table in (cos, sin))
        node.replace_input_with(0, q.source)
        node.replace_input_with(1, k.source)
        node.resize_inputs(7)
        node.replace_input_with(5, cos)
        node.replace_input_with(6, sin)
        found[node.attributes["layer"].value] = Rotation(cos, sin, q.dim, q.interleaved, inv_freq)
    return found


def _rotated(value: ir.Value) -> _Rotated | None:
    """Recognises a rotated [1, heads, T, key_dim], wholly or in its leading dimensions."""
    joint = match.producer(value, "Concat")
    if joint is not None and len(joint.inputs) == 2:
        inner, rest = _rotated(joint.inputs[0]), match.sliced(joint.inputs[1])
        if inner is None:
            return None
        lead = match.sliced(inner.source)
        if rest is None or lead is None:
            return inner if match.width(joint.inputs[1]) == 0 else None
        (source, first, last), (other, start, stop) = lead, rest
        whole = source is other and first == 0 and last == start == inner.dim and stop == match.width(source)
        return _Rotated(source, inner.cos, inner.sin, inner.dim, inner.interleaved) if whole else None
    total = match.producer(value, "Add")
    if total is None:
        return None
    for a, b in match.operands(total):
        straight, crossed = match.producer(a, "Mul"), match.producer(b, "Mul")
        if straight is None or crossed is None:
            continue
        for x, cos in match.operands(straight):
            for turned, sin in match.operands(crossed):
                found = _pairing(turned, x)
                size = match.width(x)
                if found is not None and size is not None and match.width(cos) == size == match.width(sin):
                    return _Rotated(x, cos, sin, size, found)
    return None


def _pairing(turned: ir.Value, x: ir.Value) -> bool | None:
    """False when turned = concat(-x[second half], x[first half]), True for pairs (2i, 2i + 1), None otherwise."""
    size = match.width(x)
    joint = match.producer(turned, "Concat")
    if joint is not None and len(joint.inputs) == 2 and size:
        negative = match.producer(joint.inputs[0], "Neg")
        if negative is not None:
            second, first = match.sliced(negative.inputs[0]), match.sliced(joint.inputs[1])
            if second == (x, size // 2, size) and first == (x, 0, size // 2):
                return False
    return True if _interleaved(turned, x, size) else None


def _interleaved(turned: ir.Value, x: ir.Value, size: int | None) -> bool:
    """turned = stack(-x[1::2], x[0::2]) flattened: Reshape(Concat(Unsqueeze(Neg(odd)), Unsqueeze(even)))."""
    flat = match.producer(turned, "Reshape")
    joint = match.producer(flat.inputs[0], "Concat") if flat is not None else None
    if joint is None or len(joint.inputs) != 2 or not size or not match.same_shape(turned, x):
        return False
    odd, even = (_last_axis_added(part) for part in joint.inputs)
    negative = match.producer(odd, "Neg")
    return (
        negative is not None
        and match.sliced(negative.inputs[0], step=2) == (x, 1, size)
        and match.sliced(even, step=2) == (x, 0, size)
    )


def _last_axis_added(value: ir.Value) -> ir.Value | None:
    """What an Unsqueeze gave a new last axis."""
    lifted = match.producer(value, "Unsqueeze")
    axes = match.constant(lifted.inputs[1]) if lifted is not None else None
    source = lifted.inputs[0] if lifted is not None else None
    if axes is None or source.shape is None or axes.tolist() not in ([-1], [len(source.shape)]):
        return None
    return source


def _every_second(model: ir.Model, table: ir.Value, made: dict[ir.Value, ir.Value]) -> ir.Value:
    """table[..., ::2], made once per table."""
    if table not in made:
        numbers = {"rotary.first": 0, "rotary.end": 1 << 62, "rotary.axis": 2, "rotary.step": 2}
        bounds = [match.initialiser(model, name, np.array([n], np.int64)) for name, n in numbers.items()]
        half = match.node("Slice", [table, *bounds])
        half.outputs[0].shape = ir.Shape([*table.shape[:2], table.shape[2] // 2])
        half.outputs[0].type = table.type
        match.after(table.producer(), half)
        made[table] = half.outputs[0]
    return made[table]


def _table(value: ir.Value) -> ir.Value | None:
    """The [1, T, dim] table behind the [1, 1, T, dim] one that multiplies queries."""
    lifted = match.producer(value, "Unsqueeze")
    table = lifted.inputs[0] if lifted is not None else value
    return table if table.shape is not None and len(table.shape) == 3 and table.shape[0] == 1 else None
