"""Times the cache attention against torch's scaled_dot_product_attention, side by side in one run.

    python tools/bench_attention.py --depths 512,8192,32768 --rows 1,64,256 [--json]

Ours is the ONNX Runtime op as a session runs it: one graph of --layers nodes with a cache each, states bound in place, the whole
cache streamed at every step like in a model, so that for large depths nothing stays in the processor's cache between steps. torch
attends to tensors of the same depth, layer by layer, in float32 and bfloat16 (float16 is slower on CPUs); the better one counts.
GB/s are key and value bytes divided by time; GFLOP/s are 2 * (key_dim + value_dim) per query head, row and visible key.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

from edgekv import native

TAIL = 256


def seconds(call, least: float = 0.3) -> float:
    """Median time of one call, over at least five calls and `least` seconds."""
    call()
    times = []
    while len(times) < 5 or sum(times) < least:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


class OurStep:
    """`layers` BoundedCacheAttention nodes on caches that already hold `depth` tokens."""

    def __init__(self, shape, depth: int, rows: int, layers: int, threads: int):
        q_heads, kv_heads, dim = shape
        body = depth // TAIL * TAIL
        params = native.LayerParams(
            q_heads=q_heads, kv_heads=kv_heads, key_dim=dim, value_dim=dim, body_slots=body, tail_slots=TAIL, scale=dim**-0.5
        )
        size = native.state_bytes(params)
        fields = {name: getattr(params, name) for name, _ in params._fields_}
        nodes, inputs, outputs = [], [], []
        for layer in range(layers):
            nodes.append(
                helper.make_node(
                    "BoundedCacheAttention",
                    ["q", "k", "v", "position", f"state.{layer}"],
                    [f"y.{layer}", f"state.{layer}.out"],
                    domain="edgekv",
                    **fields,
                )
            )
            inputs.append(helper.make_tensor_value_info(f"state.{layer}", TensorProto.INT8, [size]))
            outputs.append(helper.make_tensor_value_info(f"state.{layer}.out", TensorProto.INT8, [size]))
        outputs.append(helper.make_tensor_value_info(f"y.{layers - 1}", TensorProto.FLOAT, [1, "T", q_heads * dim]))
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "T", heads * dim]))
        inputs.append(helper.make_tensor_value_info("position", TensorProto.INT64, [1]))
        model = helper.make_model(
            helper.make_graph(nodes, "bench", inputs, outputs),
            opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)],
            ir_version=10,
        )
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.register_custom_ops_library(str(native.LIBRARY))
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()

        rng = np.random.default_rng(0)
        self.states = native.aligned_bytes(size * layers)
        filled = self.filled(params, body, rng)
        for layer in range(layers):
            state = self.states[layer * size : (layer + 1) * size]
            state[:] = filled
            for bind, name in ((self.binding.bind_input, f"state.{layer}"), (self.binding.bind_output, f"state.{layer}.out")):
                bind(name, "cpu", 0, np.int8, state.shape, state.ctypes.data)
        for name, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads)):
            self.binding.bind_cpu_input(name, rng.standard_normal((1, rows, heads * dim)).astype(np.float32))
        self.binding.bind_cpu_input("position", np.array([body]))
        self.binding.bind_output(f"y.{layers - 1}", "cpu")

    @staticmethod
    def filled(params, body, rng) -> np.ndarray:
        state = native.new_state(params)
        for position in range(0, body, TAIL):
            k = rng.standard_normal((TAIL, params.kv_heads, params.key_dim), np.float32)
            q = np.zeros((1, params.q_heads, params.key_dim), np.float32)
            # The values of the queries do not matter for filling, so only one row in 256 is attended from.
            for first, count in ((0, TAIL - 1), (TAIL - 1, 1)):
                rows = k[first : first + count]
                native.attend(params, np.repeat(q, count, 0), rows, rows, position + first, state, threads=2)
            native.compact(params, state, position + TAIL)
        return state

    def __call__(self):
        self.session.run_with_iobinding(self.binding)


def torch_step(shape, depth: int, rows: int, layers: int, dtype):
    q_heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(0)
    new = lambda heads, n: torch.randn(1, heads, n, dim, generator=generator).to(dtype)  # noqa: E731
    q = new(q_heads, rows)
    first = new(kv_heads, depth + rows)
    caches = [(first.clone(), first.clone()) for _ in range(layers)]
    bias = None
    if rows > 1:
        visible = torch.ones(rows, depth + rows, dtype=torch.bool).tril(depth)
        bias = torch.zeros(rows, depth + rows, dtype=dtype).masked_fill(~visible, float("-inf"))

    def step():
        for k, v in caches:
            torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias, enable_gqa=q_heads != kv_heads)

    return step


def read_bandwidth(threads: int) -> float:
    """Bytes per second of summing an array much larger than the last-level cache."""
    data = torch.ones(1 << 27)
    return data.numel() * 4 / seconds(lambda: data.sum())


def measure(shape, depth: int, rows: int, layers: int, threads: int) -> dict:
    q_heads, kv_heads, dim = shape
    ours = seconds(OurStep(shape, depth, rows, layers, threads)) / layers
    peers = {}
    with torch.inference_mode():
        for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
            peers[name] = seconds(torch_step(shape, depth, rows, layers, dtype)) / layers
    best = min(peers, key=peers.get)
    kept = depth // TAIL * TAIL
    visible = rows * kept + rows * (rows + 1) / 2
    return {
        "q_heads": q_heads,
        "kv_heads": kv_heads,
        "dim": dim,
        "depth": kept,
        "rows": rows,
        "us_per_layer": ours * 1e6,
        "gb_per_s": (kept + rows) * kv_heads * dim * 2 * 2 / ours / 1e9,
        "gflop_per_s": visible * q_heads * dim * 2 * 2 / ours / 1e9,
        "torch_us_per_layer": peers[best] * 1e6,
        "torch_type": best,
        "speedup": peers[best] / ours,
    }


def main() -> None:
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depths", type=numbers, default=[512, 2048, 8192, 32768])
    parser.add_argument("--rows", type=numbers, default=[1])
    parser.add_argument("--shape", type=numbers, default=[9, 3, 64], help="query heads, kv heads, head size")
    parser.add_argument("--layers", type=int, default=0, help="caches to cycle through; default: 400 MB of them, at most 30")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    report = {"isa": native.isa(), "threads": args.threads, "read_gb_per_s": read_bandwidth(args.threads) / 1e9, "steps": []}
    if not args.json:
        print(f"{native.isa()}, {args.threads} threads, memory read at {report['read_gb_per_s']:.1f} GB/s")
        print(f"{'depth':>7} {'rows':>5} {'us/layer':>9} {'GB/s':>7} {'GFLOP/s':>8} {'torch us':>9} {'torch type':>10} {'speed-up':>8}")
    for depth in args.depths:
        for rows in args.rows:
            token = args.shape[1] * args.shape[2] * 4
            layers = args.layers or max(1, min(30, 400_000_000 // (depth * token)))
            r = measure(tuple(args.shape), depth, rows, layers, args.threads)
            report["steps"].append(r)
            if not args.json:
                print(
                    f"{r['depth']:7} {rows:5} {r['us_per_layer']:9.1f} {r['gb_per_s']:7.2f} {r['gflop_per_s']:8.1f}"
                    f" {r['torch_us_per_layer']:9.1f} {r['torch_type']:>10} {r['speedup']:8.2f}"
                )
    if args.json:
        print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
