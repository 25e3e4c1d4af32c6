"""Decode speed of bundles at one depth, taken in turns: python tools/bench_depth.py BUNDLE... [--depth 7936] [--steps 16] [--rounds 9].

The cache is filled with random keys and values interval by interval, as if a text had been read, which takes a second instead of
minutes; what a step does depends on how much is cached, not on what. Rounds go through the bundles one after the other, so that a
machine that is not quiet slows all of them alike; the median over rounds is shown, and the ratio to the first bundle within rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from edgekv import bundle, engine, layout, machine
from edgekv.reference.self_index import latents
from edgekv.retrieval import parse_retrieval


def fill(loaded, depth: int, steps: int) -> int:
    """Commits whole intervals of random tokens and leaves the rest of `depth` in the tail, as far as `steps` more fit there; returns the
    position reached."""
    random, views, start = np.random.default_rng(0), [], 0
    for layer in loaded.bundle.layers:
        views.append(layout.StateView(layer["params"], loaded.arena[start : start + layer["bytes"]]))
        start += -(-layer["bytes"] // 256) * 256
    position = 0
    while True:
        for view in views:
            for plane in (view.tail_k, view.tail_v, view.tail_z, view.tail_q):
                if plane.dtype == np.uint8 and plane.size:  # latents that a compressed cache quantises
                    plane[:] = latents.pack(random.standard_normal((len(plane), view.params["latent"]), np.float32))
                else:
                    plane[:] = random.standard_normal(plane.shape, np.float32)
        if position + loaded.boundary > depth:
            return position + max(0, min(depth - position, loaded.boundary - steps))
        position += loaded.boundary
        loaded.compact(position)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--depth", type=int, default=7936)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--retrieve", type=parse_retrieval)
    options = parser.parse_args()
    engines = [engine.load(bundle.open_bundle(path, verify=False), options.threads) for path in options.bundles]
    positions = [fill(loaded, options.depth, options.steps) for loaded in engines]
    row, token = np.zeros(1, np.int64), np.array([100])
    rates: list[list[float]] = [[] for _ in engines]
    for loaded in engines:
        if loaded.retrieval is not None and options.retrieve is not None:
            loaded.retrieve(options.retrieve)
    for turn in range(options.rounds + 1):
        for loaded, position, mine in zip(engines, positions, rates, strict=True):
            began = time.perf_counter()
            for step in range(options.steps):
                loaded.step(token, position + step, row)
            if turn:  # the first round warms up
                mine.append(options.steps / (time.perf_counter() - began))
    print(f"{machine.describe(engines[0].threads)['cpu']}, {engines[0].threads} threads, load {machine.load():.1f}; {options.rounds} rounds of {options.steps} steps")
    for path, position, mine in zip(options.bundles, positions, rates, strict=True):
        ratio = statistics.median(a / b for a, b in zip(mine, rates[0], strict=True))
        print(f"{path.name:24s} depth {position}: {statistics.median(mine):7.1f} tokens/s, {ratio:.2f} times {options.bundles[0].name}")


if __name__ == "__main__":
    main()
