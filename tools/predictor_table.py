"""Predicted against published decode speeds: the table of docs/memory.md, with the fit and its leave-one-out error.

    python tools/predictor_table.py            print the table
    python tools/predictor_table.py --fit      print fitted t0 and efficiency per class too
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import yaml

from edgekv.memory import profiles
from edgekv.memory.model import shape_from_config
from edgekv.memory.predictor import CLASSES, Work, step_time
from edgekv.memory.weights import WeightFormat

DATA = Path(__file__).resolve().parents[1] / "tests" / "memory" / "data"
OUTLIER = 0.20
CLASS_OF = {"vLLM": "gpu", "Edge-LLM": "gpu", "MLC": "gpu", "llama.cpp": "gpu-generic", "Ollama": "cpu"}


def rows():
    """Every published figure as a dict: its entry, class, weight and KV bytes, peak GB/s, measured and predicted seconds."""
    published = yaml.safe_load((DATA / "published_decode.yaml").read_text())
    models = yaml.safe_load((DATA / "models.yaml").read_text())
    for entry in published["figures"]:
        shape = shape_from_config(models[entry["model"]], entry["model"])
        device = profiles.load(entry["device"])
        weights = WeightFormat("", entry["bits"], entry["head_bits"], 16).step_bytes(shape)
        cache = published["depth"] * shape.kv_bytes_per_token()
        cls = CLASS_OF[entry["runtime"]]
        yield {
            **entry,
            "class": cls,
            "bytes": weights + cache,
            "peak": device.peak_gbps * 1e9,
            "measured": 1 / entry["tokens_per_second"],
            "predicted": step_time(device, Work({"": weights}, cache), cls).total,
        }


def fit(entries) -> tuple[float, float]:
    """(t0 seconds, efficiency) with the least sum of absolute relative errors of the time; t0 is not allowed below 0.

    Absolute, not squared, so that a figure taken in an unstated power mode does not move the line. Iteratively reweighted
    least squares. Fewer than three figures cannot tell t0 from efficiency: t0 is 0 then and the efficiency their mean.
    """
    measured = np.array([e["measured"] for e in entries])
    ideal = np.array([e["bytes"] / e["peak"] for e in entries])
    if len(entries) < 3:
        return 0.0, float(np.mean(ideal / measured))
    columns = np.stack([np.ones(len(entries)), ideal], 1)
    weight = np.ones(len(entries))
    for _ in range(200):
        scaled = (weight / measured)[:, None] * columns
        solution = np.linalg.lstsq(scaled, weight, rcond=None)[0]
        if solution[0] < 0 < len(solution) - 1:
            columns = ideal[:, None]
            continue
        weight = 1 / np.sqrt(np.maximum(np.abs(1 - columns @ solution / measured), 1e-6))
    return (float(solution[0]) if len(solution) > 1 else 0.0), float(1 / solution[-1])


def leave_one_out(entries) -> list[float]:
    """Signed relative error of the speed of each figure, predicted by a fit to the others of its class."""
    errors = []
    for index, entry in enumerate(entries):
        t0, efficiency = fit(entries[:index] + entries[index + 1 :])
        errors.append(entry["measured"] / (t0 + entry["bytes"] / entry["peak"] / efficiency) - 1)
    return errors


def main() -> None:
    entries = list(rows())
    held_out = {}
    for cls in CLASSES:
        members = [e for e in entries if e["class"] == cls]
        held_out.update(zip(map(id, members), leave_one_out(members), strict=True))
    print("| device | runtime | model | bits | published tok/s | predicted | error | leave one out |")
    print("|---|---|---|---|---|---|---|---|")
    for e in entries:
        error = e["measured"] / e["predicted"] - 1
        mark = " **outlier**" if abs(error) > OUTLIER else ""
        print(f"| {e['device']} | {e['runtime']} | {e['model']} | {e['bits']} | {e['tokens_per_second']} | "
              f"{1 / e['predicted']:.1f} | {error:+.0%}{mark} | {held_out[id(e)]:+.0%} |")  # fmt: skip
    errors = [abs(e["measured"] / e["predicted"] - 1) for e in entries]
    print(f"\nMedian error {np.median(errors):.1%}, leave-one-out {np.median(np.abs(list(held_out.values()))):.1%}, "
          f"{sum(x > OUTLIER for x in errors)} of {len(errors)} beyond {OUTLIER:.0%}.")  # fmt: skip
    if "--fit" in sys.argv:
        for cls in CLASSES:
            t0, efficiency = fit([e for e in entries if e["class"] == cls])
            print(f"{cls}: t0 {t0 * 1e3:.2f} ms, efficiency {efficiency:.3f}")


if __name__ == "__main__":
    main()
