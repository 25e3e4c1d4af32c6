"""The target's own outputs, with the target's laws beside them: what a draft is distilled on.

No data set is needed. With a chat template the target writes both sides of conversations; without one it continues from single
frequent tokens; text files, when given, provide beginnings that it continues. Every token is kept, with the most probable
continuations that the target saw behind it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, PreTrainedModel

TOP = 32  # continuations kept per token
BATCH = 16  # sequences written at a time
TEMPERATURES = (0.4, 0.7, 1.0)  # of the sequences of a batch, in turn
USER_TOKENS = 48  # of a message that the target writes in the user's place
START_TOKENS = 64  # of a text that the target continues


class Corpus:
    """Sequences on disk, written batch by batch and resumable.

    tokens  int32 [N, L]
    ids     int32 [N, L, TOP]   the target's most probable tokens behind each token, most probable first
    logp    float16 [N, L, TOP] their log-probabilities
    """

    def __init__(self, folder: Path, sequences: int, length: int):
        folder.mkdir(parents=True, exist_ok=True)
        self.sequences, self.length = -(-sequences // BATCH) * BATCH, length
        self._state = folder / "corpus.json"
        shapes = {"tokens": ("<i4", ()), "ids": ("<i4", (TOP,)), "logp": ("<f2", (TOP,))}
        fresh = not self._state.is_file()
        for name, (kind, more) in shapes.items():
            path, shape = folder / f"{name}.bin", (self.sequences, length, *more)
            setattr(self, name, np.memmap(path, kind, "w+" if fresh or not path.is_file() else "r+", shape=shape))
        self.done = 0 if fresh else int(json.loads(self._state.read_text())["done"])
        """Sequences that are complete."""

    def write(self, tokens: np.ndarray, ids: np.ndarray, logp: np.ndarray) -> None:
        """Adds a batch; it counts once everything is on disk."""
        part = slice(self.done, self.done + len(tokens))
        self.tokens[part], self.ids[part], self.logp[part] = tokens, ids, logp
        for array in (self.tokens, self.ids, self.logp):
            array.flush()
        self.done += len(tokens)
        self._state.write_text(json.dumps({"done": self.done}))


@dataclass(frozen=True)
class Turns:
    """Token ids of a chat template around messages: before the first, between user and answer, between answer and user."""

    opening: list[int]
    to_answer: list[int]
    to_user: list[int]

    @classmethod
    def of(cls, render: Callable[[list[dict]], str], encode: Callable[[str], list[int]]) -> Turns | None:
        """Finds them by rendering a conversation of marks; None when the template does something else with messages."""
        user, answer = "USERMARK", "ANSWERMARK"
        said = [{"role": "user", "content": user}, {"role": "assistant", "content": answer}, {"role": "user", "content": user}]
        parts = render(said).replace(answer, user).split(user)
        if len(parts) != 4 or not all(parts[:3]):
            return None
        return cls(*(encode(part) for part in parts[:3]))


class _Writer:
    """What one sequence is told to say, and when the target may speak."""

    def __init__(self, turns: Turns | None, start: Sequence[int], ends: frozenset[int]):
        self.turns, self.ends = turns, ends
        self.queue = list(turns.opening if turns else start)
        self.users_turn, self.said = turns is not None, 0

    def next(self, sampled: int) -> int:
        """The token that follows: a forced one, or what the target sampled."""
        if self.queue:
            return self.queue.pop(0)
        self.said += 1
        if self.turns and (sampled in self.ends or (self.users_turn and self.said >= USER_TOKENS)):
            self.queue = list(self.turns.to_answer if self.users_turn else self.turns.to_user)
            self.users_turn, self.said = not self.users_turn, 0
            if self.queue[0] == sampled or sampled not in self.ends:
                return self.queue.pop(0)
        return sampled


def starts(texts: Sequence[Sequence[int]], frequent: Sequence[int], bos: int | None, rng: np.random.Generator) -> Iterator[list[int]]:
    """Beginnings without end: pieces of the texts, or single tokens."""
    while True:
        if texts:
            text = texts[int(rng.integers(len(texts)))]
            at = int(rng.integers(max(1, len(text) - START_TOKENS)))
            piece = list(text[at : at + START_TOKENS])
        else:
            piece = [int(frequent[int(rng.integers(len(frequent)))])]
        yield [bos, *piece] if bos is not None else piece


def write(
    corpus: Corpus,
    target: PreTrainedModel,
    turns: Turns | None,
    texts: Sequence[Sequence[int]],
    frequent: Sequence[int],
    bos: int | None,
    ends: frozenset[int],
    seed: int,
    report: Callable[[int, int], None],
) -> None:
    """Fills the corpus; batches that are there already are kept, so a second call goes on where the first ended."""
    while corpus.done < corpus.sequences:
        batch = corpus.done // BATCH
        rng = np.random.default_rng((seed, batch))
        torch.manual_seed(seed + batch)
        beginnings = starts(texts, frequent, bos, rng)
        # with texts and a template, every second sequence is a conversation
        talks = [turns if turns and (not texts or index % 2) else None for index in range(BATCH)]
        writers = [_Writer(talk, () if talk else next(beginnings), ends) for talk in talks]
        corpus.write(*_batch(target, writers, corpus.length))
        report(corpus.done, corpus.sequences)


@torch.no_grad()
def _batch(target: PreTrainedModel, writers: list[_Writer], length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    temperature = torch.tensor([TEMPERATURES[index % len(TEMPERATURES)] for index in range(len(writers))])[:, None]
    tokens = np.zeros((len(writers), length), np.int32)
    ids = np.zeros((len(writers), length, TOP), np.int32)
    logp = np.zeros((len(writers), length, TOP), np.float16)
    current = [writer.next(0) for writer in writers]
    cache = DynamicCache(config=target.config)
    for place in range(length):
        tokens[:, place] = current
        logits = target(input_ids=torch.tensor(current)[:, None], past_key_values=cache, use_cache=True).logits[:, -1].float()
        law = logits.log_softmax(-1)
        best = law.topk(TOP)
        ids[:, place], logp[:, place] = best.indices.numpy(), best.values.numpy()
        sampled = torch.multinomial((logits / temperature).softmax(-1), 1)[:, 0].tolist()
        current = [writer.next(token) for writer, token in zip(writers, sampled, strict=True)]
    return tokens, ids, logp
