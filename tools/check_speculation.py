"""Greedy speculative text against plain greedy text, token for token: every bundle x drafter x length.

    python tools/check_speculation.py full-fp32 window-fp32 heavy-fp32 --draft draft-int4 --draft ngram --draft self:64 \
        --prompt-file novel.txt --prompt-tokens 200 --tokens 2000

Plain decoding runs once per bundle, as `edgekv run` does it. The speculative texts of a bundle run in lockstep (tools/lockstep.py):
each has its own cache, engine and drafter, and their rows share the reading of the weights. With --one-by-one each runs alone.

Exits with 1 when a text differs. Where it does, the lead in plain decoding of the token that stands there is shown: a lead far
below the precision of the weight format is rounding between blocks of different sizes, anything else is a defect. Beside the texts,
the positions of all tokens that the caches keep are compared, in every layer and kv head.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lockstep
import numpy as np

from edgekv import bundle, engine, layout
from edgekv.engine import pool
from edgekv.generation.adaptive import MAX_GAMMA, AdaptiveLength, FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.choose import Choice, choose
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation
from edgekv.generation.text import load_tokenizer

_ALIGNMENT = 256  # of the states in an arena


@dataclass
class Plain:
    """What plain decoding says: tokens, by how much the likeliest token leads each other one (float16 [n][vocab]), what is kept."""

    tokens: list[int]
    behind: list[np.ndarray]
    kept: list[np.ndarray]


def kept_positions(loaded: engine.Engine) -> list[np.ndarray]:
    """Positions of the tokens in the body of every layer, int32 [kv_heads, slots]."""
    found, start = [], 0
    for layer in loaded.bundle.layers:
        params = layout.complete(layer["params"])
        dtype, shape = layout.planes(params)["body_pos"]
        at = start + layout.state_layout(params).body_pos
        found.append(loaded.arena[at : at + int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape).copy())
        start += -(-layer["bytes"] // _ALIGNMENT) * _ALIGNMENT
    return found


def decode(loaded: engine.Engine, prompt: list[int], decoder: Any, sampler: Sampler, wanted: list[int] | int) -> list[int]:
    """Tokens behind the prompt, as many as wanted, or up to the first that differs from those wanted."""
    session = Session(loaded)
    sampler.observe(prompt)
    produced = decoder(session, sampler, session.feed(prompt, foresee=True))
    tokens: list[int] = []
    for token in itertools.islice(produced, wanted if isinstance(wanted, int) else len(wanted)):
        tokens.append(token)
        if not isinstance(wanted, int) and token != wanted[len(tokens) - 1]:
            break
    produced.close()
    return tokens


class Recording(Sampler):
    """A greedy sampler that keeps how far each token is behind the likeliest one."""

    def __init__(self, options: SamplingOptions, vocab: int):
        super().__init__(options, vocab)
        self.behind: list[np.ndarray] = []

    def sample(self, logits: np.ndarray) -> int:
        scores = self._penalised(logits, ())
        self.behind.append((scores.max() - scores).astype(np.float16))
        return super().sample(logits)


def plain_text(loaded: engine.Engine, prompt: list[int], options: SamplingOptions, count: int) -> Plain:
    sampler = Recording(options, loaded.vocab)
    tokens = decode(loaded, prompt, plain, sampler, count)
    return Plain(tokens, sampler.behind, kept_positions(loaded))


def check(loaded: engine.Engine, prompt: list[int], options: SamplingOptions, choice: Choice, gamma: int | None, wanted: Plain) -> bool:
    """Runs one speculative text and says how it compares; whether it is the same."""
    start, drafter = time.perf_counter(), choice.make(loaded)
    decoder = Speculation(drafter, AdaptiveLength(drafter) if gamma is None else FixedLength(gamma), loaded.vocab)
    tokens = decode(loaded, prompt, decoder, Sampler(options, loaded.vocab), wanted.tokens)
    drafter.close()
    tally, same = decoder.tally, tokens == wanted.tokens
    said = (
        f"  {choice.name} gamma {gamma or 'adaptive'}: {tally.accepted} of {tally.drafted} accepted, {tally.tried - tally.accepted} rounds with a "
        f"rejection, {tally.emitted / tally.steps:.2f} tokens a step: "
    )
    if same:
        differing = sum(int((a != b).sum()) for a, b in zip(kept_positions(loaded), wanted.kept, strict=True))
        said += "same text, " + ("same tokens kept" if differing == 0 else f"{differing} SLOTS KEEP OTHER TOKENS")
    else:
        at = len(tokens) - 1
        said += f"DIFFERS from token {at} on, which plain decoding puts {wanted.behind[at][tokens[at]]:.2g} behind its own"
    print(f"{said} ({time.perf_counter() - start:.0f} s)", flush=True)
    return same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--gammas", default="1,2,3,4,5,6,7,8")
    parser.add_argument("--repetition-penalty", type=float, default=1.1, help="keeps a greedy text from running in a circle")
    parser.add_argument("--one-by-one", action="store_true", help="every text alone, as edgekv run does it")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    gammas = [None if gamma == "adaptive" else int(gamma) for gamma in arguments.gammas.split(",")]
    options, different = SamplingOptions(repetition_penalty=arguments.repetition_penalty), 0
    for path in arguments.bundles:
        opened = bundle.open_bundle(path, verify=False)
        tokenizer = load_tokenizer(opened)
        prompt = tokenizer.encode(arguments.prompt_file.read_text(encoding="utf-8")).ids[: arguments.prompt_tokens]
        pool.share(arguments.threads)
        loaded = engine.load(opened, arguments.threads, max_rows=MAX_GAMMA + 1)
        start, wanted = time.perf_counter(), plain_text(loaded, prompt, options, arguments.tokens)
        held = loaded.occupancy(len(prompt) + len(wanted.tokens) - 1)
        print(f"{path.name}: {len(wanted.tokens)} tokens ({len(set(wanted.tokens))} different ones) behind {len(prompt)}, {held.kept} kept, "
              f"{held.evicted} evicted ({time.perf_counter() - start:.0f} s)", flush=True)  # fmt: skip
        ways = [(choose(spec, opened, tokenizer, verify=False), gamma) for spec in arguments.draft for gamma in gammas]
        if arguments.one_by_one:
            same = [check(loaded, prompt, options, *way, wanted) for way in ways]
            loaded.close()
        else:
            loaded.close()
            table = lockstep.Table(opened, len(ways), MAX_GAMMA + 1, arguments.threads or 1)
            texts = [lambda seat, way=way: check(seat, prompt, options, *way, wanted) for way in ways]
            same = lockstep.run(table, texts)
        different += same.count(False)
    print(f"{different} texts differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
