"""Predicted against measured decode speed on this machine: the table of docs/memory.md.

    python tools/speed_check.py BUNDLE... [--depths 128,1024,4096] [--profile FILE] [--quiet-for 60]

Detects and calibrates a profile of this machine first (or takes --profile), predicts every bundle at every depth from it, then runs
the bundles. The calibration times small graphs of its own and never a bundle. Exit 1 when a prediction is off by more than 20
percent. Figures mean little on a busy machine: the load before and after is printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import yaml

from edgekv import bundle, engine, machine
from edgekv.generation.session import Session
from edgekv.memory import detect, estimate, profiles
from edgekv.memory.model import load_shape
from edgekv.memory.report import bundle_plan
from edgekv.memory.weights import weight_format

ALLOWED = 0.20
TOKENS, ROUNDS = 24, 3


def wait_until_quiet(seconds: float) -> None:
    """Waits up to `seconds` for fewer than 0.7 runnable tasks."""
    end = time.monotonic() + seconds
    while machine.load() > 0.7 and time.monotonic() < end:
        time.sleep(5)


def measured(folder: Path, depths: list[int]) -> dict[int, float]:
    """Seconds per decode step after each depth: median of ROUNDS medians over TOKENS steps."""
    loaded = engine.load(bundle.open_bundle(folder, verify=False), None)
    session, random, found = Session(loaded), np.random.default_rng(0), {}
    row = np.zeros(1, np.int64)
    try:
        for depth in sorted(depths):
            session.feed(random.integers(0, loaded.vocab, depth - session.position))
            rounds = []
            for _ in range(ROUNDS):
                times = []
                for token in random.integers(0, loaded.vocab, TOKENS):
                    began = time.perf_counter()
                    session.step([token], row)
                    session.commit(0)
                    times.append(time.perf_counter() - began)
                rounds.append(statistics.median(times))
            found[depth] = statistics.median(rounds)
    finally:
        loaded.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--depths", default="128,1024,4096")
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--quiet-for", type=float, default=60.0)
    options = parser.parse_args()
    depths = [int(text) for text in options.depths.split(",")]
    wait_until_quiet(options.quiet_for)
    print(f"load before {machine.load():.2f}")
    if options.profile:
        profile = profiles.load_file(options.profile)
    else:
        profile = profiles.parse_profile(yaml.safe_dump(detect.detect()), "of this machine")
    worst = 0.0
    print("| bundle | weights | depth | predicted tok/s | measured tok/s | error | limit |")
    print("|---|---|---|---|---|---|---|")
    for folder in options.bundles:
        shape = load_shape(folder)
        weights, cache = weight_format(shape.bundle.manifest["weights"]["format"]), bundle_plan(shape)
        seen = measured(folder, depths)
        for depth in depths:
            step = estimate.decode(shape, weights, cache, profile, depth)
            error = seen[depth] / step.time.total - 1
            worst = max(worst, abs(error))
            print(f"| {folder.name} | {weights.name} | {depth} | {step.tokens_per_second:.1f} | {1 / seen[depth]:.1f} | {error:+.0%} | {step.time.limit} |", flush=True)
    print(f"\n{step.time.basis}\nload after {machine.load():.2f}; largest error {worst:.0%} (allowed {ALLOWED:.0%})")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
