"""A stand-in for the `tensorrt` package where there is no GPU: just enough of its runtime to drive edgekv's engine.

A plan is the path of a lowered graph; ONNX Runtime computes it on the very addresses the engine has set, so everything around the
model is real: buffers, shapes, aliasing, order of copies, compaction by the (emulated) CUDA kernels.
"""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from edgekv.engine.device import Device
from edgekv.engine.onnxruntime import session_options

__version__ = "10.3.0"
loaded: list[str] = []
contexts: weakref.WeakSet = weakref.WeakSet()
KINDS = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64, "tensor(int8)": np.int8, "tensor(bool)": np.bool_}


class ILogger:
    INTERNAL_ERROR, ERROR, WARNING, INFO = range(4)


class IStreamReader:
    pass


class _Registry:
    all_creators = ()

    def load_library(self, path: str) -> object:
        loaded.append(path)
        return object()


def get_plugin_registry() -> _Registry:
    return _Registry()


class _Context:
    def __init__(self, session: ort.InferenceSession):
        self._session = session
        contexts.add(self)
        self._addresses: dict[str, int] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}

    def set_optimization_profile_async(self, index: int, stream: int) -> bool:
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        self._addresses[name] = address
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self._shapes[name] = shape
        return True

    def _array(self, name: str, shape, dtype) -> np.ndarray:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer((ctypes.c_uint8 * size).from_address(self._addresses[name]), dtype).reshape(shape)

    def execute_async_v3(self, stream: int) -> bool:
        binding, sizes = self._session.io_binding(), {"R": self._shapes["rows"][0], "T": self._shapes["input_ids"][1]}
        for items, bind in ((self._session.get_inputs(), binding.bind_ortvalue_input), (self._session.get_outputs(), binding.bind_ortvalue_output)):
            for item in items:
                shape = self._shapes.get(item.name) or [sizes.get(n, n) for n in item.shape]
                bind(item.name, ort.OrtValue.ortvalue_from_numpy(self._array(item.name, shape, KINDS[item.type])))
        self._session.run_with_iobinding(binding)
        return True


def to_cpu_operators(model: onnx.ModelProto) -> onnx.ModelProto:
    """Gives our plugins' nodes of a lowered graph the inputs and outputs that the CPU operators have."""
    searched: dict[str, str] = {}
    for node in model.graph.node:
        given = list(node.input)
        if node.op_type == "SignVQRetrieval":  # the state passes through the plugin
            q, position, state, *tables = given
            searched[node.output.pop()] = state
            given = [q, "", "", position, state, *tables]
        elif node.op_type == "BoundedCacheAttention":
            tables = given[5:7] if any(a.name == "fused_rotary" and a.i for a in node.attribute) else ["", ""]
            slots = given[-1:] if given[4] in searched else []
            given = [*given[:4], searched.get(given[4], given[4]), *tables, *slots]
        del node.input[:]
        node.input.extend(given)
    return model


class _Engine:
    def __init__(self, path: str):
        changed = Path(path).with_name("cpu.onnx")  # beside the weights
        onnx.save(to_cpu_operators(onnx.load(path, load_external_data=False)), changed)
        self._session = ort.InferenceSession(str(changed), session_options(1), providers=["CPUExecutionProvider"])
        self._names = [x.name for x in (*self._session.get_inputs(), *self._session.get_outputs())]
        self.num_io_tensors = len(self._names)

    def get_tensor_name(self, index: int) -> str:
        return self._names[index]

    def create_execution_context(self) -> _Context:
        return _Context(self._session)


class Runtime:
    def __init__(self, logger: ILogger):
        self._logger = logger

    def deserialize_cuda_engine(self, reader: IStreamReader) -> _Engine | None:
        text = reader.read(7) + reader.read(1 << 20)  # in pieces, as TensorRT reads
        if not text.endswith(b".onnx"):
            self._logger.log(ILogger.ERROR, "this is no plan")
            return None
        return _Engine(text.decode())


class FakeDevice(Device):
    """The emulated library posing as a GPU. `largest`: no allocation above it; `graphs`: captured work is kept and run again."""

    def __init__(self, library, largest: int | None = None, graphs: bool = False, free: int = 1 << 30):
        super().__init__(library)
        self.largest, self.graphs, self.free_bytes = largest, graphs, free
        self.live: set[int] = set()
        self.recorded: dict[int, object] = {}
        self.launches = 0

    def info(self):
        return {"count": 1, "name": "stand-in", "sm": 87, "free_bytes": self.free_bytes}

    def alloc(self, size: int) -> int:
        if self.largest is not None and size > self.largest:
            self.check(self.lib.edgekv_copy(0, 0, 0, 9, 0))  # any failing call raises NativeError
        address = super().alloc(size)
        self.live.add(address)
        return address

    def free(self, address: int) -> None:
        self.live.remove(address)
        super().free(address)

    def capture(self, stream, work):
        if not self.graphs:
            return super().capture(stream, work)
        shapes = [(context, dict(context._shapes)) for context in contexts]  # a graph keeps those it was captured with

        def again():
            for context, known in shapes:
                context._shapes = dict(known)
            work()

        self.recorded[len(self.recorded) + 1] = again
        return len(self.recorded)

    def launch(self, graph, stream):
        self.launches += 1
        self.recorded[graph]()

    def destroy_graph(self, graph):
        del self.recorded[graph]
