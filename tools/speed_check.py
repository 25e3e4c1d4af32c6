"""Predicted against measured decode speed on this machine: the table of docs/memory.md.

    python tools/speed_check.py BUNDLE... [--depths 128,1024,4096] [--quiet-for 60] [--cpu-time]

Calibrates this machine first, as `edgekv devices detect` does, predicts every bundle at every depth, then runs the bundles. The
calibration times small graphs of its own and never a bundle. Exit 1 when a prediction is off by more than 20 percent. Figures mean
little on a busy machine: the load before and after is printed. --cpu-time takes one thread and its processor time for both sides,
which other processes disturb less.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import numpy as np
import yaml

from edgekv import bundle, engine, machine
from edgekv.generation.session import Session
from edgekv.memory import calibrate, detect, estimate, profiles
from edgekv.memory.model import load_shape
from edgekv.memory.report import bundle_plan
from edgekv.memory.weights import weight_format

ALLOWED = 0.20
TOKENS = 60


def wait_until_quiet(seconds: float) -> None:
    """Waits up to `seconds` for fewer than 0.7 runnable tasks."""
    end = time.monotonic() + seconds
    while machine.load() > 0.7 and time.monotonic() < end:
        time.sleep(5)


def measured(folder: Path, depths: list[int], threads: int | None) -> dict[int, float]:
    """Seconds per decode step after each depth: the fastest tenth of TOKENS steps, as the calibration takes its figures."""
    loaded = engine.load(bundle.open_bundle(folder, verify=False), threads)
    session, random, found = Session(loaded), np.random.default_rng(0), {}
    row = np.zeros(1, np.int64)
    try:
        for depth in sorted(depths):
            session.feed(random.integers(0, loaded.vocab, depth - session.position))
            times = []
            for token in random.integers(0, loaded.vocab, TOKENS):
                began = calibrate.clock()
                session.step([token], row)
                session.commit(0)
                times.append(calibrate.clock() - began)
            found[depth] = sorted(times)[TOKENS // 10]
    finally:
        loaded.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--depths", default="128,1024,4096")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--quiet-for", type=float, default=60.0)
    options = parser.parse_args()
    depths = [int(text) for text in options.depths.split(",")]
    wait_until_quiet(options.quiet_for)
    print(f"load before {machine.load():.2f}")
    threads = 1 if options.cpu_time else None
    if options.cpu_time:
        calibrate.clock = time.process_time
    data = detect.detect(calibrate=False)
    data["calibration"] = calibrate.calibrate(int(max(c["l3"]["value"] or c["l2"]["value"] or 0 for c in data["cpu"]) * 1024), threads)
    profile = profiles.parse_profile(yaml.safe_dump(data), "of this machine")
    worst = 0.0
    print("| bundle | weights | depth | predicted tok/s | measured tok/s | error | limit |")
    print("|---|---|---|---|---|---|---|")
    for folder in options.bundles:
        shape = load_shape(folder)
        weights, cache = weight_format(shape.bundle.manifest["weights"]["format"]), bundle_plan(shape)
        seen = measured(folder, depths, threads)
        for depth in depths:
            step = estimate.decode(shape, weights, cache, profile, depth)
            error = seen[depth] / step.time.total - 1
            worst = max(worst, abs(error))
            print(f"| {folder.name} | {weights.name} | {depth} | {step.tokens_per_second:.1f} | {1 / seen[depth]:.1f} | {error:+.0%} | {step.time.limit} |", flush=True)
    print(f"\n{step.time.basis}\nload after {machine.load():.2f}; largest error {worst:.0%} (allowed {ALLOWED:.0%})")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
