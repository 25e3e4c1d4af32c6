"""Predicted against measured decode speed on this machine: the table of docs/memory.md.

    python tools/speed_check.py BUNDLE... [--depths 128,1024,4096] [--rounds 3] [--quiet-for 60] [--cpu-time]

Every round calibrates this machine, as `edgekv devices detect` does, predicts every bundle at every depth, then runs the bundles; the
medians over the rounds are compared, because on a virtual machine the share of cache and memory changes by the minute. The
calibration times small graphs of its own and never a bundle. Exit 1 when a prediction is off by more than 20 percent. Figures mean
little on a busy machine: the load is printed. --cpu-time takes one thread and its processor time for both sides,
which other processes disturb less.
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


def this_machine(threads: int | None) -> profiles.Profile:
    """A profile of this machine, calibrated now."""
    data = detect.detect(calibrate=False)
    last = int(max(c["l3"]["value"] or c["l2"]["value"] or 0 for c in data["cpu"]) * 1024)
    data["calibration"] = calibrate.calibrate(last, threads)
    return profiles.parse_profile(yaml.safe_dump(data), "of this machine")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--depths", default="128,1024,4096")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--quiet-for", type=float, default=60.0)
    options = parser.parse_args()
    depths = [int(text) for text in options.depths.split(",")]
    wait_until_quiet(options.quiet_for)
    print(f"load before {machine.load():.2f}")
    threads = 1 if options.cpu_time else None
    if options.cpu_time:
        calibrate.clock = time.process_time
    predicted: dict[tuple[Path, int], list[float]] = {(folder, depth): [] for folder in options.bundles for depth in depths}
    seen: dict[tuple[Path, int], list[float]] = {key: [] for key in predicted}
    limits: dict[tuple[Path, int], str] = {}
    for _ in range(options.rounds):
        profile = this_machine(threads)
        for folder in options.bundles:
            shape = load_shape(folder)
            weights, cache = weight_format(shape.bundle.manifest["weights"]["format"]), bundle_plan(shape)
            for depth, seconds in measured(folder, depths, threads).items():
                step = estimate.decode(shape, weights, cache, profile, depth)
                predicted[folder, depth].append(step.time.total)
                seen[folder, depth].append(seconds)
                limits[folder, depth] = step.time.limit
        print(f"\n{step.time.basis}; last cache level {(profile.last_level_bytes or 0) / 2**20:g} MiB; load {machine.load():.2f}", flush=True)
    worst = 0.0
    print("\n| bundle | depth | predicted tok/s | measured tok/s | error | by round | limit |")
    print("|---|---|---|---|---|---|---|")
    for key in predicted:
        error = statistics.median(seen[key]) / statistics.median(predicted[key]) - 1
        worst = max(worst, abs(error))
        rounds = " ".join(f"{b / a - 1:+.0%}" for a, b in zip(predicted[key], seen[key], strict=True))
        told, was = 1 / statistics.median(predicted[key]), 1 / statistics.median(seen[key])
        print(f"| {key[0].name} | {key[1]} | {told:.1f} | {was:.1f} | {error:+.0%} | {rounds} | {limits[key]} |")
    print(f"\nlargest error {worst:.0%} (allowed {ALLOWED:.0%})")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
