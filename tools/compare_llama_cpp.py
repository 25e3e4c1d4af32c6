"""Speed of bundles beside llama.cpp, in one run on one machine: the same weights, the same threads, alternating runs.

    python tools/compare_llama_cpp.py --gguf MODEL.gguf --peer-python VENV/bin/python BUNDLE [BUNDLE ...]

`--peer-python` is an interpreter that has llama-cpp-python (`python -m venv VENV && VENV/bin/pip install llama-cpp-python`,
which compiles llama.cpp for this processor). Flash attention is on, the KV cache is fp16, as llama.cpp's own bench does it.
Runs of the two programs take turns, so that a machine that slows down slows both; medians are shown. A bundle that cannot
hold a depth is left out there. Prints a table, or one JSON object with --json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

PEER = r"""
import json, sys, time
from llama_cpp import Llama
gguf, depth, tokens, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
llm = Llama(gguf, n_ctx=depth + tokens + 8, n_batch=512, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False)
words = [(i * 7919 + 13) % (llm.n_vocab() - 100) + 50 for i in range(depth)]
llm.eval([1, 2, 3]); llm.reset()
start = time.perf_counter(); llm.eval(words); prefill = time.perf_counter() - start
start = time.perf_counter()
for i in range(tokens):
    llm.eval([words[i % depth]])
decode = time.perf_counter() - start
print(json.dumps({"prefill": depth / prefill, "decode": tokens / decode}))
"""


def peer(python: str, gguf: Path, depth: int, tokens: int, threads: int) -> dict:
    command = [python, "-c", PEER, str(gguf), str(depth), str(tokens), str(threads)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"llama.cpp did not run: {done.stderr.strip().splitlines()[-1] if done.stderr.strip() else done.returncode}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def ours(bundle: Path, depth: int, tokens: int, threads: int) -> dict | None:
    command = [sys.executable, "-m", "edgekv", "bench", str(bundle), "--depths", str(depth), "--tokens", str(tokens)]
    command += ["--repeats", "1", "--threads", str(threads), "--no-verify", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 2 and "No depth fits" in done.stderr:
        return None
    if done.returncode:
        sys.exit(f"edgekv bench {bundle} failed: {done.stderr.strip()}")
    [result] = json.loads(done.stdout)["depths"]
    return {"prefill": result["prefill_tokens_per_second"], "decode": result["decode_tokens_per_second"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--gguf", type=Path, required=True)
    parser.add_argument("--peer-python", required=True)
    parser.add_argument("--depths", default="64,1024,2048,4096,8000")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    table = []
    for depth in map(int, args.depths.split(",")):
        runs: dict[str, list[dict]] = {"llama.cpp": []} | {str(bundle): [] for bundle in args.bundles}
        for _ in range(args.repeats):
            runs["llama.cpp"].append(peer(args.peer_python, args.gguf, depth, args.tokens, args.threads))
            for bundle in args.bundles:
                figures = ours(bundle, depth, args.tokens, args.threads)
                if figures is not None:
                    runs[str(bundle)].append(figures)
        base = None
        for name, figures in runs.items():
            if not figures:
                continue
            median = {key: statistics.median(run[key] for run in figures) for key in ("prefill", "decode")}
            base = base or median
            row = {"depth": depth, "name": name} | median | {f"{key}_ratio": median[key] / base[key] for key in median}
            table.append(row)
            if not args.json:
                print(f"{depth:6d}  {name:40s} prefill {row['prefill']:8.1f} tok/s ({row['prefill_ratio']:5.2f}x)   "
                      f"decode {row['decode']:7.1f} tok/s ({row['decode_ratio']:5.2f}x)", flush=True)  # fmt: skip
    if args.json:
        print(json.dumps({"threads": args.threads, "tokens": args.tokens, "repeats": args.repeats, "rows": table}))


if __name__ == "__main__":
    main()
