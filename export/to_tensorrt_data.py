"""Weights on their way from a bundle to TensorRT: read one at a time from model.onnx.data, changed, and written one at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto

from edgekv.errors import BundleError

DATA = "model.onnx.data"
INLINE_BYTES = 1024  # smaller constants stay in the graph file
ALIGNMENT = 4096
ROWS = 4096  # rows of a table that are dequantised at a time
_KINDS = {
    TensorProto.FLOAT: np.dtype("<f4"),
    TensorProto.FLOAT16: np.dtype("<f2"),
    TensorProto.UINT8: np.dtype("u1"),
    TensorProto.INT8: np.dtype("i1"),
    TensorProto.INT32: np.dtype("<i4"),
    TensorProto.INT64: np.dtype("<i8"),
    TensorProto.BOOL: np.dtype("?"),
    TensorProto.DOUBLE: np.dtype("<f8"),
}


class Source:
    """The initialisers of a model whose external data lies in `folder`; arrays are views into the mapped file."""

    def __init__(self, model: onnx.ModelProto, folder: Path):
        self._tensors = {t.name: t for t in model.graph.initializer}
        self._folder = folder
        self._files: dict[str, np.memmap] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def kind(self, name: str) -> int:
        """TensorProto data type."""
        return self._tensors[name].data_type

    def shape(self, name: str) -> list[int]:
        return list(self._tensors[name].dims)

    def array(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        if tensor.data_location != TensorProto.EXTERNAL:
            return onnx.numpy_helper.to_array(tensor)
        where = {entry.key: entry.value for entry in tensor.external_data}
        location, offset = where.get("location", ""), int(where.get("offset", 0))
        if location != DATA or tensor.data_type not in _KINDS:
            raise BundleError(f"{self._folder}: the weight {name} does not lie in {DATA}.")
        if location not in self._files:
            self._files[location] = np.memmap(self._folder / location, np.uint8, "r")
        kind = _KINDS[tensor.data_type]
        size = int(np.prod(tensor.dims, dtype=np.int64)) * kind.itemsize
        data = self._files[location][offset : offset + size]
        if data.size != size:
            raise BundleError(f"{self._folder}: {DATA} ends inside the weight {name}.")
        return data.view(kind).reshape(tuple(tensor.dims))


class Sink:
    """Makes initialisers; large ones go to model.onnx.data at once, so that memory holds one of them at a time."""

    def __init__(self, folder: Path):
        self.tensors: dict[str, TensorProto] = {}
        self._file = open(folder / DATA, "wb")

    def __enter__(self) -> Sink:
        return self

    def __exit__(self, *_) -> None:
        self._file.close()

    @property
    def bytes(self) -> int:
        return self._file.tell()

    def add(self, name: str, kind: int, shape: list[int], pieces: Iterator[np.ndarray] | list[np.ndarray]) -> str:
        """Adds a tensor given as pieces of its bytes in order; returns its name. A name that is there already is kept."""
        if name in self.tensors:
            return name
        tensor = TensorProto(name=name, data_type=kind, dims=shape)
        pieces = iter(pieces)
        first = np.ascontiguousarray(next(pieces, np.empty(0, np.uint8)))
        second = next(pieces, None)
        if second is None and first.nbytes < INLINE_BYTES:
            tensor.raw_data = first.tobytes()
        else:
            start = -(-self._file.tell() // ALIGNMENT) * ALIGNMENT
            self._file.seek(start)
            self._file.write(first.data)
            if second is not None:
                self._file.write(np.ascontiguousarray(second).data)
            for piece in pieces:
                self._file.write(np.ascontiguousarray(piece).data)
            tensor.data_location = TensorProto.EXTERNAL
            for key, value in (("location", DATA), ("offset", start), ("length", self._file.tell() - start)):
                tensor.external_data.add(key=key, value=str(value))
        self.tensors[name] = tensor
        return name

    def array(self, name: str, array: np.ndarray) -> str:
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return self.add(name, kind, list(array.shape), [array])


class Blocks:
    """A matrix [N, K] in blocks of 32 columns as MatMulNBits stores it: w = (code - zero_point) * scale.

    With `sums` it was made for x with its block sums appended (edgekv::AppendBlockSums): its last blocks hold one number per block of
    x, which belongs to every column of that block. It is read as what it means for x alone: w = (code - zero_point) * scale + extra.
    """

    SIZE = 32

    def __init__(self, source: Source, codes: str, scales: str, zeros: str | None, columns: int, bits: int, sums: bool = False):
        self.rows, self.bits = source.shape(scales)[0], bits
        stored = -(-columns // self.SIZE)
        self.count = next(n for n in range(stored + 1) if n + -(-n // self.SIZE) == stored) if sums else stored
        self.columns = self.count * self.SIZE if sums else columns
        self._stored, self._sums = stored, sums
        self._codes = source.array(codes).reshape(self.rows, -1)
        self._scales = source.array(scales).astype(np.float32)
        self._zeros = source.array(zeros).reshape(self.rows, -1) if zeros else None

    @property
    def scales(self) -> np.ndarray:
        """float32 [N, count]"""
        return self._scales[:, : self.count]

    def _all_zeros(self, rows: slice) -> np.ndarray:
        if self._zeros is None:  # the middle of the range when the bundle stores none
            return np.full((len(range(*rows.indices(self.rows))), self._stored), 1 << (self.bits - 1), np.float32)
        return _unpack(self._zeros[rows], self._stored, self.bits).astype(np.float32)

    def codes(self, rows: slice) -> np.ndarray:
        """uint8 [n, count * 32]"""
        return _unpack(self._codes[rows], self.count * self.SIZE, self.bits)

    def extra(self, rows: slice) -> np.ndarray:
        """float32 [n, count], 0 without sums"""
        zeros = self._all_zeros(rows)
        if not self._sums:
            return np.zeros_like(zeros)
        codes = _unpack(self._codes[rows], self._stored * self.SIZE, self.bits)[:, self.count * self.SIZE :].astype(np.float32)
        blocks = codes.reshape(len(codes), -1, self.SIZE) - zeros[:, self.count :, None]
        return (blocks * self._scales[rows, self.count :, None]).reshape(len(codes), -1)[:, : self.count]

    def wide(self, kind) -> Iterator[np.ndarray]:
        """The numbers, [n, K] of `kind`, a few rows at a time."""
        for start in range(0, self.rows, ROWS):
            rows = slice(start, start + ROWS)
            codes = self.codes(rows).reshape(-1, self.count, self.SIZE).astype(np.float32)
            zeros = self._all_zeros(rows)[:, : self.count, None]
            numbers = (codes - zeros) * self.scales[rows][..., None] + self.extra(rows)[..., None]
            yield numbers.reshape(len(codes), -1)[:, : self.columns].astype(kind)

    def signed4(self) -> np.ndarray:
        """4-bit codes minus 8 as ONNX int4 of the transpose [K, N], two neighbours of a row in a byte: uint8 [K, N / 2]."""
        packed = np.empty((self.columns, self.rows // 2), np.uint8)
        for start in range(0, self.rows, ROWS):
            part = self.codes(slice(start, start + ROWS))[:, : self.columns].T ^ 8
            packed[:, start // 2 : (start + part.shape[1]) // 2] = part[:, 0::2] | part[:, 1::2] << 4
        return packed

    def offsets(self) -> np.ndarray | None:
        """What signed4 leaves out of every column of a block, (8 - zero_point) * scale + extra: float32 [count, N]; None for nothing."""
        every = slice(0, self.rows)
        left = (8 - self._all_zeros(every)[:, : self.count]) * self.scales + self.extra(every)
        return np.ascontiguousarray(left.T) if left.any() else None


def _unpack(packed: np.ndarray, count: int, bits: int) -> np.ndarray:
    if bits == 8:
        return packed[:, :count]
    both = np.stack([packed & 15, packed >> 4], axis=-1)
    return both.reshape(packed.shape[0], -1)[:, :count]
