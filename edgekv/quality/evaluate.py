"""Runs bundles one after the other over the same text and the same prompts, and puts the figures side by side."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgekv import engine, machine
from edgekv.bundle import Bundle
from edgekv.errors import UserError
from edgekv.generation.session import Session
from edgekv.generation.template import template_of
from edgekv.generation.text import load_tokenizer
from edgekv.quality import agreement, needle, perplexity
from edgekv.quality.perplexity import Scores
from edgekv.quality.tasks import TASKS
from edgekv.quality.text import Text
from edgekv.retrieval import Retrieval

LEAST_TOKENS = 16

Report = Callable[[str], None]


@dataclass(frozen=True)
class Options:
    """tokens: most tokens of the text that are scored (0: no perplexity); tasks, lengths, depths, trials, seed: of needle.grid;
    retrieve: in place of what compressed bundles say themselves."""

    tokens: int
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    depths: int
    trials: int
    seed: int
    threads: int | None = None
    retrieve: Retrieval | None = None
    rerank: int | None = None


def evaluate(
    bundles: Sequence[Bundle], reference: int | None, text: Text, options: Options, report: Report = lambda line: None
) -> dict[str, Any]:
    """One object with every figure, ready for JSON (docs/quality.md names its fields).

    reference  index of the bundle that the others are compared with; None takes the first that keeps every token as it is, else the
               first

    Raises UserError when the bundles do not share a tokenizer, or when nothing that was asked for fits.
    """
    tokenizer = _shared_tokenizer(bundles)
    reference = _default_reference(bundles) if reference is None else reference
    ids = _ids(bundles, tokenizer, text, options.tokens)
    prompts = _prompts(bundles, tokenizer, text, options)
    passes: list[Scores | None] = []
    shown: list[dict[str, Any]] = []
    for index, bundle in enumerate(bundles):
        name = _names(bundles)[index]
        rows = min(bundle.chunk, bundle.boundary, perplexity.rows_for(bundle.model["vocab"])) if ids.size else 1
        loaded = engine.load(bundle, options.threads, max_rows=rows)
        try:
            if loaded.retrieval is not None and (options.retrieve or options.rerank):
                loaded.retrieve(options.retrieve or loaded.retrieval, options.rerank)
            session = Session(loaded)
            scores = None
            if ids.size:
                scores = perplexity.score(session, ids, lambda done, total, n=name: report(f"{n}: {done} of {total} tokens"))
            outcomes, left_out = _retrieve(session, bundle, tokenizer, prompts, name, report)
            threads, retrieval = loaded.threads, loaded.retrieval
        finally:
            loaded.close()
        passes.append(scores)
        shown.append({"name": name, **_facts(bundle), "retrieve": str(retrieval) if retrieval else None, "tasks": needle.summarise(outcomes), "lengths_left_out": left_out})
    evicted = min((b.first_loss for b in bundles if b.first_loss is not None), default=None)
    after = None if evicted is None else evicted + 1  # the token that follows is still predicted from all before it
    for entry, scores in zip(shown, passes, strict=True):
        entry["perplexity"] = None if scores is None else _perplexity(scores, after)
        entry["against_reference"] = None if scores is None else _against(scores, passes[reference], after)
        entry["quality"] = _quality(entry)
    return {
        "text": {"name": text.name, "sha256": hashlib.sha256(text.content.encode()).hexdigest(), "tokens": int(ids.size)},
        "reference": shown[reference]["name"],
        "first_eviction": evicted,
        "needle": {"lengths": list(options.lengths), "depths": options.depths, "trials": options.trials, "seed": options.seed},
        "machine": machine.describe(threads),
        "bundles": shown,
    }


def _shared_tokenizer(bundles: Sequence[Bundle]) -> Tokenizer:
    """The first bundle's tokenizer; others must be the same file, or losses per token could not be compared."""
    hashes = {b.manifest["files"].get("tokenizer.json", {}).get("sha256") for b in bundles}
    if len(hashes) > 1:
        raise UserError("The bundles have different tokenizers, so their figures per token cannot be compared; evaluate them one by one.")
    return load_tokenizer(bundles[0])


def _default_reference(bundles: Sequence[Bundle]) -> int:
    return next((i for i, b in enumerate(bundles) if b.first_loss is None), 0)


def _ids(bundles: Sequence[Bundle], tokenizer: Tokenizer, text: Text, tokens: int) -> np.ndarray:
    """int64 ids of the text, no more than every bundle can read; empty when no perplexity is wanted."""
    if not tokens:
        return np.zeros(0, np.int64)
    limits = [b.capacity for b in bundles if b.capacity is not None]
    ids = np.asarray(tokenizer.encode(text.content).ids[: min([tokens, *limits])], np.int64)
    if ids.size < LEAST_TOKENS:
        raise UserError(f"{text.name} gives {ids.size} tokens, and perplexity needs at least {LEAST_TOKENS}; give a longer text.")
    return ids


def _prompts(bundles: Sequence[Bundle], tokenizer: Tokenizer, text: Text, options: Options) -> list[needle.Trial]:
    if not options.tasks:
        return []
    sentences = text.sentences()
    if not sentences:
        raise UserError(f"{text.name} has no sentences that facts could be hidden between; give prose, or --tasks none.")
    maker = needle.PromptMaker(tokenizer, template_of(bundles[0], tokenizer), sentences)
    spread = needle.grid(options.tasks, options.lengths, options.depths, options.trials, options.seed)
    return [maker.make(task, length, depth, seed) for task, length, depth, seed in spread]


def _retrieve(
    session: Session, bundle: Bundle, tokenizer: Tokenizer, prompts: Sequence[needle.Trial], name: str, report: Report
) -> tuple[list[needle.Outcome], list[int]]:
    """Outcomes of the prompts that fit, and the lengths that do not."""
    capacity = session.engine.capacity
    fitting = [p for p in prompts if capacity is None or p.tokens.size + needle.TOKENS_BESIDE <= capacity]
    outcomes: list[needle.Outcome] = []
    for index, prompt in enumerate(fitting):
        report(f"{name}: {prompt.task}, {prompt.length} tokens, prompt {index + 1} of {len(fitting)}")
        outcomes.append(needle.run(session, tokenizer, prompt, bundle.model["eos_token_ids"]))
    return outcomes, sorted({p.length for p in prompts} - {p.length for p in fitting})


def _names(bundles: Sequence[Bundle]) -> list[str]:
    """Folder names, made longer by their parents where two are alike."""
    parts = [Path(b.folder).resolve().parts for b in bundles]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return [f"{name} ({i + 1})" for i, name in enumerate(names)]  # the same folder twice


def _facts(bundle: Bundle) -> dict[str, Any]:
    return {
        "path": str(bundle.folder),
        "model": bundle.model["name"],
        "weights": bundle.manifest.get("weights", {}).get("format"),
        "policy": bundle.manifest["policy"],
        "kv_bytes": bundle.arena_bytes,
    }


def _perplexity(scores: Scores, after: int | None) -> dict[str, Any]:
    return {
        "tokens": int(scores.loss.size),
        "perplexity": scores.perplexity(),
        "after_first_eviction": None if after is None else scores.perplexity(after),
        "ranges": [{"start": a, "stop": b, "perplexity": scores.perplexity(a, b)} for a, b in scores.ranges()],
    }


def _against(scores: Scores, other: Scores, after: int | None) -> dict[str, Any]:
    """Compared from the first eviction or compression on, where the text is that long: before it every cache holds the same tokens."""
    start = after if after is not None and after < scores.loss.size else 1
    ratio = perplexity.compare(scores, other, start)
    return {
        "start": start,
        "top1_agreement": agreement.top1(scores, other, start),
        "perplexity_ratio": None if ratio is None else {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high},
    }


def _quality(entry: dict[str, Any]) -> float | None:
    """One figure, higher is better, for charts of quality against bytes: mean retrieval score, else agreement with the reference."""
    if entry["tasks"]:
        return float(np.mean([task["score"] for task in entry["tasks"].values()]))
    return entry["against_reference"]["top1_agreement"] if entry["against_reference"] else None


def check_tasks(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in TASKS:
            raise UserError(f"There is no task {name!r}; choose from {', '.join(TASKS)}, all or none.")
    return tuple(dict.fromkeys(names))
