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

from edgekv.bundle import Bundle, sha256_file
from edgekv.engine import Occupancy, Reads, tensorrt_manifest
from edgekv.engine.device import Device
from edgekv.engine.device_cache import DeviceCache
from edgekv.engine.device_memory import DeviceMemory, padded
from edgekv.engine.ring_cache import RingCache
from edgekv.engine.tensorrt_build import load_plugins
from edgekv.errors import NativeError, UserError
from edgekv.retrieval import Retrieval

RETRIEVING_ROWS = 16  # of a step that retrieves (kSideBySideRows of plugins/cuda); the kernels answer longer ones with NaN
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
        self.capacity = bundle.capacity
        self._tail_base = 0
        self._graphs: dict[tuple[int, int], int] = {}
        self._runs: dict[tuple[int, int], int] = {}
        self.graphs_refused: str | None = None  # why steps are launched kernel by kernel, when they are
        self._messages: list[str] = []
        self._plugin = facts["lowering"] == tensorrt_manifest.PLUGIN
        self._number = np.dtype(np.float32 if facts["precision"] == "fp32" else np.float16)
        self._memory = DeviceMemory(self._device)
        try:
            self._allocate(info)
            self._open(folder / tensorrt_manifest.PLAN)
            self.reset()
        except BaseException:
            self.close()
            raise

    # ---- start-up

    def _allocate(self, info: dict[str, Any]) -> None:
        bundle, memory, logits = self.bundle, self._memory, self.max_rows * self.vocab * 4
        cache = DeviceCache.needed_bytes(bundle, self._device) if self._plugin else RingCache.needed_bytes(bundle, self._number)
        if cache + logits > info.get("free_bytes", cache + logits):
            raise UserError(
                f"The KV cache and logits need {(cache + logits) >> 20} MiB of device memory and {info['free_bytes'] >> 20} MiB are free; "
                "close other programs or export with a smaller --kv-budget."
            )
        self._cache = DeviceCache(bundle, memory) if self._plugin else RingCache(bundle, memory, self._number, self.chunk)
        self.contiguous, self.observe = self._cache.contiguous, self._cache.observe
        self.persisting_bytes = self._device.persist(memory.stream, self._cache.address, self._cache.nbytes) if self.contiguous else 0

        # One block of inputs, each on its own 256 bytes: position, shift, rows, token ids.
        starts = np.cumsum([0] + [padded(8 * n) for n in (1, 1, self.max_rows, self.chunk)]).tolist()
        self._inputs = memory.host((starts[-1] // 8,), np.int64)
        self._input_address = memory.alloc(starts[-1])
        names, counts = ("position", "shift", "rows", "input_ids"), (1, 1, self.max_rows, self.chunk)
        self._fields = {n: self._inputs[at // 8 : at // 8 + c] for n, at, c in zip(names, starts, counts, strict=False)}
        self._addresses = {n: self._input_address + at for n, at in zip(names, starts, strict=False)}
        self._logits = memory.host((self.max_rows, self.vocab), np.float32)
        self._addresses |= {"logits": memory.alloc(logits), **self._cache.tensors}

    def _open(self, plan: Path) -> None:
        trt = self._trt
        self._logger = make_logger(trt, self._messages)
        if self._plugin:
            load_plugins(trt, self._device.path)
        runtime = trt.Runtime(self._logger)
        self._engine = runtime.deserialize_cuda_engine(_reader(trt, plan))
        if self._engine is None:
            raise UserError(f"TensorRT {trt.__version__} cannot load {plan}: {self._last_message()}.")
        names = {self._engine.get_tensor_name(i) for i in range(self._engine.num_io_tensors)}
        wrong = ({"input_ids", "rows", "logits", *self._cache.tensors} - names) | (names - self._addresses.keys())
        if wrong:
            raise UserError(f"{plan} has not the tensors of its bundle ({', '.join(sorted(wrong))}); build it again with `edgekv build`.")
        self._contexts = []
        for index in range(len(self._profiles)):
            context = self._engine.create_execution_context()
            if context is None or not context.set_optimization_profile_async(index, self._memory.stream):
                raise UserError(f"TensorRT could not set the engine up: {self._last_message()}.")
            for name in names:
                context.set_tensor_address(name, self._addresses[name])
            self._contexts.append(context)
        self._memory.wait()

    def _last_message(self) -> str:
        return self._messages[-1].rstrip(".") if self._messages else "it gave no reason"

    # ---- the protocol

    @property
    def arena(self) -> np.ndarray:
        """A copy of the cache, uint8; taking it waits for the device."""
        return self._cache.arena

    @property
    def retrieval(self) -> Retrieval | None:
        return self._cache.retrieval if self._plugin else None

    def retrieve(self, amount: Retrieval, rerank: int | None = None) -> None:
        if not self._plugin:
            raise UserError("This cache is not compressed, so every token is attended to; export with --cache selfindex to retrieve.")
        self._cache.retrieve(amount, rerank)

    def reads(self) -> Reads:
        return self._cache.reads()

    def read(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        if self._plugin:
            self._cache.attend_to_all()
        return self._run(tokens, position, rows)

    def step(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        if self._plugin and self._cache.choose() and len(tokens) > RETRIEVING_ROWS:
            self._check(len(tokens), position, len(rows))
            return self._parts(tokens, position, rows)
        return self._run(tokens, position, rows)

    def _parts(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        """A long block whose rows retrieve, in parts that the kernels take; a row does not depend on how it is cut."""
        rows, logits = np.asarray(rows), np.empty((len(rows), self.vocab), np.float32)
        for first in range(0, len(tokens), RETRIEVING_ROWS):
            part = tokens[first : first + RETRIEVING_ROWS]
            wanted = np.flatnonzero((rows >= first) & (rows < first + len(part)))
            found = self._run(part, position + first, rows[wanted] - first if len(wanted) else np.zeros(1, np.int64))
            logits[wanted] = found[: len(wanted)]
        return logits

    def _check(self, count: int, position: int, wanted: int) -> None:
        if not (1 <= count <= self.chunk and 1 <= wanted <= self.max_rows):
            raise NativeError(f"a step of {count} tokens and {wanted} rows is outside 1..{self.chunk} and 1..{self.max_rows}")
        if not 0 <= position - self._tail_base <= self.boundary - count:
            raise NativeError(f"{count} tokens after position {position} do not fit the tail that starts at {self._tail_base}")

    def _run(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        count, wanted = len(tokens), len(rows)
        self._check(count, position, wanted)
        self._fields["input_ids"][:count] = tokens
        self._fields["position"][0] = position
        self._fields["rows"][:wanted] = rows
        self._cache.prepare(position, count)
        key = (count, wanted)
        if key in self._graphs:
            self._device.launch(self._graphs[key], self._memory.stream)
        else:
            work = self._work(count, wanted)
            self._runs[key] = self._runs.get(key, 0) + 1
            if self._runs[key] > GRAPH_AFTER and self.graphs_refused is None and len(self._graphs) < _MAX_GRAPHS:
                self._capture(key, work)
            else:
                work()
        self._memory.wait()
        return self._logits[:wanted]

    def _work(self, count: int, wanted: int) -> Callable[[], None]:
        """Queues one step: inputs in, the engine, logits out."""
        index = next(i for i, p in enumerate(self._profiles) if count <= p["tokens"] and wanted <= p["rows"])
        context = self._contexts[index]
        context.set_input_shape("input_ids", (1, count))
        context.set_input_shape("rows", (wanted,))
        for name, shape in self._cache.shapes(count).items():
            context.set_input_shape(name, shape)

        def work() -> None:
            self._memory.write(self._input_address, self._inputs)
            self._cache.queue(count)
            if not context.execute_async_v3(self._memory.stream):
                raise NativeError(f"TensorRT could not run the step: {self._last_message()}")
            self._memory.read(self._logits[:wanted], self._addresses["logits"])

        return work

    def _capture(self, key: tuple[int, int], work: Callable[[], None]) -> None:
        try:
            self._graphs[key] = self._device.capture(self._memory.stream, work)
        except NativeError as error:
            self.graphs_refused = str(error)
            work()
            return
        self._device.launch(self._graphs[key], self._memory.stream)

    def look(self, window: int | None, tokens: np.ndarray | None = None) -> int:
        self._cache.look(window)
        return 0

    def hold_queries(self) -> None:
        self._cache.hold_queries()

    def compact(self, position: int) -> None:
        self._fields["shift"][0] = self._cache.compact(position)
        self._tail_base = position

    def reset(self) -> None:
        self._cache.reset()
        self._tail_base = 0
        self._fields["shift"][0] = 0

    def state_hash(self, position: int) -> int:
        return self._cache.state_hash(position)

    def occupancy(self, position: int) -> Occupancy:
        return self._cache.occupancy(position)

    def close(self) -> None:
        for graph in self._graphs.values():
            self._device.destroy_graph(graph)
        self._graphs, self._contexts, self._engine = {}, [], None
        self._inputs = self._logits = self._cache = None
        self._fields = {}
        self._memory.close()


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
