"""TensorRT on an NVIDIA GPU: a plan made by `edgekv build`, one arena in device memory, one launch per decode step.

Everything a step needs is allocated once. Token ids, positions and rows travel in one small block of page-locked memory; the
host reads logits and, for reports, headers, never the cache. After two runs of a shape, copies and kernels of a step become one CUDA
graph; the kernels read the position from device memory, so the graph stays valid while the text grows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from edgekv import layout, native
from edgekv.bundle import Bundle, sha256_file
from edgekv.engine import Occupancy, tensorrt_manifest
from edgekv.engine.device import TO_DEVICE, TO_HOST, Device
from edgekv.engine.tensorrt_build import load_plugins
from edgekv.errors import CacheFullError, NativeError, UserError

ALIGNMENT = 256
GRAPH_AFTER = 2  # runs of a shape before it is captured: TensorRT allocates in the first
_MAX_GRAPHS = 32


def load_tensorrt(name: str = "tensorrt") -> Any:
    """The TensorRT bindings; UserError where they are missing."""
    try:
        return import_module(name)
    except ImportError as error:
        if name == "tensorrt_rtx":  # the package of this name only imports the bindings, which may be installed alone
            with suppress(ImportError):
                return import_module("tensorrt_rtx_bindings")
            raise UserError(f"TensorRT-RTX's Python bindings are missing ({error}); pip install tensorrt-rtx.") from None
        raise UserError(
            f"TensorRT's Python bindings are missing ({error}): on a Jetson install python3-libnvinfer, elsewhere `pip install tensorrt`."
        ) from None


def make_logger(trt: Any, sink: list[str]) -> Any:
    """A TensorRT logger that keeps errors and warnings in `sink` instead of printing them."""

    class Logger(trt.ILogger):
        def __init__(self):
            trt.ILogger.__init__(self)

        def log(self, severity, message):
            if severity in (trt.ILogger.INTERNAL_ERROR, trt.ILogger.ERROR, trt.ILogger.WARNING):
                sink.append(str(message).strip())

    return Logger()


class TensorRTEngine:
    """Runs a bundle's TensorRT plan; see `edgekv.engine.Engine` for what each method promises.

    folder    with engine.plan and engine.json, as `edgekv build` writes them; None: beside the bundle
    max_rows  rows of logits that one step can give

    Raises UserError when the plan is missing, damaged, from elsewhere, or does not fit into memory.
    """

    threads = 1

    def __init__(self, bundle: Bundle, folder: Path | None = None, max_rows: int = 1, *, trt: Any = None, device: Device | None = None):
        self.bundle = bundle
        folder = folder or tensorrt_manifest.default_folder(bundle)
        facts = tensorrt_manifest.read(folder)
        self._trt = trt or load_tensorrt()
        self._device = device or Device()
        info = self._device.info()
        if not info["count"]:
            raise UserError(f"There is no CUDA device to run the engine on ({info['reason']}); use --engine onnxruntime.")
        tensorrt_manifest.refuse_if_foreign(facts, bundle, self._trt.__version__, info["sm"], sha256_file(self._device.path))

        self.boundary = bundle.boundary
        self._profiles = facts["profiles"]
        self.chunk = min(bundle.chunk, self.boundary, max(p["tokens"] for p in self._profiles))
        self.max_rows = max_rows
        most_rows = min(p["rows"] for p in self._profiles)
        if max_rows > most_rows:
            raise UserError(f"The engine gives at most {most_rows} rows of logits, {max_rows} are needed; build it with --rows {max_rows}.")
        self.vocab = bundle.model["vocab"]
        self._params = [native.LayerParams(**layer["params"]) for layer in bundle.layers]
        self._ranked = bundle.layers[0]["params"].get("positions") == layout.POSITIONS["cache"]
        self._rank_limit = max(p.body_slots for p in self._params)
        self.capacity = self._capacity()
        self.retrieval = None
        self.observe = 0  # the end of a prompt is not looked at ahead of its turn here
        self._tail_base = 0
        self._owned: list[int] = []
        self._pinned: list[np.ndarray] = []
        self._graphs: dict[tuple[int, int], int] = {}
        self._runs: dict[tuple[int, int], int] = {}
        self.graphs_refused: str | None = None  # why steps are launched kernel by kernel, when they are
        self._messages: list[str] = []
        self._stream = self._device.stream()
        try:
            self._allocate(info)
            self._open(folder / tensorrt_manifest.PLAN)
        except BaseException:
            self.close()
            raise
        self.reset()

    # ---- start-up

    def _capacity(self) -> int | None:
        full = [p for p in self._params if p.keep == layout.KEEPS["full"]]
        ends = [p.body_slots // p.tail_slots * p.tail_slots + p.tail_slots for p in full]
        if not self._ranked:  # rotations beyond the trained range would be noise
            ends.append(self.bundle.model["context"])
        return min(ends) if ends else None

    def _alloc(self, size: int) -> int:
        address = self._device.alloc(max(size, 1))
        self._owned.append(address)
        return address

    def _host(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        array = self._device.host_array(shape, dtype)
        self._pinned.append(array)
        return array

    def _allocate(self, info: dict[str, Any]) -> None:
        device, sizes = self._device, [-(-layer["bytes"] // ALIGNMENT) * ALIGNMENT for layer in self.bundle.layers]
        arena = sum(sizes)
        logits = self.max_rows * self.vocab * 4
        needed = arena + logits + max(device.compact_workspace(p) for p in self._params)
        if needed > info.get("free_bytes", needed):
            raise UserError(
                f"The KV cache and logits need {needed >> 20} MiB of device memory and {info['free_bytes'] >> 20} MiB are free; "
                "close other programs or export with a smaller --kv-budget."
            )
        try:
            self._arena_address = self._alloc(arena)
            self._states = [self._arena_address + start for start in np.cumsum([0, *sizes[:-1]]).tolist()]
            self.contiguous = True
        except NativeError:
            # Memory may be free but in pieces (seen on Jetson): one block per layer instead. L2 cannot be told to keep those.
            self._states = self._pieces(sizes)
            self.contiguous = False
        self.persisting_bytes = device.persist(self._stream, self._arena_address, arena) if self.contiguous else 0

        # One block of inputs, each on its own 256 bytes: position, shift, rows, token ids.
        starts = np.cumsum([0] + [-(-8 * n // ALIGNMENT) * ALIGNMENT for n in (1, 1, self.max_rows, self.chunk)]).tolist()
        self._inputs = self._host((starts[-1] // 8,), np.int64)
        self._inputs[:] = 0
        self._input_address = self._alloc(starts[-1])
        names, counts = ("position", "shift", "rows", "input_ids"), (1, 1, self.max_rows, self.chunk)
        self._fields = {n: self._inputs[at // 8 : at // 8 + c] for n, at, c in zip(names, starts, counts, strict=False)}
        self._addresses = {n: self._input_address + at for n, at in zip(names, starts, strict=False)}
        self._logits = self._host((self.max_rows, self.vocab), np.float32)
        self._addresses["logits"] = self._alloc(logits)
        for index, state in enumerate(self._states):
            self._addresses[f"state.{index}"] = self._addresses[f"state.{index}.out"] = state
        self._workspace = self._alloc(max(device.compact_workspace(p) for p in self._params))

        fresh = np.concatenate([native.new_state(p) for p in self._params])
        self._fresh = self._host(fresh.shape, np.uint8)  # what reset copies
        self._fresh[:] = fresh
        tables = [np.asarray(self.bundle.inv_freq(i), np.float32) for i in range(len(self._params))]
        self._inv_freq = [self._upload(t) if t.size else 0 for t in tables]
        self._header = self._host((layout.HEADER.itemsize,), np.uint8)
        self._hidden = self._host((len(self._params), 2), np.int32)  # hidden_from, hidden_to
        self._hidden[:] = 0

    def _pieces(self, sizes: list[int]) -> list[int]:
        try:
            return [self._alloc(size) for size in sizes]
        except NativeError as error:
            raise UserError(
                f"The device refused {sum(sizes) >> 20} MiB for the KV cache, also layer by layer ({error}); "
                "close other programs or export with a smaller --kv-budget."
            ) from None

    def _upload(self, array: np.ndarray) -> int:
        address = self._alloc(array.nbytes)
        self._device.copy(address, array.ctypes.data, array.nbytes, TO_DEVICE, self._stream)
        self._device.wait(self._stream)
        return address

    def _open(self, plan: Path) -> None:
        trt = self._trt
        self._logger = make_logger(trt, self._messages)
        load_plugins(trt, self._device.path)
        runtime = trt.Runtime(self._logger)
        self._engine = runtime.deserialize_cuda_engine(_reader(trt, plan))
        if self._engine is None:
            raise UserError(f"TensorRT {trt.__version__} cannot load {plan}: {self._last_message()}.")
        names = {self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)}
        self._names = names
        missing = {"input_ids", "position", "rows", "logits", *(f"state.{i}" for i in range(len(self._states)))} - names
        if missing:
            raise UserError(f"{plan} lacks the tensors {', '.join(sorted(missing))}; build it again with `edgekv build`.")
        self._contexts = []
        for index in range(len(self._profiles)):
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(index, self._stream):
                raise UserError(f"TensorRT could not set the engine up: {self._last_message()}.")
            for name in names:
                context.set_tensor_address(name, self._addresses[name])
            self._contexts.append(context)
        self._device.wait(self._stream)

    def _last_message(self) -> str:
        return self._messages[-1].rstrip(".") if self._messages else "it gave no reason"

    # ---- the protocol

    @property
    def arena(self) -> np.ndarray:
        """A copy of all states, uint8 [bytes of the arena]; taking it waits for the device."""
        out = native.aligned_bytes(self.bundle.arena_bytes, ALIGNMENT)
        start = 0
        for state, layer in zip(self._states, self.bundle.layers, strict=True):
            self._device.copy(out.ctypes.data + start, state, layer["bytes"], TO_HOST, self._stream)
            start += -(-layer["bytes"] // ALIGNMENT) * ALIGNMENT
        self._device.wait(self._stream)
        return out

    def step(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        count, wanted = len(tokens), len(rows)
        if not (1 <= count <= self.chunk and 1 <= wanted <= self.max_rows):
            raise NativeError(f"a step of {count} tokens and {wanted} rows is outside 1..{self.chunk} and 1..{self.max_rows}")
        if not 0 <= position - self._tail_base <= self.boundary - count:
            raise NativeError(f"{count} tokens after position {position} do not fit the tail that starts at {self._tail_base}")
        self._fields["input_ids"][:count] = tokens
        self._fields["position"][0] = position
        self._fields["rows"][:wanted] = rows
        key = (count, wanted)
        if key in self._graphs:
            self._device.launch(self._graphs[key], self._stream)
        else:
            work = self._work(count, wanted)
            self._runs[key] = self._runs.get(key, 0) + 1
            if self._runs[key] > GRAPH_AFTER and self.graphs_refused is None and len(self._graphs) < _MAX_GRAPHS:
                self._capture(key, work)
            else:
                work()
        self._device.wait(self._stream)
        return self._logits[:wanted]

    def _work(self, count: int, wanted: int) -> Callable[[], None]:
        """Queues one step: inputs in, the engine, logits out."""
        index = next(i for i, p in enumerate(self._profiles) if count <= p["tokens"] and wanted <= p["rows"])
        context = self._contexts[index]
        context.set_input_shape("input_ids", (1, count))
        context.set_input_shape("rows", (wanted,))

        def work() -> None:
            device, stream = self._device, self._stream
            device.copy(self._input_address, self._inputs.ctypes.data, self._inputs.nbytes, TO_DEVICE, stream)
            if not context.execute_async_v3(stream):
                raise NativeError(f"TensorRT could not run the step: {self._last_message()}")
            device.copy(self._logits.ctypes.data, self._addresses["logits"], wanted * self.vocab * 4, TO_HOST, stream)

        return work

    def _capture(self, key: tuple[int, int], work: Callable[[], None]) -> None:
        try:
            self._graphs[key] = self._device.capture(self._stream, work)
        except NativeError as error:
            self.graphs_refused = str(error)
            work()
            return
        self._device.launch(self._graphs[key], self._stream)

    def look(self, window: int | None) -> None:
        lanes, at = layout.LANES, layout.HEADER.fields["hidden_from"][1]
        for index, (params, state) in enumerate(zip(self._params, self._states, strict=True)):
            kept = min(self._tail_base, params.body_slots)  # while everything fits everything is kept
            end = 0 if window is None else (kept - window) // lanes * lanes
            self._hidden[index] = (lanes, end) if end > lanes else 0
            self._device.copy(state + at, self._hidden[index].ctypes.data, 8, TO_DEVICE, self._stream)
        self._device.wait(self._stream)

    def compact(self, position: int) -> None:
        rank = min(position, self._rank_limit) if self._ranked else position
        for params in self._params:
            if params.keep == layout.KEEPS["full"] and position > params.body_slots:
                raise CacheFullError(f"layer {params.layer} holds {params.body_slots} tokens and evicts none")
        for params, table, state in zip(self._params, self._inv_freq, self._states, strict=True):
            self._device.compact(params, table, state, position, rank, self._workspace, self._stream)
        self._tail_base = position
        self._fields["shift"][0] = position - rank

    def reset(self) -> None:
        start = 0
        for state, layer in zip(self._states, self.bundle.layers, strict=True):
            self._device.copy(state, self._fresh.ctypes.data + start, layer["bytes"], TO_DEVICE, self._stream)
            start += layer["bytes"]
        self._device.wait(self._stream)
        self._tail_base = 0
        self._fields["shift"][0] = 0

    def state_hash(self, position: int) -> int:
        digest, arena, start = 0, self.arena, 0
        for params, layer in zip(self._params, self.bundle.layers, strict=True):
            digest = (digest * 1099511628211 + native.state_hash(params, arena[start : start + layer["bytes"]], position)) % (1 << 64)
            start += -(-layer["bytes"] // ALIGNMENT) * ALIGNMENT
        return digest

    def occupancy(self, position: int) -> Occupancy:
        used, most, tail = 0, None, position - self._tail_base
        for params, state in zip(self._params, self._states, strict=True):
            self._device.copy(self._header.ctypes.data, state, self._header.nbytes, TO_HOST, self._stream)
            self._device.wait(self._stream)
            header = self._header.view(layout.HEADER)
            kept, evicted = int(header["body_count"][0]) + tail, int(header["evicted"][0])
            element = 2 if params.element == layout.ELEMENTS["fp16"] else 4
            used += kept * params.kv_heads * (params.key_dim + params.value_dim) * element
            if most is None or kept > most[0]:
                most = kept, evicted
        return Occupancy(self.bundle.arena_bytes, used, *most)

    def close(self) -> None:
        if self._stream is None:
            return
        for graph in self._graphs.values():
            self._device.destroy_graph(graph)
        self._graphs, self._contexts, self._engine = {}, [], None
        for address in self._owned:
            self._device.free(address)
        self._inputs = self._logits = self._fresh = self._header = self._hidden = None
        self._fields = {}
        for array in self._pinned:
            self._device.free_host(array)
        self._owned, self._pinned = [], []
        self._device.destroy_stream(self._stream)
        self._stream = None


def _reader(trt: Any, plan: Path) -> Any:
    """The plan piece by piece where TensorRT can read so: on a Jetson host and device share memory, and a copy of a large plan beside
    the engine may be what does not fit."""
    if not hasattr(trt, "IStreamReader"):
        return plan.read_bytes()

    class Reader(trt.IStreamReader):
        def __init__(self):
            trt.IStreamReader.__init__(self)
            self.file = open(plan, "rb")

        def read(self, size: int) -> bytes:
            return self.file.read(size)

    return Reader()
