"""The little of protobuf and ONNX that the device side needs: which files and which operators does a graph ask for?

The `onnx` package is not installed on a device, and a bundle is not trusted before it is checked. So this reads the wire
format itself, touching only the fields on the way from ModelProto to TensorProto.external_data and NodeProto.op_type, and
raises `ValueError` on anything malformed.  Field numbers are those of onnx.proto (ONNX IR version 3 and later).
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

MAX_DEPTH = 32  # nested subgraphs; real graphs need two or three

# message -> {field number: message of the sub-message to walk into}
_WALK = {
    "Model": {7: "Graph", 25: "Function"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Function": {7: "Node"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "Entry"},
}
_OP_TYPE, _DOMAIN = 4, 7  # NodeProto
_KEY, _VALUE = 1, 2  # StringStringEntryProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def _varint(data: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("a number runs past the end of its message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7


def fields(data: memoryview) -> Iterator[tuple[int, int, memoryview | int]]:
    """Yields (field number, wire type, value) of one message; length-delimited values are views, nothing is copied."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        number, wire = tag >> 3, tag & 7
        if wire == _VARINT:
            value, at = _varint(data, at)
            yield number, wire, value
            continue
        if wire == _BYTES:
            size, at = _varint(data, at)
        elif wire in (_FIXED64, _FIXED32):
            size = 8 if wire == _FIXED64 else 4
        else:
            raise ValueError(f"wire type {wire} does not occur in ONNX files")
        if number == 0 or size > len(data) - at:
            raise ValueError("a field runs past the end of its message")
        yield number, wire, data[at : at + size]
        at += size


def _text(value: memoryview | int) -> str:
    if isinstance(value, int):
        raise ValueError("a number stands where a string belongs")
    return bytes(value).decode("utf-8")


def _scan(kind: str, data: memoryview, locations: set[str], operators: set[tuple[str, str]], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError("subgraphs are nested too deeply")
    inside = _WALK.get(kind, {})
    strings: dict[int, str] = {}
    for number, wire, value in fields(data):
        if wire != _BYTES:
            continue
        if number in inside:
            _scan(inside[number], value, locations, operators, depth + 1)
        elif kind == "Node" and number in (_OP_TYPE, _DOMAIN) or kind == "Entry" and number in (_KEY, _VALUE):
            strings[number] = _text(value)
    if kind == "Node":
        operators.add((strings.get(_DOMAIN, ""), strings.get(_OP_TYPE, "")))
    elif kind == "Entry" and strings.get(_KEY) == "location":
        locations.add(strings.get(_VALUE, ""))


def scan_model(path: Path) -> tuple[set[str], set[tuple[str, str]]]:
    """External-data locations and (domain, operator) pairs of an ONNX file, as written there, unchecked.

    Raises ValueError when the file is not a readable ONNX model, OSError when it cannot be opened.
    """
    locations: set[str] = set()
    operators: set[tuple[str, str]] = set()
    with open(path, "rb") as file:
        if file.seek(0, 2) == 0:
            raise ValueError("the file is empty")
        # never closed by hand: the map goes when the last view into it goes, also when an exception holds some for a while
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    _scan("Model", memoryview(mapped), locations, operators, 0)
    if not operators:
        raise ValueError("it holds no graph")
    return locations, operators

