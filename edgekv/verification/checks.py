"""Checks behind `edgekv verify`: kernels against the NumPy reference, engines against each other, on one bundle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from edgekv import layout, native
from edgekv.bundle import Bundle
from edgekv.engine.device import TO_DEVICE, TO_HOST, Device
from edgekv.errors import EdgekvError, NativeError, UserError
from edgekv.reference import ReferenceCache
from edgekv.reference.self_index import SelfIndexCache
from edgekv.verification import comparison

# Largest difference of an attention output from the reference. Keys and values are stored alike, so only sums differ in order.
TOLERANCE = {layout.ELEMENTS["fp32"]: 1e-4, layout.ELEMENTS["fp16"]: 2e-3}
RETRIEVED = 40  # compressed tokens that rows retrieve in the second half of a text, by their codes
MOST_SLOTS = 512  # kept tokens in these checks: the reference is slow and more slots are more of the same


class Result(NamedTuple):
    """passed is None when the check could not be made; detail says why, or what was found."""

    what: str
    passed: bool | None
    detail: str


def run_all(bundle: Bundle, engine_folder: Path | None, tokens: int, threshold: float, report: Callable[[Result], None] | None = None) -> list[Result]:
    """Every check, in order; `report` is told each result as it comes."""
    results = []

    def add(result: Result) -> None:
        results.append(result)
        if report:
            report(result)

    for params in distinct_layers(bundle):
        what = f"{{}} kernels, {params['q_heads']}/{params['kv_heads']} heads of {params['key_dim']}"
        table = np.asarray(bundle.inv_freq(params["layer"]), np.float32)
        add(compare_kernels(what.format("CPU"), params, table, CpuCache))
        device, reason = usable_device()
        if device is None:
            add(Result(what.format("CUDA"), None, reason))
        else:
            add(compare_kernels(what.format("CUDA"), params, table, lambda p, t, device=device: CudaCache(device, p, t)))
    for result in compare_engines(bundle, engine_folder, tokens, threshold):
        add(result)
    return results


def distinct_layers(bundle: Bundle) -> list[dict]:
    """One set of parameters for each shape of layer, cut to MOST_SLOTS, rotation left to the caller."""
    shapes, seen = [], set()
    for layer in bundle.layers:
        params = layout.complete(layer["params"]) | {"fused_rotary": 0}
        if params["head_dim"]:  # what is stored of thin keys knows no rotation
            params |= {"head_dim": 0, "rotary_dim": 0}
        slots = min(params["body_slots"], MOST_SLOTS)
        room = slots if layout.is_selfindex(params) else slots - params["sinks"]
        params |= {"body_slots": slots, "window": min(params["window"], room)}
        if layout.is_selfindex(params):
            params["intervals"] = max(params["intervals"], slots // params["tail_slots"] + 2)
        key = tuple(v for n, v in params.items() if n != "layer")
        if key not in seen:
            seen.add(key)
            shapes.append(params)
    return shapes


def usable_device() -> tuple[Device | None, str]:
    """The GPU with our library, or why there is none."""
    try:
        device = Device()
    except UserError as error:
        return None, str(error)
    info = device.info()
    return (device, "") if info["count"] else (None, f"no CUDA device ({info['reason']})")


class CpuCache:
    """The native library with the reference's interface."""

    def __init__(self, params: dict, table: np.ndarray):
        self.params, self.table = native.LayerParams(**params), table if table.size else None
        self.state = native.new_state(self.params)

    def set_retrieval(self, tokens: int) -> None:
        header = self.state[: layout.HEADER.itemsize].view(layout.HEADER)
        header["retrieve"], header["candidates"] = tokens, 0

    def attend(self, q, k, v, position):
        slots = native.retrieve(self.params, q, position, self.state) if self.params.format == layout.FORMATS["selfindex"] else None
        chosen = slots if slots is not None and slots.size else None
        return native.attend(self.params, q, k, v, position, self.state, threads=2, slots=chosen)

    def compact(self, position, rank_base):
        native.compact(self.params, self.state, position, rank_base, self.table)


class CudaCache:
    """The CUDA kernels with the reference's interface; every call copies, which is no way to run a model but a way to check one."""

    def __init__(self, device: Device, params: dict, table: np.ndarray):
        self.device, self.params = device, native.LayerParams(**params)
        self.owned: list[int] = []
        self.stream = device.stream()
        self.state = self.upload(native.new_state(self.params))
        self.table = self.upload(table) if table.size else 0
        self.packed = layout.is_selfindex(params)
        steps = device.step_workspace, *([device.retrieve_workspace] if self.packed else [])
        self.workspace = self.room(max(device.compact_workspace(self.params), *(f(self.params, params["tail_slots"]) for f in steps)))

    def room(self, size: int) -> int:
        self.owned.append(self.device.alloc(max(size, 1)))
        return self.owned[-1]

    def upload(self, array: np.ndarray) -> int:
        array = np.ascontiguousarray(array)
        address = self.room(array.nbytes)
        self.device.copy(address, array.ctypes.data, array.nbytes, TO_DEVICE, self.stream)
        self.device.wait(self.stream)
        return address

    def set_retrieval(self, tokens: int) -> None:
        fields, at = np.array([tokens, 1], np.int32), layout.HEADER.fields["retrieve"][1]
        self.device.copy(self.state + at, fields.ctypes.data, fields.nbytes, TO_DEVICE, self.stream)
        self.device.wait(self.stream)

    def attend(self, q, k, v, position):
        p, y = self.params, np.empty((len(q), self.params.q_heads, self.params.value_dim), np.float32)
        kept = len(self.owned)
        rows = [self.upload(np.asarray(x, np.float32)) for x in (q, k, v)]
        where, out = self.upload(np.array([position], np.int64)), self.room(y.nbytes)
        slots = self.room(p.kv_heads * len(q) * p.body_slots // 8) if self.packed else 0
        if slots:
            self.device.retrieve(p, self.state, rows[0], len(q), where, slots, self.workspace, self.stream)
        self.device.step(p, self.state, *rows, len(q), where, out, self.workspace, self.stream, slots)
        self.device.copy(y.ctypes.data, out, y.nbytes, TO_HOST, self.stream)
        self.device.wait(self.stream)
        while len(self.owned) > kept:
            self.device.free(self.owned.pop())
        return y

    def compact(self, position, rank_base):
        self.device.compact(self.params, self.table, self.state, position, rank_base, self.workspace, self.stream)
        self.device.wait(self.stream)

    def close(self) -> None:
        while self.owned:
            self.device.free(self.owned.pop())
        self.device.destroy_stream(self.stream)


def compare_kernels(what: str, params: dict, table: np.ndarray, make: Callable) -> Result:
    """A random text through the reference and through `make(params, table)`: prefill, decode, compactions until tokens are evicted. On a
    compressed cache, rows of the second half retrieve."""
    random, interval = np.random.default_rng(0), params["tail_slots"]
    boundaries = params["body_slots"] // interval + (1 if params["keep"] == layout.KEEPS["full"] else 2)
    length = boundaries * interval
    q = random.standard_normal((length, params["q_heads"], params["key_dim"]), np.float32)
    k = random.standard_normal((length, params["kv_heads"], params["key_dim"]), np.float32)
    v = random.standard_normal((length, params["kv_heads"], params["value_dim"]), np.float32)
    packed, worst, position = layout.is_selfindex(params), 0.0, 0
    reference = SelfIndexCache(params) if packed else ReferenceCache(params, table)
    cache = make(params, table)
    try:
        while position < length - 1:
            room = interval - position % interval
            rows = min(room, int(random.choice([1, 5, room])))
            if packed and position >= length // 2:
                rows = min(rows, 16)
                reference.retrieve = RETRIEVED
                cache.set_retrieval(RETRIEVED)
            part = slice(position, position + rows)
            difference = np.abs(cache.attend(q[part], k[part], v[part], position) - reference.attend(q[part], k[part], v[part], position))
            worst = max(worst, float(difference.max()) if np.isfinite(difference).all() else float("inf"))
            position += rows
            if position % interval == 0 and position < length:
                rank = min(position, params["body_slots"]) if params["positions"] else position
                cache.compact(position, rank)
                reference.compact(position) if packed else reference.compact(position, rank)
    except EdgekvError as error:
        return Result(what, False, str(error))
    finally:
        if hasattr(cache, "close"):
            cache.close()
    bound = TOLERANCE[params["element"]]
    return Result(what, worst <= bound, f"largest difference {worst:.1e} from the reference over {length} tokens (at most {bound:.0e})")


def compare_engines(bundle: Bundle, folder: Path | None, tokens: int, threshold: float) -> Iterator[Result]:
    """Every engine that runs here against ONNX Runtime on the CPU, which takes the tokens one by one."""
    from edgekv.engine import onnxruntime_cuda
    from edgekv.engine.onnxruntime import OnnxRuntimeEngine
    from edgekv.engine.tensorrt import TensorRTEngine

    length = min(tokens, bundle.capacity or tokens)
    names = ("ONNX Runtime, blocks", "ONNX Runtime on the GPU", "TensorRT")
    whats = [f"{name} against ONNX Runtime, token by token" for name in names]
    if comparison.polygraphy_missing():
        yield from (Result(what, None, comparison.MISSING) for what in whats)
        return
    feeds = comparison.text_blocks(bundle.model["vocab"], bundle.boundary, length)
    reference = comparison.Comparison(comparison.make_runner("reference", lambda: OnnxRuntimeEngine(bundle), one_by_one=True), feeds)
    device, no_device = usable_device()
    candidates = (
        (None, lambda: OnnxRuntimeEngine(bundle, max_rows=comparison.BLOCK)),
        (onnxruntime_cuda.refusal(bundle), lambda: onnxruntime_cuda.OnnxRuntimeCudaEngine(bundle, comparison.BLOCK)),
        (no_device if device is None else None, lambda: TensorRTEngine(bundle, folder, comparison.BLOCK)),
    )
    for what, (refusal, load) in zip(whats, candidates, strict=True):
        yield Result(what, None, refusal) if refusal else engine_agrees(what, reference, load, threshold)


def engine_agrees(what: str, reference: comparison.Comparison, load: Callable, threshold: float) -> Result:
    """An engine that cannot be loaded was not checked; one that fails on the way is wrong."""
    try:
        found = reference.against(comparison.make_runner(what, load))
    except UserError as error:
        return Result(what, None, str(error))
    except NativeError as error:
        return Result(what, False, str(error))
    return Result(what, found.passes(threshold), found.words(threshold))
