"""Writes a graph and its weights: model.onnx, and model.onnx.data tensor by tensor, so that memory holds one of them at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

GRAPH = "model.onnx"
DATA = "model.onnx.data"
INLINE_BYTES = 1024  # smaller constants stay in the graph file
ALIGNMENT = 4096  # of every tensor in the data file: a page, so that ONNX Runtime can map it


def external_bytes(model: ir.Model) -> int:
    """Size of the data file that `write` will make."""
    sizes = {id(_stored(v.const_value)): v.const_value.nbytes for v in _weights(model)}
    return sum(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes.values())


def _stored(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    """The tensor whose bytes are on disk: its own, or those it shares."""
    base = getattr(tensor, "base", None)
    return tensor if base is None else base


def _weights(model: ir.Model) -> list[ir.Value]:
    return [v for v in model.graph.initializers.values() if v.const_value.nbytes >= INLINE_BYTES]


def write(model: ir.Model, folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Saves the model to `folder`. Bytes shared by two initialisers are written once (weights.reshaped)."""
    weights = _weights(model)
    total = external_bytes(model)
    places: dict[int, tuple[int, int]] = {}
    with open(folder / DATA, "wb") as file:
        for value in weights:
            tensor = value.const_value
            stored = _stored(tensor)
            if id(stored) not in places:
                start = -(-file.tell() // ALIGNMENT) * ALIGNMENT
                file.seek(start)
                data = stored.tobytes()
                file.write(data)
                places[id(stored)] = (start, len(data))
                progress(file.tell(), total)
            offset, length = places[id(stored)]
            value.const_value = ir.ExternalTensor(
                DATA, offset, length, tensor.dtype, shape=ir.Shape(tensor.shape), name=value.name, base_dir=folder
            )
    for value in model.graph.initializers.values():
        if not isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = ir.Tensor(value.const_value.numpy(), name=value.name, dtype=value.const_value.dtype)
    if not weights:
        (folder / DATA).unlink()
    ir.save(model, folder / GRAPH)
