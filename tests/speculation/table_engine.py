"""A model that fits on a page, behind the engine protocol: the next token's law depends on the last two tokens by a table.

Its cache behaves like a real one: rows are written to a tail, nothing is committed, and compaction freezes what the tail then holds.
So a session that mismanages positions reads the wrong context and gets the wrong law.
"""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from edgekv.engine import Occupancy
from edgekv.errors import CacheFullError, NativeError


class TableEngine:
    """`laws` float64 [vocab, vocab, vocab]: laws[a, b] is the law behind the tokens a, b (a = b = 0 before the text)."""

    threads = 1
    observe = 0
    retrieval = None

    def __init__(self, laws: np.ndarray, boundary: int = 32, chunk: int = 32, capacity: int | None = None, max_rows: int = 17):
        with np.errstate(divide="ignore"):
            self.logits = np.log(laws).astype(np.float32)
        self.vocab = laws.shape[-1]
        self.boundary, self.chunk, self.capacity, self.max_rows = boundary, chunk, capacity, max_rows
        self.arena = np.zeros(256, np.uint8)
        self.bundle = SimpleNamespace(weight_bytes=1000, layers=[{"params": {"body_slots": 64}}])
        self._out = np.empty((max_rows, self.vocab), np.float32)
        self.reset()

    def reset(self):
        self.frozen: list[int] = []
        self.tail = np.zeros(self.boundary, np.int64)
        self.compactions = 0

    def step(self, tokens, position, rows):
        first = position - len(self.frozen)
        if not (0 <= first and first + len(tokens) <= self.boundary and 1 <= len(tokens) <= self.chunk and len(rows) <= self.max_rows):
            raise NativeError("this step does not fit the tail")
        self.tail[first : first + len(tokens)] = tokens
        for index, row in enumerate(rows):
            self._out[index] = self.logits[self._token(first + row - 1), self._token(first + row)]
        return self._out[: len(rows)]

    def _token(self, slot):
        if slot >= 0:
            return self.tail[slot]
        return self.frozen[slot] if len(self.frozen) >= -slot else 0

    def compact(self, position):
        if position != len(self.frozen) + self.boundary:
            raise NativeError("compaction is for boundaries")
        if self.capacity is not None and position > self.capacity:
            raise CacheFullError("full")
        self.frozen.extend(self.tail.tolist())
        self.compactions += 1

    def state_hash(self, position):
        return hash((tuple(self.frozen), tuple(self.tail[: position - len(self.frozen)].tolist())))

    def occupancy(self, position):
        return Occupancy(256, position, position, 0)

    def close(self):
        pass


def random_laws(vocab: int, seed: int, sharpness: float = 1.5) -> np.ndarray:
    """Laws [vocab, vocab, vocab] with every probability positive."""
    scores = np.random.default_rng(seed).normal(0, sharpness, (vocab, vocab, vocab))
    laws = np.exp(scores)
    return laws / laws.sum(axis=-1, keepdims=True)
