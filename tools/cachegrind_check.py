"""The residency model against an independent simulator: valgrind's cachegrind on the native attention kernels.

    python tools/cachegrind_check.py            a few minutes; prints the table of docs/memory.md; exit 1 beyond 10 percent

For each last-level size around the working set, the driver (tools/cachegrind/attend_driver.cpp) runs twice under cachegrind with
different numbers of steps; the difference of last-level misses is what the additional steps miss. The model drives its own cache
with the access sequence of edgekv.memory.access at the addresses the driver prints. Which other lines a step touches (stack,
working memory of the op: some hundred, which decide only at the very edge of the cliff) is read once per case from
valgrind's memory tracer, lackey. Needs valgrind and g++.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

from edgekv import layout, native
from edgekv.memory.access import decode_step
from edgekv.memory.residency import Access, Cache, hit_rate, simulate

ROOT = Path(__file__).resolve().parents[1]
LINE, FEW, MANY = 64, 3, 7
ALLOWED = 0.10
ENVIRONMENT = {"EDGEKV_ISA": "avx2", "PATH": "/usr/bin:/bin"}  # valgrind runs no AVX-512
# layers, query heads, kv heads, head size, body tokens, tail slots, committed tail tokens, weight bytes per layer
CASES = {
    "cache alone": (4, 4, 2, 64, 512, 64, 40, 0),
    "weights and cache": (4, 4, 2, 64, 512, 64, 40, 393216),
    "small head, long body": (2, 8, 2, 32, 2048, 128, 100, 131072),
}


def build(folder: Path) -> Path:
    driver = folder / "attend_driver"
    source = ROOT / "tools" / "cachegrind" / "attend_driver.cpp"
    subprocess.run(["g++", "-std=c++17", "-O2", "-I", str(ROOT / "plugins"), str(source), "-ldl", "-o", str(driver)], check=True)
    return driver


def cachegrind(driver: Path, steps: int, case: tuple, size: int, ways: int) -> tuple[int, dict[str, tuple[int, int]]]:
    """(last-level misses of the whole run, buffers by name as (address, bytes))."""
    command = ["valgrind", "--tool=cachegrind", "--cache-sim=yes", "--cachegrind-out-file=/dev/null", f"--LL={size},{ways},{LINE}",
               "--D1=8192,2,64", "--I1=32768,8,64", str(driver), str(native.LIBRARY), str(steps), *map(str, case)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    misses = re.search(r"LL misses:\s+([\d,]+)", done.stderr)
    return int(misses.group(1).replace(",", "")), table(done.stdout)


def table(text: str) -> dict[str, tuple[int, int]]:
    return {name: (int(address), int(size)) for name, address, size in (line.split() for line in text.splitlines())}


def other_lines(driver: Path, case: tuple) -> list[int]:
    """Line numbers outside arena and weights that the second of three steps loads or stores, from a trace of every access.

    Code is left out: its loops stay in the first-level instruction cache and are not seen by the last level.
    """
    command = ["valgrind", "--tool=lackey", "--trace-mem=yes", "--log-fd=2", str(driver), str(native.LIBRARY), "3", *map(str, case)]
    with tempfile.TemporaryFile("w+") as out:
        traced = subprocess.Popen(command, stdout=out, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
        starts, buffers = re.compile(r"^ [LSM] +([0-9a-f]+),"), None
        lines, step = set(), set()
        for text in traced.stderr:
            found = starts.match(text)
            if not found:
                continue
            address = int(found.group(1), 16)
            if buffers is None:
                if out.tell() == 0:  # the driver flushes its buffer table before the first step
                    out.seek(0, 2)
                if out.tell() == 0:
                    continue
                out.seek(0)
                buffers = table(out.read())
            if address == buffers["marker"][0]:
                step, lines = lines, set()
            lines.add(address // LINE)
        traced.wait()
    inside = [range(at // LINE, (at + size) // LINE + 1) for name, (at, size) in buffers.items() if name != "marker"]
    return sorted(line for line in step if not any(line in part for part in inside))


def modelled(case: tuple, buffers: dict[str, tuple[int, int]], others: list[int], size: int, ways: int) -> int:
    """Misses per step of the model, in steady state."""
    layers, q_heads, kv_heads, dim, body, tail, committed_tail, weights = case
    params = layout.complete({"q_heads": q_heads, "kv_heads": kv_heads, "key_dim": dim, "value_dim": dim, "body_slots": body, "tail_slots": tail})
    arena, streamed, state = buffers["arena"][0], buffers["weights"][0], layout.state_bytes(params)
    working = [Access("working memory", line * LINE, LINE) for line in others]
    step = []
    for i in range(layers):
        step += working
        step += decode_step([params], [(streamed + weights * i, weights)], [arena + state * i], body + committed_tail, body_count=body)
    counted = simulate(Cache(size, ways, LINE), [step] * 4, warm_up=2)
    return sum(counted.misses.values()) // 2


def working_set(case: tuple) -> tuple[int, int]:
    """(weight bytes, KV bytes) a step touches."""
    layers, _, kv_heads, dim, body, _, committed_tail, weights = case
    return layers * weights, layers * kv_heads * 2 * dim * 2 * (body + committed_tail + 1)


def main() -> int:
    worst = 0.0
    print("| case | working set | last level | load | cachegrind misses/step | modelled | error | LRU closed form |")
    print("|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        driver = build(Path(folder))
        for name, case in CASES.items():
            streamed, kept = working_set(case)
            others = other_lines(driver, case)
            touched = streamed + kept
            sets = 1 << ((touched // LINE // 16).bit_length() - 1)  # cachegrind wants a power of two; sizes vary by ways
            full = round(touched / (sets * LINE))
            for ways in sorted({full // 2, full * 3 // 4, full - 2, full - 1, full + 1, full + 2, full * 5 // 4, full * 2}):
                size = sets * LINE * ways
                few, _ = cachegrind(driver, FEW, case, size, ways)
                many, buffers = cachegrind(driver, MANY, case, size, ways)
                seen, model = (many - few) / (MANY - FEW), modelled(case, buffers, others, size, ways)
                lines = touched / LINE
                error = abs(model - seen) / max(seen, 0.01 * lines)  # below 1 % of the lines both mean: everything hits
                worst = max(worst, error)
                closed = (1 - hit_rate("lru", size, streamed, kept)) * lines
                print(f"| {name} | {touched / 1024:.0f} KiB | {size / 1024:.0f} KiB, {ways} ways | {touched / size:.2f} | {seen:.0f} | {model} | "
                      f"{error:.1%} | {closed:.0f} |", flush=True)  # fmt: skip
    print(f"\nLargest error {worst:.1%} (allowed {ALLOWED:.0%}).")
    return int(worst > ALLOWED)


if __name__ == "__main__":
    sys.exit(main())
