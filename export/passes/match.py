"""What graph rules share: looking at producers and constants, and putting new nodes in place of old ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

MICROSOFT = "com.microsoft"
EDGEKV = "edgekv"
ATTENTION = "BoundedCacheAttention"
RETRIEVAL = "SignVQRetrieval"
SMALL = 1 << 16  # elements; constants up to this size are looked at by value


def producer(value: ir.Value | None, op_type: str, domain: str = "") -> ir.Node | None:
    """The node that computes `value` when it is of this type."""
    node = value.producer() if value is not None else None
    return node if node is not None and node.op_type == op_type and node.domain == domain else None


def tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The constant behind a value (initialiser or Constant node), None for computed values and graph inputs."""
    if value is None or value.is_graph_input():
        return None
    return ir.convenience.get_const_tensor(value)


def constant(value: ir.Value | None) -> np.ndarray | None:
    """The numbers of a small constant."""
    found = tensor(value)
    return found.numpy() if found is not None and found.size <= SMALL else None


def scalar(value: ir.Value | None) -> float | None:
    """The number of a constant with one element."""
    found = constant(value)
    return float(found.reshape(-1)[0]) if found is not None and found.size == 1 else None


def operands(node: ir.Node) -> tuple[tuple[ir.Value, ir.Value], ...]:
    """Both orders of the two inputs of a commutative node."""
    a, b = node.inputs
    return ((a, b), (b, a))


def only_use(value: ir.Value) -> ir.Node | None:
    """The one node that reads a value, None when there are more or when it is a graph output."""
    users = [use.node for use in value.uses()]
    return users[0] if len(users) == 1 and not value.is_graph_output() else None


def same_shape(a: ir.Value, b: ir.Value) -> bool:
    """Whether two values are known to have the same shape, symbolic sizes included."""
    if a.shape is None or b.shape is None or len(a.shape) != len(b.shape):
        return False
    return all(str(x) == str(y) and str(x) != "None" for x, y in zip(a.shape, b.shape, strict=True))


def width(value: ir.Value, axis: int = -1) -> int | None:
    """Size of one axis when it is a known number."""
    if value.shape is None or len(value.shape) < (-axis if axis < 0 else axis + 1):
        return None
    return value.shape[axis] if isinstance(value.shape[axis], int) else None


def sliced(value: ir.Value, step: int = 1) -> tuple[ir.Value, int, int] | None:
    """(source, start, stop) of a slice of the last axis, or of one output of a Split of it."""
    node = value.producer()
    if node is None:
        return None
    size = width(node.inputs[0]) if node.inputs else None
    if size is None:
        return None
    if node.op_type == "Slice" and node.domain == "":
        numbers = [constant(i) for i in node.inputs[1:]]
        if any(n is None or n.size != 1 for n in numbers) or len(numbers) < 3:
            return None
        start, stop, axis = (int(n.reshape(-1)[0]) for n in numbers[:3])
        stride = int(numbers[3].reshape(-1)[0]) if len(numbers) > 3 else 1
        if axis not in (-1, len(node.inputs[0].shape) - 1) or stride != step:
            return None
        start, stop = (n + size if n < 0 else min(n, size) for n in (start, stop))
        return node.inputs[0], start, stop
    if node.op_type == "Split" and node.domain == "" and step == 1:
        axis = node.attributes["axis"].value if "axis" in node.attributes else 0
        widths = [width(o) for o in node.outputs]
        if axis not in (-1, len(node.inputs[0].shape) - 1) or None in widths:
            return None
        index = node.outputs.index(value)
        return node.inputs[0], sum(widths[:index]), sum(widths[: index + 1])
    return None


def replace(old: ir.Value, new: ir.Value) -> None:
    """Lets every reader of `old` read `new`, which takes over its name where it is a graph output."""
    if new.shape is None:
        new.shape = old.shape
    if new.dtype is None:
        new.dtype = old.dtype
    if old.is_graph_output():
        old.name, new.name = None, old.name
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)


def before(anchor: ir.Node, *nodes: ir.Node) -> None:
    """Inserts nodes so that they run before `anchor`."""
    anchor.graph.insert_before(anchor, nodes)


def after(anchor: ir.Node, *nodes: ir.Node) -> None:
    anchor.graph.insert_after(anchor, nodes)


def initialiser(model: ir.Model, name: str, value: np.ndarray | ir.TensorProtocol) -> ir.Value:
    """A constant of the graph; one with this name and the same bytes is shared."""
    graph = model.graph
    data = value if not isinstance(value, np.ndarray) else ir.Tensor(value, name=name)
    if name in graph.initializers:
        held = graph.initializers[name].const_value
        if isinstance(value, np.ndarray) and held is not None and held.size <= SMALL and np.array_equal(held.numpy(), value):
            return graph.initializers[name]
        name = fresh(model, name)
    made = ir.Value(name=name, shape=ir.Shape(data.shape), type=ir.TensorType(data.dtype), const_value=data)
    graph.register_initializer(made)
    return made


def fresh(model: ir.Model, name: str) -> str:
    """`name`, or `name` with a number, such that no initialiser has it yet."""
    number = 1
    while f"{name}_{number}" in model.graph.initializers:
        number += 1
    return f"{name}_{number}" if name in model.graph.initializers else name


def node(
    op_type: str, inputs: Sequence[ir.Value | None], *, domain: str = "", outputs: int = 1, like: ir.Value | None = None, **attributes
) -> ir.Node:
    """A new node; its first output takes shape and type from `like`."""
    made = ir.node(op_type, list(inputs), attributes, domain=domain, num_outputs=outputs)
    if like is not None:
        made.outputs[0].shape, made.outputs[0].type = like.shape, like.type
    return made


def attentions(model: ir.Model) -> list[ir.Node]:
    return [n for n in model.graph if n.op_type == ATTENTION and n.domain == EDGEKV]
