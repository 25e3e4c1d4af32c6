"""Times retrieval and sparse attention on a compressed body against full fp16 attention, side by side in one run.

    python tools/bench_retrieval.py [--depth 32768] [--shape 32,8,128] [--retrieve 7.5%] [--rerank R] [--threads 2] [--json]

Both run as ONNX Runtime nodes with states bound in place, in huge pages as the engine asks for them. --layers compressed caches take turns,
so many that their index planes do not stay in a processor's caches, as in a model they would not; of the full caches, which are larger than
any, two do. torch runs scaled_dot_product_attention with the query heads of a kv head as rows, in three types. States are filled with random
codes and records: what they hold decides nothing about the time but how the scores are spread. Every figure is the shortest of
--repeat times, taken in turns, because other programs can only make a step longer.

The bound of the scan, which includes the table and its biases, is the time torch takes to add up the index planes themselves, as 64-bit
integers.
"""

from __future__ import annotations

import argparse
import json
import os
import time

import numpy as np
import onnxruntime
import torch
from onnx import TensorProto, helper

from edgekv import layout, machine, native
from edgekv.retrieval import candidates_for

TAIL = 256
FULL_LAYERS = 2
SHARED = ("q", "k", "v", "position")


def layer(shape, depth: int, bits: tuple[int, int] | None) -> native.LayerParams:
    """A full cache; compressed with bits for keys and values, else dense."""
    q_heads, kv_heads, dim = shape
    fields = {"q_heads": q_heads, "kv_heads": kv_heads, "key_dim": dim, "value_dim": dim, "body_slots": depth, "tail_slots": TAIL, "scale": dim**-0.5}
    packed = {"format": 1, "key_bits": bits[0], "value_bits": bits[1], "intervals": depth // TAIL} if bits else {}
    return native.LayerParams(**fields, **packed)


def random_state(params: native.LayerParams, depth: int, rng) -> np.ndarray:
    """A state of `depth` tokens, all in the body."""
    fields = {name: getattr(params, name) for name, _ in params._fields_}
    state = native.new_state(params)
    view = layout.StateView(fields, state)
    view.body_pos[:] = np.arange(depth)
    view.header["body_count"] = view.header["tail_base"] = view.header["rank_base"] = depth
    if not params.format:
        for plane in (view.body_k, view.body_v):
            plane[...] = rng.standard_normal(plane.shape, np.float32)
        return state
    view.index[...] = rng.integers(0, 256, view.index.shape, np.uint8)
    view.payload[...] = rng.integers(0, 256, view.payload.shape, np.uint8)
    *ends, size = np.cumsum(layout.record_parts(fields))
    view.payload[..., ends[1] : size].view(np.float16)[...] = rng.uniform(0.2, 0.5, (*view.payload.shape[:2], (size - ends[1]) // 2))
    view.mean[...] = 0.1 * rng.standard_normal(view.mean.shape, np.float32)
    signs = 2.0 * ((np.arange(16)[:, None] >> np.arange(4)) & 1) - 1
    view.codebook[...] = signs * rng.uniform(0.6, 1.0, view.codebook.shape)
    return state


class Session:
    """One graph of nodes, each with its own states bound in place; a call runs it once."""

    def __init__(self, params, states, nodes_of, q_rows, position, threads):
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.add_session_config_entry("session.force_spinning_stop", "1")  # a session's threads must not spin while another is timed
        options.register_custom_ops_library(str(native.LIBRARY))
        fields = {name: getattr(params, name) for name, _ in params._fields_}
        nodes = [node for i in range(len(states)) for node in nodes_of(i, fields)]
        names = [f"state.{i}" for i in range(len(states))]
        size = states[0].nbytes
        ios = [(n, TensorProto.INT8, [size]) for n in names]
        inputs = [(n, TensorProto.FLOAT, None) for n in SHARED[:3]] + [("position", TensorProto.INT64, [1])] + ios
        made = {name for node in nodes for name in node.output} - {name for node in nodes for name in node.input}
        outputs = [(n + ".out", TensorProto.INT8, [size]) for n in names if n + ".out" in made]
        outputs += [(n, TensorProto.INT32 if n.startswith("slots") else TensorProto.FLOAT, None) for n in sorted(made) if n[0] in "sy" and ".out" not in n]
        info = helper.make_tensor_value_info
        graph = helper.make_graph(nodes, "bench", [info(*x) for x in inputs], [info(*x) for x in outputs])
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)], ir_version=10)
        self.session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        self.binding, self.kept = self.session.io_binding(), states
        for name, rows in q_rows.items():
            self.binding.bind_cpu_input(name, rows)
        self.binding.bind_cpu_input("position", np.array([position]))
        for name, state in zip(names, states):
            self.binding.bind_input(name, "cpu", 0, np.int8, state.shape, state.ctypes.data)
        for name, kind, _ in outputs:
            if kind == TensorProto.INT8:
                state = states[int(name.split(".")[1])]
                self.binding.bind_output(name, "cpu", 0, np.int8, state.shape, state.ctypes.data)
            else:
                self.binding.bind_output(name, "cpu")

    def __call__(self):
        self.session.run_with_iobinding(self.binding)


def choose_node(i, fields):
    return helper.make_node("SignVQRetrieval", [*SHARED, f"state.{i}"], [f"slots.{i}"], domain="edgekv", **fields)


def attend_node(i, fields, slots):
    inputs = [*SHARED, f"state.{i}", "", "", f"slots.{i}"] if slots else [*SHARED, f"state.{i}"]
    return helper.make_node("BoundedCacheAttention", inputs, [f"y.{i}", f"state.{i}.out"], domain="edgekv", **fields)


def torch_steps(shape, depth: int, layers: int):
    q_heads, kv_heads, dim = shape
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        q = torch.randn(1, kv_heads, q_heads // kv_heads, dim).to(dtype)
        caches = [[torch.randn(1, kv_heads, depth, dim, dtype=torch.float32).to(dtype) for _ in range(2)] for _ in range(layers)]

        def step(q=q, caches=caches):
            for k, v in caches:
                torch.nn.functional.scaled_dot_product_attention(q, k, v)

        yield f"torch {str(dtype)[6:]}", step


def measure(args) -> dict:
    rng = np.random.default_rng(0)
    q_heads, kv_heads, dim = shape = tuple(args.shape)
    depth = args.depth // TAIL * TAIL
    k = round(float(args.retrieve[:-1]) / 100 * depth) if args.retrieve.endswith("%") else int(args.retrieve)
    ranked = candidates_for(k, args.rerank)
    rows = {n: rng.standard_normal((1, 1, heads * dim)).astype(np.float32) for n, heads in (("q", q_heads), ("k", kv_heads), ("v", kv_heads))}
    packed, dense = layer(shape, depth, (args.key_bits, args.value_bits)), layer(shape, depth, None)
    small = [random_state(packed, depth, rng) for _ in range(args.layers)]
    large = [random_state(dense, depth, rng) for _ in range(FULL_LAYERS)]

    def session(params, states, nodes):
        return Session(params, states, nodes, rows, depth, args.threads)

    # One for each shape of the slots.
    scanning, searching, ranking = (session(packed, small, lambda i, f: [choose_node(i, f)]) for _ in range(3))
    both = session(packed, small, lambda i, f: [choose_node(i, f), attend_node(i, f, True)])

    def with_header(run, retrieve, candidates):
        def step():
            for state in small:
                header = state[:256].view(layout.HEADER)[0]
                header["retrieve"], header["candidates"] = retrieve, candidates
            run()

        return step

    planes = [torch.from_numpy(layout.StateView({n: getattr(packed, n) for n, _ in packed._fields_}, s).index.reshape(-1).view(np.int64)) for s in small]
    steps = {
        "scan": with_header(scanning, 1, 0),
        "scan and choice": with_header(searching, k, 0),
        "scan, choice and second ranking": with_header(ranking, k, ranked),
        "retrieval and attention": with_header(both, k, ranked),
        "retrieval and attention, one ranking": with_header(both, k, 0),
        "edgekv fp16, all tokens": session(dense, large, lambda i, f: [attend_node(i, f, False)]),
        "reading the index": lambda: [plane.sum() for plane in planes],
        **dict(torch_steps(shape, depth, FULL_LAYERS)),
    }
    machine.huge_pages()  # as the engine does when it loads a bundle
    clock = time.thread_time if args.cpu_time else time.perf_counter
    best = dict.fromkeys(steps, float("inf"))
    with torch.inference_mode():
        for _ in range(args.repeat):
            for name, step in steps.items():
                step()  # what others left in the caches must not decide
                start = clock()
                step()
                best[name] = min(best[name], clock() - start)
    is_full = {name: name.startswith("torch") or "all tokens" in name for name in best}
    us = {name: seconds / (FULL_LAYERS if is_full[name] else args.layers) * 1e6 for name, seconds in best.items()}
    full = {name: t for name, t in us.items() if is_full[name]}
    fastest = min(full, key=full.get)
    return {
        "isa": native.isa(), "threads": args.threads, "shape": shape, "depth": depth, "retrieve": k, "ranked": ranked,
        "key_bits": args.key_bits, "value_bits": args.value_bits, "layers": args.layers, "load": os.getloadavg()[0], "us_per_layer": us,
        "fastest_full": fastest,
        "speedup": full[fastest] / us["retrieval and attention"],
        "speedup_one_ranking": full[fastest] / us["retrieval and attention, one ranking"],
        "scan_over_bound": us["scan"] / us["reading the index"],
    }  # fmt: skip


def main() -> None:
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--depth", type=int, default=32768)
    parser.add_argument("--shape", type=numbers, default=[32, 8, 128], help="query heads, kv heads, head size")
    parser.add_argument("--retrieve", default="7.5%", help="tokens, or percent of the depth")
    parser.add_argument("--rerank", type=int, help="as of edgekv run; default: what a bundle has")
    parser.add_argument("--key-bits", type=int, default=2)
    parser.add_argument("--value-bits", type=int, default=2)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--cpu-time", action="store_true", help="processor time of one thread, for machines with other programs running")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    args.threads = 1 if args.cpu_time else args.threads
    torch.set_num_threads(args.threads)
    report = measure(args)
    if args.json:
        print(json.dumps(report, indent=1))
        return
    print(f"{report['isa']}, {report['threads']} threads, load {report['load']:.1f}; {report['depth']} tokens, {report['retrieve']} retrieved of {report['ranked']}")
    for name, time_us in report["us_per_layer"].items():
        print(f"{name:40} {time_us:10.1f} us per layer")
    print(f"faster than {report['fastest_full']}: {report['speedup']:.2f}x; with one ranking {report['speedup_one_ranking']:.2f}x")
    print(f"scan / reading its bytes: {report['scan_over_bound']:.2f}")


if __name__ == "__main__":
    main()
