"""Facts hidden in a long text and asked for at its end, over text length and depth (needle in a haystack).

The answer is generated greedily, token by token through the bundle's own cache, and scored as RULER does: the share of the
expected strings that occur in it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgekv.errors import UserError
from edgekv.generation.generate import Answer, generate
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.template import ChatTemplate
from edgekv.quality.tasks import TASKS, Puzzle

INSTRUCTION = "Some facts are hidden in the following text. Read it and answer the question after it."
TOKENS_PER_ANSWER, TOKENS_BESIDE = 16, 24  # room for what is asked for, and for the words around it


@dataclass(frozen=True)
class Trial:
    """One prompt. depth: where the asked fact lies, 0 (start) to 1 (end), None when facts are spread over the text; tokens: the
    prompt's own, at most `length`."""

    task: str
    length: int
    depth: float | None
    tokens: np.ndarray
    answers: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    trial: Trial
    text: str
    score: float


class PromptMaker:
    """Puts puzzles into a text of a wanted number of tokens.

    sentences  of the haystack; a text that is too short starts over
    template   the bundle's chat template, None for models that only continue text
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, sentences: Sequence[str]):
        self._tokenizer, self._template, self._sentences = tokenizer, template, sentences
        self._sizes = [len(e.ids) for e in tokenizer.encode_batch([f" {s}" for s in sentences], add_special_tokens=False)]

    def make(self, task: str, length: int, depth: float | None, seed: int) -> Trial:
        """The prompt of a seed: the same haystack and puzzle at every depth. UserError when `length` has no room for the task."""
        rng = np.random.default_rng([seed, length, zlib.crc32(task.encode())])
        puzzle = TASKS[task](rng)
        first, spread = int(rng.integers(len(self._sentences))), np.sort(rng.random(len(puzzle.facts)))
        taken = room = length - self._encode(self._wrap(puzzle, list(puzzle.facts))).size
        while True:
            hay = self._hay(first, taken)
            if not hay:
                raise UserError(f"A prompt of {length} tokens has no room for the task {task} and its text; use longer prompts.")
            tokens = self._encode(self._wrap(puzzle, _hide(puzzle, hay, depth, spread)))
            if tokens.size <= length:
                return Trial(task, length, depth if puzzle.target is not None else None, tokens, puzzle.answers)
            taken -= max(1, tokens.size - length, room // 256)  # sizes of single sentences need not add up exactly

    def _hay(self, first: int, tokens: int) -> list[str]:
        """Consecutive sentences of about `tokens` tokens, not more by their own sizes."""
        hay, at = [], first
        while (tokens := tokens - self._sizes[at]) >= 0:
            hay.append(self._sentences[at])
            at = (at + 1) % len(self._sentences)
        return hay

    def _wrap(self, puzzle: Puzzle, pieces: Sequence[str]) -> str:
        content = f"{INSTRUCTION}\n\n{' '.join(pieces)}\n\n{puzzle.question}"
        if self._template is None:
            return f"{content}\n{puzzle.lead_in}"
        return self._template.render([{"role": "user", "content": content}])

    def _encode(self, text: str) -> np.ndarray:
        # a template writes the special tokens itself
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=self._template is None).ids, np.int64)


def _hide(puzzle: Puzzle, hay: list[str], depth: float | None, spread: np.ndarray) -> list[str]:
    """The sentences with the facts between them: the target at `depth`, the others at `spread` float [facts], ascending."""
    places = spread.copy()
    if puzzle.target is not None and depth is not None:
        places[puzzle.target] = depth
    before: dict[int, list[str]] = {}
    for fact, place in zip(puzzle.facts, places, strict=True):
        before.setdefault(round(place * len(hay)), []).append(fact)
    return [piece for i in range(len(hay) + 1) for piece in [*before.get(i, []), *hay[i : i + 1]]]


def score(text: str, answers: Sequence[str]) -> float:
    """Share of the answers that occur in the text as words of their own."""
    return sum(_occurs(answer, text) for answer in answers) / len(answers)


def _occurs(answer: str, text: str) -> bool:
    return re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text) is not None


def run(session: Session, tokenizer: Tokenizer, trial: Trial, end_tokens: Sequence[int]) -> Outcome:
    """Reads the prompt from an empty cache and generates until the model ends, every answer is there, or the room is used up."""
    session.reset()
    answer, text = Answer(), ""
    sampler = Sampler(SamplingOptions(), session.engine.vocab, seed=0)
    most = TOKENS_BESIDE + TOKENS_PER_ANSWER * len(trial.answers)
    pieces = generate(session, sampler, tokenizer, trial.tokens, answer, max_tokens=most, end_tokens=end_tokens)
    for piece in pieces:
        text += piece
        # a number may still grow by the next token: only what something else follows is certain
        if score(text[:-1], trial.answers) == 1.0 and not text[-1:].isalnum():
            break
    return Outcome(trial, text, score(text, trial.answers))


def grid(tasks: Sequence[str], lengths: Sequence[int], depths: int, trials: int, seed: int) -> Iterator[tuple[str, int, float | None, int]]:
    """(task, length, depth, seed) of every trial. Tasks that spread their facts have one cell per length, with as many trials.

    Each depth is the middle of an equal part of the text. A fact that stands before all text says more about a model's chat format
    than about its memory: SmolLM2-135M finds none there with everything in its cache, and all of them anywhere else.
    """
    for task in tasks:
        spread = TASKS[task](np.random.default_rng(0)).target is None
        for length in lengths:
            for depth in [None] if spread else ((np.arange(depths) + 0.5) / depths).tolist():
                for trial in range(trials * (depths if spread else 1)):
                    yield task, length, depth, seed + trial


def summarise(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Mean scores by task: overall, and per cell (length, depth) with the number of trials."""
    result: dict[str, Any] = {}
    for task in dict.fromkeys(o.trial.task for o in outcomes):
        mine = [o for o in outcomes if o.trial.task == task]
        cells: dict[tuple[int, float | None], list[float]] = {}
        for o in mine:
            cells.setdefault((o.trial.length, o.trial.depth), []).append(o.score)
        result[task] = {
            "score": float(np.mean([o.score for o in mine])),
            "trials": len(mine),
            "cells": [
                {"length": length, "depth": depth, "score": float(np.mean(scores)), "trials": len(scores)}
                for (length, depth), scores in cells.items()
            ],
        }
    return result


Progress = Callable[[str], None]
