"""Speculative decoding side by side with plain decoding: speed, acceptance and weight traffic by draft length.

    python tools/bench_speculation.py TARGET --draft DRAFT --task code
    python tools/bench_speculation.py TARGET --draft ngram --task edit
    python tools/bench_speculation.py TARGET --draft self --prompt-file LONG.txt --prompt-tokens 7900 --tokens 256

DRAFT is what `edgekv run --draft` takes. Tasks are prompts for instruction models: code (write some), edit (change a given
program), summary (of --prompt-file). Decoding is greedy. Plain decoding and every length run beside each other, a few tokens of each in turns, so
that a machine whose clock drifts slows all alike. Each has an engine and a drafter of its own, another one in every repeat. Speeds are medians over
repeats of total tokens / total decoding seconds, speed-ups medians of the ratio to plain decoding. Beside the speed-up of the clock stands that of
processor time, which with --threads 1 says what the clock would on a machine that does nothing else. --json prints one object.

The pair of which docs/speculation.md tells figures is Qwen2.5-Coder-Instruct, 0.5B for 1.5B, exported from GGUF files:

    edgekv export qwen2.5-coder-1.5b-instruct-q4_k_m.gguf -o target --weights int4 --context 4096
    edgekv export qwen2.5-coder-0.5b-instruct-q4_k_m.gguf -o draft --weights int4 --context 4096 \\
        --head-tokens 32768 --head-text python_library.txt --head-text emma.txt

where the first text is the modules of Python's own library behind one another and the second a novel.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edgekv import bundle, engine, machine
from edgekv.engine import pool
from edgekv.generation.adaptive import MAX_GAMMA, AdaptiveLength, FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.choose import choose
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation
from edgekv.generation.speculation_report import SpeculationReport
from edgekv.generation.template import ChatTemplate
from edgekv.generation.text import load_tokenizer

CODE = [
    "Write a Python class for a binary search tree with insert, find, delete and in-order iteration, with type hints and docstrings.",
    "Write a C function that parses an IPv4 address from a string into four bytes and rejects malformed input. Add a small test program.",
    "Write a Python script that reads a CSV file of temperatures by city and date and prints the monthly mean per city.",
    "Implement an LRU cache in Java with O(1) get and put, without LinkedHashMap, and explain it in comments.",
    "Write a JavaScript function that debounces another function, and one that throttles it, with examples of their use.",
    "Write a Python function that multiplies two matrices given as lists of lists, checks their shapes, and add unit tests with unittest.",
]
EDITED = Path(__file__).resolve().parents[1] / "edgekv" / "budget.py"
EDITS = [
    "Rename the class Budget to CacheBudget everywhere and print the complete file again:\n\n```python\n{code}```",
    "Add the unit TiB to the following file, change nothing else, and print the complete file again:\n\n```python\n{code}```",
]
TURN = 16  # tokens, a fraction of a second
SUMMARY = "Summarise the following text in about ten sentences, quoting its most important sentences word for word.\n\n{text}"


@dataclass
class Result:
    """Totals of one way of decoding over all prompts of one repeat."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of all threads of this process


def prompts(arguments: argparse.Namespace, opened: bundle.Bundle, tokenizer) -> list[list[int]]:
    """Token ids of every prompt."""
    text = arguments.prompt_file.read_text(encoding="utf-8") if arguments.prompt_file else ""
    if arguments.task is None:
        ids = tokenizer.encode(text).ids
        return [ids[: arguments.prompt_tokens]]
    if arguments.task == "summary":
        ids = tokenizer.encode(text, add_special_tokens=False).ids[: arguments.prompt_tokens]
        questions = [SUMMARY.format(text=tokenizer.decode(ids))]
    else:
        questions = CODE if arguments.task == "code" else [edit.format(code=EDITED.read_text()) for edit in EDITS]
    path = opened.file("chat_template.jinja")
    if path is None:
        sys.exit(f"{opened.folder} has no chat template; give --prompt-file without --task")
    ends = opened.model["eos_token_ids"]
    template = ChatTemplate(path.read_text(), eos_token=tokenizer.id_to_token(ends[0]) if ends else "")
    texts = [template.render([{"role": "user", "content": question}]) for question in questions[: arguments.prompts]]
    return [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]


@dataclass
class Read:
    """A prompt that was read: what a session and its engine are then, so that each way of decoding starts there."""

    tokens: list[int]
    logits: np.ndarray
    arena: np.ndarray
    session_base: int
    engine_base: int
    shift: int

    @classmethod
    def of(cls, loaded, prompt: list[int]) -> Read:
        session = Session(loaded)
        logits = session.feed(prompt, foresee=True).copy()
        return cls(prompt, logits, loaded.arena.copy(), session.tail_base, loaded._tail_base, int(loaded._shift[0]))

    def into(self, loaded) -> Session:
        session = Session(loaded)
        loaded.arena[:] = self.arena
        session.tokens.extend(self.tokens)
        session.tail_base, loaded._tail_base, loaded._shift[0] = self.session_base, self.engine_base, self.shift
        return session


class Decoding:
    """Up to `count` tokens behind a prompt, some at a time; adds to `result` what came after the target had read it: a drafter reads, too."""

    def __init__(self, loaded, read: Read, decoder, count: int, ends: set[int], result: Result):
        self.tokens: list[int] = []
        self.result, self._ends, self._left = result, ends, count
        self._produced = decoder(read.into(loaded), Sampler(SamplingOptions(), loaded.vocab), read.logits, count)

    def go_on(self, count: int) -> bool:
        """Decodes up to `count` tokens more; whether there are others."""
        start, before, had = time.perf_counter(), time.process_time(), len(self.tokens)
        wanted = min(count, self._left)
        self.tokens += itertools.takewhile(lambda token: token not in self._ends, itertools.islice(self._produced, wanted))
        self.result.seconds += time.perf_counter() - start
        self.result.cpu_seconds += time.process_time() - before
        self._left -= wanted
        got = len(self.tokens) - had
        self.result.tokens += max(got - (had == 0), 0)  # the first was there before
        if got == wanted and self._left:
            return True
        self._produced.close()
        return False


def race(running: list[Decoding]) -> None:
    """Runs them to their ends in turns."""
    while running:
        running = [one for one in running if one.go_on(TURN)]


def fixed_lengths(text: str) -> list[int]:
    """Of --gammas."""
    lengths = sorted({int(part) for part in text.split(",") if part})
    if lengths and not 1 <= lengths[0] <= lengths[-1] <= MAX_GAMMA:
        raise argparse.ArgumentTypeError(f"lengths go from 1 to {MAX_GAMMA}")
    return lengths


def positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("it must be 1 or more")
    return int(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--task", choices=["code", "edit", "summary"])
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--prompt-tokens", type=positive, default=2000, help="of the file")
    parser.add_argument("--prompts", type=positive, default=6, help="most prompts of a task")
    parser.add_argument("--tokens", type=positive, default=256, help="most tokens per answer")
    parser.add_argument("--gammas", type=fixed_lengths, default="1,2,3,4,5,6,8", help="fixed lengths beside the adaptive one")
    parser.add_argument("--repeats", type=positive, default=3)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    if arguments.task in (None, "summary") and not arguments.prompt_file:
        parser.error("--prompt-file is needed")

    opened = bundle.open_bundle(arguments.target, verify=False)
    tokenizer = load_tokenizer(opened)
    choice = choose(arguments.draft, opened, tokenizer, verify=False)
    texts = prompts(arguments, opened, tokenizer)
    ends = set() if arguments.ignore_eos else set(opened.model["eos_token_ids"])
    lengths: list[int | None] = [*arguments.gammas, None]
    ways: list[int | None] = [0, *lengths]  # 0: plain decoding
    rows = MAX_GAMMA + 1
    pool.share(arguments.threads)  # threads that wait for work take the processor from those that have some
    engines = [engine.load(opened, arguments.threads, max_rows=rows, beside=choice.bundle) for _ in ways]
    drafters = [choice.make(loaded) for loaded in engines]

    times: dict[int | None, list[Result]] = {way: [] for way in ways}
    differing = dict.fromkeys(lengths, 0)
    read: list[Read] = []
    for repeat in range(arguments.repeats):
        # Every way takes another engine each time: none has the better pages for good.
        using = {way: (place + repeat) % len(ways) for place, way in enumerate(ways)}
        decoders: dict[int | None, Any] = {0: plain}
        for way in lengths:
            drafter = drafters[using[way]]
            decoders[way] = Speculation(drafter, AdaptiveLength(drafter) if way is None else FixedLength(way), engines[0].vocab)
        for way in ways:
            times[way].append(Result())
        for index, text in enumerate(texts):
            if repeat == 0:
                read.append(Read.of(engines[0], text))
            if choice.bundle:
                for drafter in drafters:
                    drafter.forget()  # each way has to earn the reading of its prompts
            runs = {
                way: Decoding(engines[using[way]], read[index], decoders[way], arguments.tokens, ends, times[way][repeat]) for way in ways
            }
            race(list(runs.values()))
            for way in lengths:
                differing[way] += runs[way].tokens != runs[0].tokens
            if sys.stderr.isatty():
                print(f"\rrepeat {repeat + 1}/{arguments.repeats}, prompt {index + 1}/{len(texts)}", end="", file=sys.stderr)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)

    if not all(result.tokens for results in times.values() for result in results):
        parser.error("an answer has no second token, so there is nothing to time: give --ignore-eos, or more --tokens")

    def speed(results: list[Result]) -> float:
        return statistics.median(result.tokens / result.seconds for result in results)

    def ratio(way, cost) -> float:
        """Of plain decoding's cost of a token to this way's, run by run."""
        return statistics.median(
            cost(before) / before.tokens / (cost(after) / after.tokens) for before, after in zip(times[0], times[way], strict=True)
        )

    lines = []
    for way in lengths:
        told = SpeculationReport.of(decoders[way], opened.weight_bytes, way).to_json()
        lines.append({**told, "tokens_per_second": speed(times[way]), "speedup": ratio(way, lambda result: result.seconds),
                      "cpu_speedup": ratio(way, lambda result: result.cpu_seconds), "texts_that_differ": differing[way]})
    summary = {
        "target": str(arguments.target), "draft": arguments.draft, "task": arguments.task, "prompts": len(texts),
        "prompt_tokens": [len(text) for text in texts], "tokens": times[0][0].tokens, "repeats": arguments.repeats,
        "machine": machine.describe(engines[0].threads), "plain_tokens_per_second": speed(times[0]), "lengths": lines,
    }  # fmt: skip
    for one in (*drafters, *engines):
        one.close()
    if arguments.json:
        print(json.dumps(summary))
        return
    facts = summary["machine"]
    print(f"{facts['cpu']}, {facts['threads']} threads, load {facts['load_1min']}")
    print(f"{arguments.target.name} with {arguments.draft}: {len(texts)} prompts of {int(np.mean(summary['prompt_tokens']))} tokens, "
          f"{summary['tokens']} tokens decoded, median of {arguments.repeats}; plain {summary['plain_tokens_per_second']:.2f} tokens/s")
    print("   gamma  tokens/s  speed-up  processor  tokens/step  accepted  weights read  texts that differ")
    for line in lines:
        rate = f"{line['acceptance_rate']:.0%}" if line["acceptance_rate"] is not None else "-"
        gamma = "adaptive" if line["gamma"] is None else line["gamma"]
        print(f"{gamma:>8} {line['tokens_per_second']:9.2f} {line['speedup']:8.2f}x {line['cpu_speedup']:9.2f}x {line['tokens_per_target_step']:12.2f} {rate:>9} "
              f"{1 / line['weight_traffic_cut']:12.2f}x {line['texts_that_differ']:10d} of {len(texts) * arguments.repeats}")


if __name__ == "__main__":
    main()
