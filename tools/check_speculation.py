"""Greedy speculative text against plain greedy text, token for token: every bundle x drafter x length.

    python tools/check_speculation.py full-fp32 window-fp32 heavy-fp32 --draft draft-int4 --draft ngram --draft self:64 \
        --prompt-file novel.txt --prompt-tokens 500 --tokens 2000

Exits with 1 when a text differs. Where it does, the two tokens' logits in plain decoding are shown: a difference far below the
precision of the weight format is rounding between blocks of different sizes, anything else is a defect.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from pathlib import Path

from edgekv import bundle, engine
from edgekv.generation.adaptive import MAX_GAMMA, AdaptiveLength, FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.choose import choose
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation
from edgekv.generation.text import load_tokenizer


def text(loaded, prompt: list[int], decoder, count: int) -> tuple[list[int], Session]:
    session, sampler = Session(loaded), Sampler(SamplingOptions(), loaded.vocab)
    produced = decoder(session, sampler, session.feed(prompt))
    tokens = list(itertools.islice(produced, count))
    produced.close()
    return tokens, session


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--draft", action="append", required=True)
    parser.add_argument("--prompt-file", type=Path, required=True)
    parser.add_argument("--prompt-tokens", type=int, default=500)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--gammas", default="1,2,3,4,5,6,7,8,adaptive")
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    gammas = [None if gamma == "adaptive" else int(gamma) for gamma in arguments.gammas.split(",")]
    different = 0
    for path in arguments.bundles:
        opened = bundle.open_bundle(path, verify=False)
        tokenizer = load_tokenizer(opened)
        prompt = tokenizer.encode(arguments.prompt_file.read_text(encoding="utf-8")).ids[: arguments.prompt_tokens]
        loaded = engine.load(opened, arguments.threads, max_rows=MAX_GAMMA + 1, alternating=True)
        wanted, session = text(loaded, prompt, plain, arguments.tokens)
        kept = loaded.occupancy(session.position)
        print(f"{path.name}: {len(wanted)} tokens behind {len(prompt)}, {kept.kept} kept, {kept.evicted} evicted", flush=True)
        for spec in arguments.draft:
            drafter = choose(spec, opened, tokenizer, verify=False).make(loaded)
            for gamma in gammas:
                start = time.perf_counter()
                length = AdaptiveLength(drafter) if gamma is None else FixedLength(gamma)
                decoder = Speculation(drafter, length, loaded.vocab)
                tokens, session = text(loaded, prompt, decoder, arguments.tokens)
                tally = decoder.tally
                said = f"  {spec} gamma {gamma or 'adaptive'}: {tally.accepted} of {tally.drafted} accepted, {tally.emitted / tally.steps:.2f} tokens a step"
                if tokens == wanted:
                    print(f"{said}, same text and cache ({time.perf_counter() - start:.0f} s)", flush=True)
                    if loaded.occupancy(session.position) != kept:
                        sys.exit("    but another cache")
                    continue
                different += 1
                at = next(i for i, (a, b) in enumerate(zip(tokens, wanted, strict=False)) if a != b)
                again = Session(loaded)
                logits = again.feed(prompt + wanted[:at])
                gap = float(logits[wanted[at]] - logits[tokens[at]])
                print(f"{said}, DIFFERS from token {at} on, where the logits differ by {gap:.2g}", flush=True)
            drafter.close()
        loaded.close()
    print(f"{different} texts differ")
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
