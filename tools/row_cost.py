"""Time of a step by its number of rows: what verifying a draft costs beside a plain step.

    python tools/row_cost.py BUNDLE --depths 64,2000 --rows 1,2,3,4,5,6,7,8,9

Blocks of T tokens with logits for every row, as verification runs them, at each depth of text. All sizes take turns, so that a
machine that slows down slows all of them. Prints medians in milliseconds, and each as a multiple of one row.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import numpy as np

from edgekv import bundle, engine, machine
from edgekv.generation.session import Session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--depths", default="64", help="tokens before the block, ascending")
    parser.add_argument("--rows", default="1,2,3,4,5,6,7,8,9,13,17")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    sizes = [int(rows) for rows in arguments.rows.split(",")]
    loaded = engine.load(bundle.open_bundle(arguments.bundle, verify=False), arguments.threads, max_rows=max(sizes))
    facts = machine.describe(loaded.threads)
    print(f"{arguments.bundle.name} on {facts['cpu']}, {facts['threads']} threads, load {facts['load_1min']}, median of {arguments.repeats}")
    session, random = Session(loaded), np.random.default_rng(1)
    for depth in (int(depth) for depth in arguments.depths.split(",")):
        while session.position < depth:
            session.feed(random.integers(100, 1000, min(loaded.chunk, depth - session.position)))
        while session.room < max(sizes):  # all sizes stand before the same boundary
            session.feed(random.integers(100, 1000, session.room))
        times: dict[int, list[float]] = {size: [] for size in sizes}
        for _ in range(arguments.repeats + 1):
            for size in sizes:
                block = random.integers(100, 1000, size)
                start = time.perf_counter()
                session.step(block)
                times[size].append(time.perf_counter() - start)
                session.commit(0)
        medians = {size: statistics.median(samples[1:]) * 1e3 for size, samples in times.items()}
        print(f"depth {session.position}: " + ", ".join(f"{size}: {ms:.1f} ms ({ms / medians[sizes[0]]:.2f}x)" for size, ms in medians.items()))
    loaded.close()


if __name__ == "__main__":
    main()
