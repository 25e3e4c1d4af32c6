"""Small ONNX graphs written without the `onnx` package, for timing ONNX Runtime on a device.

Only what `calibrate` needs: float inputs and outputs, constants as raw bytes, nodes with integer and float attributes. Field
numbers are those of onnx.proto (IR version 10).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

_KINDS = {np.dtype(np.float32): 1, np.dtype(np.uint8): 2, np.dtype(np.int64): 7, np.dtype(np.int8): 3}


def _varint(value: int) -> bytes:
    value &= (1 << 64) - 1
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


def _number(tag: int, value: int) -> bytes:
    return _varint(tag << 3) + _varint(value)


def _block(tag: int, data: bytes | str) -> bytes:
    data = data.encode() if isinstance(data, str) else data
    return _varint(tag << 3 | 2) + _varint(len(data)) + data


def _attribute(name: str, value: int | float | Sequence[float]) -> bytes:
    if isinstance(value, int):
        return _block(1, name) + _number(3, value) + _number(20, 2)
    if isinstance(value, float):
        return _block(1, name) + _varint(2 << 3 | 5) + np.float32(value).tobytes() + _number(20, 1)
    return _block(1, name) + _block(7, np.asarray(value, np.float32).tobytes()) + _number(20, 6)


@dataclass
class Graph:
    """Collects constants, nodes, inputs and outputs; `model()` is the serialised file."""

    parts: list[bytes] = field(default_factory=list)
    count: int = 0

    def constant(self, array: np.ndarray) -> str:
        self.count += 1
        name = f"c{self.count}"
        dims = b"".join(_number(1, size) for size in array.shape)
        self.parts.append(_block(5, dims + _number(2, _KINDS[array.dtype]) + _block(8, name) + _block(9, np.ascontiguousarray(array).tobytes())))
        return name

    def node(self, op: str, inputs: Sequence[str], outputs: int | Sequence[str] = 1, domain: str = "", **attributes) -> str:
        """Adds a node; returns its first output. outputs: how many, or their names."""
        self.count += 1
        names = [f"n{self.count}_{i}" for i in range(outputs)] if isinstance(outputs, int) else list(outputs)
        body = b"".join(_block(1, name) for name in inputs) + b"".join(_block(2, name) for name in names) + _block(4, op)
        body += b"".join(_block(5, _attribute(key, value)) for key, value in attributes.items()) + (_block(7, domain) if domain else b"")
        self.parts.append(_block(1, body))
        return names[0]

    def _value(self, tag: int, name: str, kind: np.dtype, shape: Sequence[int | str]) -> None:
        dims = b"".join(_block(1, _block(2, size) if isinstance(size, str) else _number(1, size)) for size in shape)
        tensor = _number(1, _KINDS[np.dtype(kind)]) + _block(2, dims)
        self.parts.append(_block(tag, _block(1, name) + _block(2, _block(1, tensor))))

    def input(self, name: str, kind, shape: Sequence[int | str]) -> str:
        self._value(11, name, kind, shape)
        return name

    def output(self, name: str, kind, shape: Sequence[int | str]) -> None:
        self._value(12, name, kind, shape)

    def model(self) -> bytes:
        opsets = b"".join(_block(8, _block(1, domain) + _number(2, version)) for domain, version in (("", 23), ("com.microsoft", 1), ("edgekv", 1)))
        return _number(1, 10) + _block(7, b"".join(self.parts) + _block(2, "micro")) + opsets
