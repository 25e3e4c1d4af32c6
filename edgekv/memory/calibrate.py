"""Rates of this machine for edgekv's own kernels: what a predicted step time is made of.

    step = step_overhead + layers x layer_overhead + weight bytes / weight_rate + KV bytes / kv_rate

The weight rate depends on the model's width: it is timed for hidden size 576 and 2048, and predictor.rate_at reads between them.
Each is timed alone on small graphs made here, never on the model that is to be predicted: a decoder of tiny layers for the
overheads, a chain of large matrices that no cache holds for the weight rates, the attention kernel on caches that no cache holds
for the KV rates, and a block of many rows for the arithmetic rate. Where the last cache level is large enough for a small model,
the rates are taken a second time on as much as it holds.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np

from edgekv import layout, machine, native
from edgekv.memory.micrograph import Graph
from edgekv.memory.profiles import figure

MICROSOFT = "com.microsoft"
BLOCK = 32
BITS = {"int4": 4, "int8": 8}
# Widths of the models whose matrices are timed: short rows and small matrices cost more per byte. predictor.rate_at knows them too.
NARROW, WIDE = 576, 2048
SAMPLE = 65537  # random numbers that are drawn and repeated to fill a matrix; a prime, so that rows differ
LEAST_ON_CHIP = 24 << 20  # bytes of last cache level below which no model's weights stay in it


clock = time.perf_counter  # tools/speed_check.py --cpu-time replaces it


def seconds(call: Callable[[], Any], least: float = 0.5, calls: int = 5) -> float:
    """Time of a call undisturbed: the fastest tenth of at least `calls` calls and `least` seconds, after one that warms up."""
    call()
    times = []
    while len(times) < calls or sum(times) < least:
        began = clock()
        call()
        times.append(clock() - began)
    return sorted(times)[len(times) // 10]


class _Session:
    """An ONNX Runtime session of a micrograph, run as the engine runs a bundle's graph: bound inputs and outputs."""

    def __init__(self, graph: Graph, inputs: dict[str, np.ndarray], outputs: dict[str, np.ndarray], threads: int):
        import onnxruntime as ort

        from edgekv.engine import products
        from edgekv.engine.onnxruntime import CPU, session_options

        self._session = ort.InferenceSession(products.for_cpu(graph.model()).data, session_options(threads), providers=CPU)
        machine.huge_pages()
        self._binding, self._kept = self._session.io_binding(), (inputs, outputs)
        for name, array in inputs.items():
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, array in outputs.items():
            self._binding.bind_ortvalue_output(name, ort.OrtValue.ortvalue_from_numpy(array))

    def __call__(self) -> None:
        self._session.run_with_iobinding(self._binding)


def _matrix(graph: Graph, x: str, outputs: int, inputs: int, weights: str, random: np.random.Generator) -> tuple[str, int]:
    """A linear layer as the exporter writes it in a weight format; returns its output and the bytes of its weights.

    The numbers keep their size from layer to layer: a chain that dies away ends in denormal numbers, which some processors
    multiply a hundred times more slowly.
    """
    if weights not in BITS:
        matrix = np.resize(random.standard_normal(SAMPLE, np.float32) / np.float32(inputs**0.5), (inputs, outputs))
        return graph.node("MatMul", [x, graph.constant(matrix)]), matrix.nbytes
    bits, blocks = BITS[weights], inputs // BLOCK
    if bits == 4:  # one more column per block holds offsets; the input gets the sums of its blocks appended
        x = graph.node("AppendBlockSums", [x], domain="edgekv")
        blocks += -(-blocks // BLOCK)
    shape = (outputs, blocks, BLOCK * bits // 8)
    codes = np.resize(random.integers(1, 256, SAMPLE, dtype=np.uint8), shape)
    if bits == 4:  # 1 to 15 in each half, 8 on average, which is the zero point
        codes = np.resize(random.integers(1, 16, SAMPLE, dtype=np.uint8) | random.integers(1, 16, SAMPLE, dtype=np.uint8) << 4, shape)
    codes[:, inputs // BLOCK :] = 0x88  # no offsets
    scales = np.full((outputs, blocks), 12**0.5 / 2**bits / inputs**0.5, np.float32)
    zeros = np.full((outputs, -(-blocks * bits // 8)), 0x88 if bits == 4 else 0x80, np.uint8)
    names = [graph.constant(part) for part in (codes, scales, zeros)]
    y = graph.node("MatMulNBits", [x, *names], domain=MICROSOFT, K=blocks * BLOCK, N=outputs, bits=bits, block_size=BLOCK, accuracy_level=4)
    return y, codes.nbytes + scales.nbytes + zeros.nbytes


def _layer_sizes(hidden: int) -> list[tuple[int, int]]:
    """(outputs, inputs) of a decoder layer's matrices as the exporter joins them: q, k and v; attention output; gate and up; down."""
    inner = hidden * 8 // 3
    return [(hidden * 5 // 3 // BLOCK * BLOCK, hidden), (hidden, hidden), (2 * inner // BLOCK * BLOCK, hidden), (hidden, inner // BLOCK * BLOCK)]


def weight_seconds(weights: str, total: int, threads: int, rows: int = 1, hidden: int = WIDE) -> tuple[float, int, int]:
    """(seconds, weight bytes, multiply-adds) of the matrices of as many layers of this width as `total` bytes need, on `rows` rows.

    Only what one layer's matrix needs of the other's output is passed on: parts of it, by slicing.
    """
    graph, random = Graph(), np.random.default_rng(0)
    x, moved, count = graph.input("x", np.float32, [1, rows, hidden]), 0, 0
    start, axis = graph.constant(np.zeros(1, np.int64)), graph.constant(np.array([2], np.int64))
    while moved < total:
        width = hidden
        for outputs, inputs in _layer_sizes(hidden):
            if inputs < width:
                x = graph.node("Slice", [x, start, graph.constant(np.array([inputs], np.int64)), axis])
            x, size = _matrix(graph, x, outputs, inputs, weights, random)
            moved, count, width = moved + size, count + outputs * inputs, outputs
    graph.node("Identity", [x], ["y"])
    graph.output("y", np.float32, [1, rows, hidden])
    run = _Session(graph, {"x": np.ones((1, rows, hidden), np.float32)}, {"y": np.empty((1, rows, hidden), np.float32)}, threads)
    return seconds(run), moved, count * rows


def decoder_seconds(layers: int, threads: int) -> float:
    """A decode step of a model whose layers are as small as they can be, node for node like an exported one: overhead alone."""
    hidden, heads, kv_heads, dim = 64, 4, 2, 16
    graph, random = Graph(), np.random.default_rng(0)
    params = layout.complete({
        "q_heads": heads, "kv_heads": kv_heads, "key_dim": dim, "value_dim": dim, "body_slots": 16, "tail_slots": 16, "scale": 0.25,
        "rotary_dim": dim, "fused_rotary": 1,
    })  # fmt: skip
    size = layout.state_bytes(params)
    x = graph.input("x", np.float32, [1, 1, hidden])
    position = graph.input("position", np.int64, [1])
    inputs, outputs = {"x": np.ones((1, 1, hidden), np.float32), "position": np.zeros(1, np.int64)}, {}
    ones = graph.constant(np.ones(hidden, np.float32))
    cos, sin = graph.constant(np.ones((1, 1, dim // 2), np.float32)), graph.constant(np.zeros((1, 1, dim // 2), np.float32))
    halves = graph.constant(np.array([2 * hidden, 2 * hidden], np.int64))
    attributes = {name: float(params[name]) if code == "f" else int(params[name]) for name, code, _ in layout.FIELDS}
    for index in range(layers):
        state = native.new_state(native.LayerParams(**params)).view(np.int8)
        graph.input(f"s{index}", np.int8, [size])
        graph.output(f"t{index}", np.int8, [size])
        inputs[f"s{index}"] = outputs[f"t{index}"] = state
        normed = graph.node("RMSNormalization", [x, ones], axis=-1, epsilon=1e-5)
        packed, _ = _matrix(graph, normed, (heads + 2 * kv_heads) * dim, hidden, "int4", random)
        y = graph.node("BoundedCacheAttention", [packed, "", "", position, f"s{index}", cos, sin], [f"a{index}", f"t{index}"], "edgekv", **attributes)
        x = graph.node("Add", [x, _matrix(graph, y, hidden, heads * dim, "int4", random)[0]])
        normed = graph.node("RMSNormalization", [x, ones], axis=-1, epsilon=1e-5)
        both, _ = _matrix(graph, normed, 4 * hidden, hidden, "int4", random)
        gate, up = f"g{index}", f"u{index}"
        graph.node("Split", [both, halves], [gate, up], axis=-1)
        gated = graph.node("Mul", [graph.node("Mul", [gate, graph.node("Sigmoid", [gate])]), up])
        x = graph.node("Add", [x, _matrix(graph, gated, hidden, 2 * hidden, "int4", random)[0]])
    graph.node("Identity", [x], ["y"])
    graph.output("y", np.float32, [1, 1, hidden])
    outputs["y"] = np.empty((1, 1, hidden), np.float32)
    return seconds(_Session(graph, inputs, outputs, threads))


def cache_seconds(element: str, total: int, threads: int, depth: int = 4096, group: int = 3, dim: int = 64) -> tuple[float, int]:
    """(seconds, KV bytes) of one-row attention over full bodies of `depth` tokens, as many layers as `total` bytes need."""
    heads = 4
    params = layout.complete({
        "q_heads": heads * group, "kv_heads": heads, "key_dim": dim, "value_dim": dim, "body_slots": depth, "tail_slots": 16,
        "element": layout.ELEMENTS[element], "scale": 0.1,
    })  # fmt: skip
    attributes = {name: float(params[name]) if code == "f" else int(params[name]) for name, code, _ in layout.FIELDS}
    struct, size = native.LayerParams(**params), layout.state_bytes(params)
    moved = heads * 2 * dim * layout.element_bytes(params) * (depth + 1)
    graph, width = Graph(), heads * (group + 2) * dim
    packed, position = graph.input("packed", np.float32, [1, 1, width]), graph.input("position", np.int64, [1])
    inputs = {"packed": np.full((1, 1, width), 0.1, np.float32), "position": np.full(1, depth, np.int64)}
    outputs: dict[str, np.ndarray] = {}
    layers = max(1, -(-total // moved))
    for index in range(layers):
        state = native.new_state(struct)
        view = layout.StateView(params, state)
        view.body_pos[:] = np.arange(depth)
        view.body_k[:], view.body_v[:] = 0.1, 0.1
        view.header["body_count"] = view.header["tail_base"] = view.header["rank_base"] = depth
        graph.input(f"s{index}", np.int8, [size])
        graph.node("BoundedCacheAttention", [packed, "", "", position, f"s{index}"], [f"y{index}", f"t{index}"], "edgekv", **attributes)
        graph.output(f"y{index}", np.float32, [1, 1, heads * group * dim])
        graph.output(f"t{index}", np.int8, [size])
        inputs[f"s{index}"] = outputs[f"t{index}"] = state.view(np.int8)
        outputs[f"y{index}"] = np.empty((1, 1, heads * group * dim), np.float32)
    return seconds(_Session(graph, inputs, outputs, threads)), moved * layers


def calibrate(last_level_bytes: int, threads: int | None = None) -> dict[str, Any]:
    """The `calibration` section of a profile; about 20 seconds. last_level_bytes: of the last cache, which must not help."""
    threads = threads or machine.default_threads()
    total = min(max(8 * last_level_bytes, 128 << 20), 512 << 20, machine.available_memory() // 8)  # victim caches fade slowly
    few, many = decoder_seconds(4, threads), decoder_seconds(24, threads)
    layer = max((many - few) / 20, 0.0)
    source = f"timed on this machine with {threads} threads, ONNX Runtime and edgekv's kernels ({native.isa()}), load {machine.load():.2f}"
    took, _, products = weight_seconds("int4", 4 << 20, threads, rows=256, hidden=768)
    return {
        "step_overhead": figure(round(max(few - 4 * layer, 0.0) * 1e6, 1), "us", source, "measured"),
        "layer_overhead": figure(round(layer * 1e6, 1), "us", source, "measured"),
        "weight_rate": _weight_rates(total, threads, source, WIDE),
        "narrow_weight_rate": _weight_rates(total, threads, source, NARROW),
        "kv_rate": _cache_rates(total, threads, source),
        "on_chip": {
            "weight_rate": _weight_rates(last_level_bytes // 3, threads, source, NARROW),
            "kv_rate": _cache_rates(last_level_bytes // 3, threads, source),
        } if last_level_bytes >= LEAST_ON_CHIP else None,
        "prefill_rate": figure(round(2 * products / took / 1e12, 4), "TOP/s", source, "measured"),
    }


def _weight_rates(total: int, threads: int, source: str, hidden: int) -> dict[str, Any]:
    """Weight rates by format, GB/s, over footprints of `total` bytes."""
    rates = {}
    for weights in ("int4", "int8", "fp32"):
        took, moved, _ = weight_seconds(weights, total, threads, hidden=hidden)
        rates[weights] = figure(round(moved / took / 1e9, 2), "GB/s", source, "measured")
    return rates


def _cache_rates(total: int, threads: int, source: str) -> dict[str, Any]:
    """KV rates by element, GB/s, over footprints of `total` bytes."""
    rates = {}
    for element in ("fp16", "fp32"):
        took, moved = cache_seconds(element, total, threads)
        rates[element] = figure(round(moved / took / 1e9, 2), "GB/s", source, "measured")
    return rates
