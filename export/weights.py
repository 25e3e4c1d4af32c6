"""Weights that are read when they are needed: lazy tensors over a checkpoint, and the few operations graph passes apply to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir


class Lazy(ir.LazyTensor):
    """A tensor whose numbers come from read() each time they are asked for; nothing is kept.

    base  the tensor whose bytes it has (under another shape), or None: the writer stores those bytes once
    """

    def __init__(self, read: Callable[[], np.ndarray], shape: Sequence[int], name: str, dtype=ir.DataType.FLOAT, base=None):
        def evaluate() -> ir.Tensor:
            array = np.asarray(read(), dtype.numpy(), order="C")
            if list(array.shape) != list(shape):
                raise ValueError(f"{name} has the shape {list(array.shape)}, not {list(shape)}")
            return ir.Tensor(array, name=name)

        super().__init__(evaluate, dtype=dtype, shape=ir.Shape(shape), name=name)
        self.base = base


def transposed(tensor: ir.TensorProtocol, name: str) -> Lazy:
    """[K, N] from [N, K]."""
    rows, columns = tensor.shape
    return Lazy(lambda: tensor.numpy().T, (columns, rows), name)


def joined(tensors: Sequence[ir.TensorProtocol], name: str) -> Lazy:
    """Tensors side by side along their last axis."""
    shape = (*tensors[0].shape[:-1], sum(t.shape[-1] for t in tensors))
    return Lazy(lambda: np.concatenate([t.numpy() for t in tensors], axis=-1), shape, name)


def halved(tensor: ir.TensorProtocol, name: str) -> Lazy:
    """The same numbers rounded to half precision."""
    return Lazy(lambda: tensor.numpy(), tensor.shape, name, ir.DataType.FLOAT16)


def reshaped(tensor: ir.TensorProtocol, shape: Sequence[int], name: str) -> Lazy:
    """The same bytes in another shape."""
    return Lazy(lambda: tensor.numpy().reshape(shape), shape, name, tensor.dtype, base=tensor)


class Parts:
    """Several tensors from one costly computation, which is done again only when a part is asked for a second time.

    compute   gives a tuple of arrays; they are held from the first part that is asked for until the last one is
    """

    def __init__(self, compute: Callable[[], tuple[np.ndarray, ...]]):
        self._compute = compute
        self._held: dict[int, np.ndarray] = {}

    def read(self, index: int) -> np.ndarray:
        if index not in self._held:
            self._held = dict(enumerate(self._compute()))
        return self._held.pop(index)
