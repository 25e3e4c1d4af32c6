"""A decode step of one layer with whole keys, projected ones, fewer rotary pairs and latent ones, in turns: python tools/bench_thin_keys.py [--heads 9 3 64] [--depths ...]

Prints processor time of one thread per step, the shortest of --runs rounds, and the ratio to whole keys of the same rounds. Every depth
works through as many states as --bytes hold, so that from a certain depth on keys and values come from memory, as in a model of many layers.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import time
from collections.abc import Callable

import numpy as np

from edgekv import layout, native


def make_states(params: dict, depth: int, count: int, seed: int) -> list[np.ndarray]:
    """Full caches with `depth` tokens in their bodies; the same random numbers in each."""
    fields = native.LayerParams(**params)
    first = native.new_state(fields)
    view, random = layout.StateView(params, first), np.random.default_rng(seed)
    for plane in (view.body_k, view.body_v, view.body_z):
        plane[...] = random.standard_normal(plane.shape, np.float32)
    view.body_pos[:] = np.arange(view.body_pos.shape[1])
    view.header["body_count"] = view.header["tail_base"] = view.header["rank_base"] = depth
    states = [first]
    for _ in range(count - 1):
        states.append(native.aligned_bytes(first.nbytes))
        states[-1][:] = first
    return states


def step_of(fields: native.LayerParams, given: dict, depth: int, maps: dict) -> Callable[[np.ndarray], None]:
    """A step on a state with everything but the state prepared: checking and passing arrays takes longer than mapping a row."""
    def pointer(array: np.ndarray | None, to: type = ctypes.POINTER(ctypes.c_float)):
        return None if array is None else array.ctypes.data_as(to)

    y = np.empty((1, fields.q_heads, fields.value_dim), np.float32)
    inputs = [pointer(given[name]) for name in "qkv"]
    tables = [pointer(given["cos"]), pointer(given["sin"]), given["cos"].shape[1], *(pointer(maps.get(name), ctypes.c_void_p) for name in ("query_map", "key_map"))]
    tables += [pointer(maps.get(name)) for name in ("key_encode", "key_decode", "inv_freq")]
    out = pointer(y)

    def step(state: np.ndarray) -> None:
        if native._lib.edgekv_attend(fields, *inputs, 1, depth, *tables, state.ctypes.data, state.nbytes, None, 0, 0, out, 1):
            raise SystemExit(native._lib.edgekv_last_error().decode())

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs=3, default=[9, 3, 64], help="query heads, kv heads, size")
    parser.add_argument("--depths", type=int, nargs="+", default=[64, 256, 1024, 4096, 8192])
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 16])
    parser.add_argument("--latent", type=int, nargs="*", default=[96, 48], help="numbers that stand for the keys of all kv heads")
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--bytes", type=int, default=128 << 20, help="states of one depth and rank together, at least one")
    given = parser.parse_args()
    q_heads, kv_heads, head = given.heads
    random = np.random.default_rng(0)
    angle = random.uniform(0, 6, (1, head // 2)).astype(np.float32)
    rows = {
        "q": random.standard_normal((1, q_heads, head), np.float32), "k": random.standard_normal((1, kv_heads, head), np.float32),
        "v": random.standard_normal((1, kv_heads, head), np.float32), "cos": np.cos(angle), "sin": np.sin(angle),
    }  # fmt: skip
    print(f"{q_heads}/{kv_heads} heads of {head}, fp16, {native.isa()}, load {os.getloadavg()[0]:.1f}")
    for depth in given.depths:
        cases = {}
        thin = [(form, rank) for form in ("projected", "pairs") for rank in given.ranks] + [("latent", rank) for rank in given.latent]
        for form, rank in [("whole", head), *thin]:
            thinner = form in ("projected", "pairs")
            params = layout.complete({
                "q_heads": q_heads, "kv_heads": kv_heads, "key_dim": rank if thinner else head, "value_dim": head, "body_slots": -(-depth // 16) * 16,
                "tail_slots": 64, "scale": 0.1, "rotary_dim": rank if form == "pairs" else head, "fused_rotary": layout.BY_HEAD if form == "pairs" else 1,
                "head_dim": head if form == "projected" else 0, "latent": rank if form == "latent" else 0,
            })  # fmt: skip
            shapes = {
                "whole": {}, "pairs": {}, "projected": {"query_map": (q_heads, head, rank), "key_map": (kv_heads, head, rank)},
                "latent": {"key_encode": (kv_heads * head, rank), "key_decode": (kv_heads, rank + 1, head), "inv_freq": (head // 2,)},
            }  # fmt: skip
            maps = {name: random.standard_normal(shape, np.float32) * 0.1 for name, shape in shapes[form].items()}
            maps |= {name: array.astype(layout.element_dtype(params["element"])) for name, array in maps.items() if form == "projected"}
            count = max(1, min(30, given.bytes // layout.state_bytes(params)))
            tables = {name: np.tile(rows[name][:, : rank // 2], kv_heads) for name in ("cos", "sin")}
            fewer = {name: np.ascontiguousarray(rows[name][..., :rank]) for name in "qk"} | tables if form == "pairs" else {}
            cases[form, rank] = (step_of(native.LayerParams(**params), rows | fewer, depth, maps), make_states(params, depth, count, 1), [], maps)
        for _ in range(given.runs):
            for step, states, times, _ in cases.values():
                begun = time.process_time()
                for state in states:
                    step(state)
                times.append((time.process_time() - begun) / len(states))
        whole = cases["whole", head][2]
        line = f"{depth:6} tokens: whole {1e6 * min(whole):8.1f} us"
        for form, rank in thin:
            times = cases[form, rank][2]
            line += f", {form} {rank:3} {1e6 * min(times):8.1f} us ({min(times) / min(whole):.2f}, median {np.median(np.array(times) / np.array(whole)):.2f})"
        print(line, flush=True)


if __name__ == "__main__":
    main()
