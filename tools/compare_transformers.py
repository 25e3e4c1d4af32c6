"""A bundle beside the original model in transformers, on the same tokens: logits, likeliest tokens, perplexity.

    python tools/compare_transformers.py MODEL BUNDLE [BUNDLE ...] --tokens 512

MODEL is what the bundles were exported from. transformers computes in single precision, with its own cache, in blocks, so that
the logits of a long text need not lie in memory. The bundles' caches should hold the text, or the comparison is with a bounded
cache. Prints a table, or one JSON object with --json. Needs the extra `edgekv[export]`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from edgekv import bundle, engine
from edgekv.errors import UserError
from edgekv.export import load
from edgekv.export.quiet import quiet
from edgekv.generation.session import Session
from edgekv.generation.text import load_tokenizer
from edgekv.quality import perplexity, text
from edgekv.quality.perplexity import Scores

BLOCK = 128


class Original:
    """The model in transformers; `read` gives logits float32 [T, vocab] of tokens that follow those read before."""

    def __init__(self, source: load.Source):
        with quiet():
            self.model = AutoModelForCausalLM.from_pretrained(source.folder, config=source.config, dtype=torch.float32).eval()
        self.cache = DynamicCache(config=source.config)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        with quiet(), torch.no_grad():
            return self.model(input_ids=torch.from_numpy(tokens)[None], past_key_values=self.cache, use_cache=True).logits[0].numpy()


def side_by_side(original: Original, sessions: list[Session], ids: np.ndarray) -> list[dict]:
    """Figures of each session, over all T tokens for logits and over T-1 for losses."""
    losses: list[list[np.ndarray]] = [[] for _ in range(len(sessions) + 1)]
    largest, total, same = (np.zeros(len(sessions)) for _ in range(3))
    for start in range(0, ids.size, BLOCK):
        block = ids[start : start + BLOCK]
        following = ids[start + 1 : start + 1 + block.size]
        theirs = original.read(block)
        losses[0].append(perplexity.losses(theirs[: following.size], following))
        for index, session in enumerate(sessions):
            ours = _read(session, block)
            difference = np.abs(ours - theirs)
            largest[index] = max(largest[index], difference.max())
            total[index] += difference.mean(axis=1, dtype=np.float64).sum()
            same[index] += (ours.argmax(axis=1) == theirs.argmax(axis=1)).sum()
            losses[index + 1].append(perplexity.losses(ours[: following.size], following))
    nothing = np.zeros(ids.size - 1, np.int64)
    base, *found = (Scores(np.concatenate(parts), nothing) for parts in losses)
    rows = []
    for index, scores in enumerate(found):
        ratio = perplexity.compare(scores, base)
        rows.append({
            "bundle": str(sessions[index].engine.bundle.folder),
            "max_difference": float(largest[index]),
            "mean_difference": float(total[index] / ids.size),
            "same_top_token": float(same[index] / ids.size),
            "perplexity_transformers": base.perplexity(),
            "perplexity": scores.perplexity(),
            "ratio": scores.perplexity() / base.perplexity(),
            "interval": None if ratio is None else [ratio.low, ratio.high],
        })  # fmt: skip
    return rows


def _read(session: Session, tokens: np.ndarray) -> np.ndarray:
    parts, done = [], 0
    while done < tokens.size:
        block = tokens[done : done + max(1, min(session.room, session.engine.max_rows))]
        parts.append(session.step(block).copy())
        session.commit(block.size)
        done += block.size
    return np.concatenate(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("bundles", nargs="+", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--text", type=Path, help="a UTF-8 file; default: the text that edgekv eval uses")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    try:
        opened = [bundle.open_bundle(path) for path in args.bundles]
        prose = text.shipped().content if args.text is None else args.text.read_text(encoding="utf-8")
        ids = np.asarray(load_tokenizer(opened[0]).encode(prose).ids[: args.tokens], np.int64)
        sessions = [Session(engine.load(b, args.threads, max_rows=min(BLOCK, b.chunk))) for b in opened]
        if args.threads:
            torch.set_num_threads(args.threads)
        rows = side_by_side(Original(load.find(args.model)), sessions, ids)
    except UserError as error:
        parser.error(str(error))
    if args.json:
        print(json.dumps({"model": args.model, "tokens": int(ids.size), "rows": rows}))
        return
    print(f"{ids.size} tokens; transformers: perplexity {rows[0]['perplexity_transformers']:.4f}")
    for row in rows:
        interval = "" if row["interval"] is None else " ({:+.2%} to {:+.2%})".format(*(x - 1 for x in row["interval"]))
        print(
            f"{row['bundle']}: logits differ by {row['max_difference']:.3g} at most and {row['mean_difference']:.3g} on average, "
            f"likeliest token equal {row['same_top_token']:.2%}, perplexity {row['perplexity']:.4f}, {row['ratio'] - 1:+.3%}{interval}"
        )


if __name__ == "__main__":
    main()
