#!/usr/bin/env python3
"""Gathers what tools/on_device.sh left in a folder into one JSON file. Not for calling by hand."""

from __future__ import annotations

import csv
import io
import json
import platform
import subprocess
import sys
from pathlib import Path

SECTOR = 32  # bytes


def step(work: Path, name: str) -> dict:
    """One step: exit code, seconds, and its output as what it is; or why it was left out."""
    reason = work / f"{name}.skip"
    if reason.exists():
        return {"left_out": reason.read_text()}
    code, begun, ended = (work / f"{name}.meta").read_text().split()
    out, err = ((work / f"{name}.{kind}").read_text(errors="replace") for kind in ("out", "err"))
    result: dict = {"exit_code": int(code), "seconds": round(float(ended) - float(begun), 2)}
    if (work / f"{name}.json").read_text().strip() == "json":
        try:
            result["result"] = json.loads(out)
        except ValueError:
            result["output"] = out[-4000:]
    elif name == "counters":
        result["result"] = counters(out)
    else:
        result["output"] = out[-4000:]
    if int(code):
        result["errors"] = err[-4000:]
    return result


def counters(text: str) -> dict[str, dict[str, float]]:
    """Per kernel, over all its launches: sums of the profiler's metrics, and bytes read from DRAM. Metrics that the device does not have
    come as 'n/a' or nan and are left out, never taken for zero."""
    rows = text[text.find('"ID"') :] if '"ID"' in text else ""
    kernels: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(io.StringIO(rows)):
        name = (row.get("Kernel Name") or "").split("<")[0].split("(")[0].split("::")[-1]
        metric, value = row.get("Metric Name") or "", (row.get("Metric Value") or "").replace(",", "")
        try:
            number = float(value)
        except ValueError:
            continue
        if not name or number != number:
            continue
        sums = kernels.setdefault(name, {})
        sums[metric] = sums.get(metric, 0.0) + number
    for sums in kernels.values():
        misses = sums.get("lts__t_sectors_op_read_lookup_miss.sum")
        if misses:
            sums["dram_read_bytes"] = misses * SECTOR
    return kernels


def main() -> None:
    work, bundle, output = map(Path, sys.argv[1:])
    manifest = json.loads((bundle / "manifest.json").read_text())
    release = Path("/etc/nv_tegra_release")
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip() or None
    report = {
        "format": "edgekv-on-device",
        "version": 1,
        "commit": commit,
        "machine": platform.machine(),
        "l4t": release.read_text().splitlines()[0] if release.is_file() else None,
        "bundle": {name: manifest.get(name) for name in ("model", "policy", "weights", "parity")},
        "steps": {name: step(work, name) for name in (work / "order").read_text().split()},
    }
    output.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
