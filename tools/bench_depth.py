"""Decode speed of bundles at one depth, taken in turns: python tools/bench_depth.py BUNDLE... [--depth 7936] [--steps 16] [--rounds 9].

The cache is filled with random keys and values interval by interval, as if a text had been read, which takes a second instead of
minutes; what a step does depends on how much is cached, not on what. Rounds go through the bundles one after the other, so that a
machine that is not quiet slows all of them alike.

Where in memory weights come to lie makes a few percent (of two copies of one bundle, EPYC of Zen 4: 0.98 to 1.07), so all bundles are
loaded anew --loads times, in another order each time. Shown are the median speed over all rounds, and the median over loads of the ratio to
the first bundle within rounds, with the smallest and largest of them.
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
    parser.add_argument("--loads", type=int, default=4)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--retrieve", type=parse_retrieval)
    options = parser.parse_args()
    results = [measure(options, load) for load in range(options.loads)]
    print(f"{machine.describe(options.threads)['cpu']}, {options.threads or 'all'} threads, load {machine.load():.1f}; {options.loads} loads, {options.rounds} rounds of {options.steps} steps each")
    for index, path in enumerate(options.bundles):
        rates = [[rounds[index] for rounds in rates] for rates, _ in results]
        ratios = [statistics.median(a[index] / a[0] for a in rounds) for rounds, _ in results]
        speed = statistics.median(rate for one in rates for rate in one)
        print(f"{path.name:24s} depth {results[0][1][index]}: {speed:7.1f} tokens/s, {statistics.median(ratios):.2f} times {options.bundles[0].name} ({min(ratios):.2f} to {max(ratios):.2f})")


def measure(options: argparse.Namespace, load: int) -> tuple[list[list[float]], list[int]]:
    """Loads the bundles, the one at place `load` first: tokens per second of each in every round, and the depth of each."""
    count = len(options.bundles)
    order = [(load + i) % count for i in range(count)]
    engines = {i: engine.load(bundle.open_bundle(options.bundles[i], verify=False), options.threads) for i in order}
    positions = {i: fill(engines[i], options.depth, options.steps) for i in order}
    row, token, rounds = np.zeros(1, np.int64), np.array([100]), []
    for loaded in engines.values():
        if loaded.retrieval is not None and options.retrieve is not None:
            loaded.retrieve(options.retrieve)
    for _ in range(options.rounds + 1):
        rates = [0.0] * count
        for i in order:
            began = time.perf_counter()
            for step in range(options.steps):
                engines[i].step(token, positions[i] + step, row)
            rates[i] = options.steps / (time.perf_counter() - began)
        rounds.append(rates)
    for loaded in engines.values():
        loaded.close()
    return rounds[1:], [positions[i] for i in range(count)]  # the first round warms up


if __name__ == "__main__":
    main()
