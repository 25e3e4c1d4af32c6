"""The memory plan against the measured resident set of `edgekv run`, bundle by bundle.

    python tools/memory_check.py BUNDLE... [--prompt-file TEXT]

Prints the table of docs/memory.md; exit 1 when a plan is off by more than 5 percent. The prompt fills at least one prefill block, so
that the working memory is in use; the arena is resident from the start.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from edgekv.memory import detect, planner, profiles
from edgekv.memory.model import load_shape
from edgekv.memory.report import bundle_plan
from edgekv.memory.weights import weight_format

ALLOWED = 0.05
MIB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--prompt-file", type=Path, default=Path(__file__).resolve().parents[1] / "docs" / "cache.md")
    options = parser.parse_args()
    profile = profiles.Profile(detect.detect(measure=False, calibrate=False))
    worst = 0.0
    print("| bundle | weights | chunk | planned MiB | measured peak MiB | error | largest owners |")
    print("|---|---|---|---|---|---|---|")
    for folder in options.bundles:
        shape = load_shape(folder)
        name = shape.bundle.manifest["weights"]["format"]
        plan = planner.memory_plan(shape, weight_format(name), bundle_plan(shape), profile, shape.bundle.chunk)
        command = [sys.executable, "-m", "edgekv", "run", str(folder), "--prompt-file", str(options.prompt_file), "-n", "4", "--json", "--temperature", "0"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr.strip())
        measured = json.loads(done.stdout)["report"]["peak_rss_bytes"]
        error = plan.resident / measured - 1
        worst = max(worst, abs(error))
        owners = ", ".join(f"{line.owner} {line.bytes / MIB:.0f}" for line in sorted(plan.lines, key=lambda line: -line.bytes)[:4])
        print(f"| {folder.name} | {name} | {shape.bundle.chunk} | {plan.resident / MIB:.1f} | {measured / MIB:.1f} | {error:+.1%} | {owners} |", flush=True)
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
