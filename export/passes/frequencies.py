"""The frequencies behind rotary tables: found as a constant of the graph, then checked against what the graph computes.

Only a cache that renumbers its tokens (positions `cache`) or stores thin keys turns keys itself and needs them. When they cannot
be told with certainty, such a cache is refused for the model; all else works, because the graph brings its own cos and sin.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from edgekv.export.passes import match

PROBE = 37  # first position of the check: angles large enough to tell frequencies apart, small enough for float32
TOLERANCE = 1e-4


def find(model: ir.Model, cos: ir.Value, sin: ir.Value, dim: int, interleaved: bool) -> tuple[float, ...]:
    """Radians per position of the dim / 2 pairs behind tables [1, T, dim], empty when they are not certain."""
    found = []
    for table, op_type in ((cos, "Cos"), (sin, "Sin")):
        function = _upwards(table, op_type)
        if function is None:
            return ()
        found.append(_constants(function.inputs[0], dim // 2))
    for name in found[0].keys() & found[1].keys():
        inv_freq = np.asarray(found[0][name], np.float32).reshape(-1)
        if _agrees(model, cos, sin, inv_freq, interleaved):
            return tuple(inv_freq.tolist())
    return ()


def _upwards(value: ir.Value, op_type: str) -> ir.Node | None:
    """Nearest node of this type among the producers of a value."""
    waiting, seen = [value], set()
    while waiting:
        node = waiting.pop(0).producer()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.op_type == op_type:
            return node
        waiting.extend(i for i in node.inputs if i is not None)
    return None


def _constants(value: ir.Value, size: int) -> dict[str, np.ndarray]:
    """Float constants of `size` numbers among everything that a value is computed from."""
    waiting, seen, found = [value], set(), {}
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        numbers = match.constant(current)
        if numbers is not None and numbers.dtype.kind == "f" and numbers.size == size:
            found[current.name] = numbers
        elif numbers is None and current.producer() is not None:
            waiting.extend(i for i in current.producer().inputs if i is not None)
    return found


def _agrees(model: ir.Model, cos: ir.Value, sin: ir.Value, inv_freq: np.ndarray, interleaved: bool) -> bool:
    """Whether the tables are cos and sin of position * inv_freq, times one number for all of them."""
    inputs = [value for value in model.graph.inputs if value.name in ("input_ids", "position", "shift")]
    part = ir.Model(ir.convenience.extract(model.graph, inputs, [cos, sin]), ir_version=model.ir_version)
    session = ort.InferenceSession(ir.to_proto(part).SerializeToString(), providers=["CPUExecutionProvider"])
    feed = {"input_ids": np.zeros((1, 4), np.int64), "position": np.array([PROBE], np.int64), "shift": np.zeros(1, np.int64)}
    wanted = {value.name for value in session.get_inputs()}
    tables = session.run(None, {name: value for name, value in feed.items() if name in wanted})
    angles = np.outer(np.arange(PROBE, PROBE + 4), inv_freq.astype(np.float64))
    both = np.repeat(angles, 2, axis=-1) if interleaved else np.concatenate([angles, angles], axis=-1)
    if any(table.shape != (1, *both.shape) for table in tables):
        return False
    length = np.hypot(*(table[0].astype(np.float64) for table in tables))
    scale = length.mean()
    close = [np.abs(t[0] / scale - f(both)).max() <= TOLERANCE for t, f in zip(tables, (np.cos, np.sin), strict=True)]
    return bool(np.ptp(length) <= TOLERANCE * scale and all(close))
