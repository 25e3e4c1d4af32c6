"""Generates 100,000 tokens in one text and checks that nothing grows: KV bytes, resident memory, time per token.

    python tools/soak.py BUNDLE [--tokens 100000] [--threads N] [--json FILE]

The bundle must be one whose text has no end (--keep window or heavy, --positions cache). Judged between the first 1,000 tokens
and the last 1,000: KV bytes equal, resident memory within 1 %, median time per token within 5 %; exit code 1 otherwise.
Speed is only judged fairly on a quiet machine, so the load is printed too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time

from edgekv import bundle, engine, machine
from edgekv.generation.decoders import plain
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session

WINDOW = 1000  # tokens per measured window
MOST_GROWTH, MOST_SLOWDOWN = 0.01, 0.05


def windows(session: Session, sampler: Sampler, tokens: int, every: int):
    """Yields (position, kv bytes, resident bytes, tokens/s) of windows of 1,000 tokens: the first, and the last of each `every`."""
    logits = session.feed([1])
    steps, stream, start = [], plain(session, sampler, logits), time.perf_counter()
    while session.position < tokens:
        next(stream)
        now = time.perf_counter()
        steps.append(now - start)
        start = now
        if len(steps) == WINDOW:
            if session.position == WINDOW or session.position % every == 0:
                allocated = session.engine.arena.nbytes
                yield session.position, allocated, machine.rss(), 1 / statistics.median(steps)
            steps.clear()
            start = time.perf_counter()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundle")
    parser.add_argument("--tokens", type=int, default=100_000)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", metavar="FILE", help="write the measured windows there")
    options = parser.parse_args()

    loaded = engine.load(bundle.open_bundle(options.bundle), options.threads)
    if loaded.capacity is not None:
        parser.error(f"this bundle ends at {loaded.capacity} tokens; export one with --keep window --positions cache")
    session = Session(loaded)
    # sampled, not greedy: a small model would otherwise repeat one sentence for hours
    sampler = Sampler(SamplingOptions(temperature=1.0, top_k=50), loaded.vocab, seed=0)
    print(f"{machine.cpu_model()}, {loaded.threads} threads, load {machine.load():.2f} at the start")
    print(f"{'token':>8} {'KV bytes':>12} {'resident MiB':>13} {'tokens/s':>9}   load")
    rows = []
    for row in windows(session, sampler, options.tokens, max(WINDOW, options.tokens // 10)):
        rows.append(row)
        print(f"{row[0]:8d} {row[1]:12d} {row[2] / (1 << 20):13.2f} {row[3]:9.1f}   {machine.load():.2f}", flush=True)
    first, last = rows[0], rows[-1]
    growth, slowdown = last[2] / first[2] - 1, first[3] / last[3] - 1
    verdicts = [
        (f"KV bytes {first[1]} -> {last[1]}", first[1] == last[1]),
        (f"resident memory {growth:+.2%} (at most {MOST_GROWTH:.0%})", growth <= MOST_GROWTH),
        (f"time per token {slowdown:+.2%} (at most {MOST_SLOWDOWN:.0%})", slowdown <= MOST_SLOWDOWN),
    ]
    for text, good in verdicts:
        print(f"{'ok ' if good else 'BAD'} {text}")
    if options.json:
        with open(options.json, "w") as file:
            facts = machine.describe(loaded.threads)
            json.dump({"bundle": options.bundle, "machine": facts, "columns": ["position", "kv_bytes", "rss_bytes", "tokens_per_second"], "rows": rows}, file)
    return 0 if all(good for _, good in verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
