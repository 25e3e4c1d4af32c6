"""How well a bundle predicts a text that streams through its cache: one pass, every token scored once.

Perplexity is exp of the mean of -log p(token | everything the cache kept before it), natural logarithm.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from edgekv.generation.session import Session

ROWS_AT_A_TIME = 32  # rows whose logits are turned into probabilities together, which bounds the memory for large vocabularies
BLOCK = 64  # tokens per block of the error estimate: neighbouring tokens are not independent, blocks nearly are
FIRST_RANGE = 256  # tokens of the first range of positions; each following one ends at twice the position


@dataclass(frozen=True)
class Scores:
    """Of one pass over T tokens: loss float64 [T-1] in nats and argmax int64 [T-1] for the tokens 1..T-1, each predicted from
    those before it."""

    loss: np.ndarray
    argmax: np.ndarray

    def perplexity(self, start: int = 1, stop: int | None = None) -> float | None:
        """Over the tokens start..stop-1 of the text; None when there are none."""
        part = self.loss[max(start, 1) - 1 : None if stop is None else stop - 1]
        return float(np.exp(part.mean())) if part.size else None

    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) of ranges of positions, the first FIRST_RANGE tokens, then doubling, the last one cut at the end."""
        end, found, start, stop = self.loss.size + 1, [], 1, FIRST_RANGE
        while start < end:
            found.append((start, min(stop, end)))
            start, stop = stop, stop * 2
        return found


def rows_for(vocab: int) -> int:
    """Rows of logits that one step should give: as many as fit 64 MiB, at least 16."""
    return max(16, (64 << 20) // (4 * vocab))


def score(session: Session, ids: np.ndarray, progress: Callable[[int, int], None] = lambda done, total: None) -> Scores:
    """Feeds ids int64 [T], T >= 2, to an empty session whose engine gives as many rows of logits as it takes tokens. In a compressed
    cache every row attends to what it retrieves, as in generated text.

    Raises CacheFullError when the text is longer than a cache that evicts nothing.
    """
    session.reset()
    loss, best = np.empty(ids.size - 1), np.empty(ids.size - 1, np.int64)
    most = session.engine.max_rows
    while session.position < ids.size - 1:
        at = session.position
        block = ids[at : min(at + max(1, min(session.room, most)), ids.size - 1)]
        logits = session.step(block)
        for first in range(0, block.size, ROWS_AT_A_TIME):
            some = slice(at + first, at + min(first + ROWS_AT_A_TIME, block.size))
            rows = logits[first : first + ROWS_AT_A_TIME]
            best[some] = rows.argmax(axis=1)
            loss[some] = losses(rows, ids[some.start + 1 : some.stop + 1])
        session.commit(block.size)
        progress(session.position, ids.size - 1)
    return Scores(loss, best)


def losses(logits: np.ndarray, following: np.ndarray) -> np.ndarray:
    """-log softmax at the token that follows: float64 [R] of logits float32 [R, vocab] and ids int64 [R]."""
    top = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - top).sum(axis=1, dtype=np.float64)
    return np.log(total) + top[:, 0] - logits[np.arange(len(following)), following]


@dataclass(frozen=True)
class Ratio:
    """Perplexity of one pass over that of another on the same tokens, with a 95 % interval."""

    ratio: float
    low: float
    high: float


def compare(ours: Scores, other: Scores, start: int = 1) -> Ratio | None:
    """perplexity(ours) / perplexity(other) over the tokens from `start` on; None with fewer than two blocks of them.

    The interval comes from the spread of the mean difference of losses in blocks of BLOCK tokens (Student's t for few blocks is
    not applied: below about ten blocks it is too narrow).
    """
    difference = (ours.loss - other.loss)[max(start, 1) - 1 :]
    count = difference.size // BLOCK
    if count < 2:
        return None
    blocks = difference[: count * BLOCK].reshape(count, BLOCK).mean(axis=1)
    middle, spread = float(difference.mean()), 1.96 * float(blocks.std(ddof=1)) / count**0.5
    return Ratio(*(float(np.exp(x)) for x in (middle, middle - spread, middle + spread)))
