"""Drafts with the target itself, looking at a window of its own cache: for long texts, where reading the cache dominates.

Nothing is copied: no second model, no second cache. While it drafts, the engine's steps skip the middle of every layer's body and
see its first slots, its newest ones and the tail. Drafted rows go to tail slots beyond the committed ones, where verification
writes again, so the committed cache never changes and the draft never has to catch up.

Its logits are those of tokens that are likely anyway: the ones that the tokenizer learnt first and those that occurred in the text.
The output layer is a good part of a small model's weights, and a draft that cannot say a rare new word loses one token now and then.
"""

from __future__ import annotations

from array import array

import numpy as np

from edgekv.engine import Engine
from edgekv.generation.drafters import NOTHING, Draft, Length, logits
from edgekv.generation.sampling import Sampler

DEFAULT_WINDOW = 256
FIRST_TOKENS = 8192  # that a draft can always say; for English about 86 of 100 tokens
_FIRST_ROW = np.zeros(1, np.int64)


class SelfWindowDrafter:
    """Drafts with the target's `engine`, which it does not own, over the newest `window` body slots and the tail."""

    name = "self"
    grades = logits.GRADES
    arena_bytes = 0
    failure = None

    def __init__(self, engine: Engine, window: int = DEFAULT_WINDOW):
        self.engine = engine
        self.window = window
        self.steps = 0
        self.weight_bytes = self._all_bytes = engine.bundle.weight_bytes
        self._token = np.empty(1, np.int64)
        self._sayable = np.zeros(engine.vocab, bool)
        self._tokens, self._read = np.zeros(0, np.int64), 0

    def prior(self, grade: int) -> float:
        return 0.8 + 0.02 * grade  # the same model, most of whose attention rests on what it still sees, disagrees with itself rarely

    def follow(self, tokens: array, anew: bool = False) -> None:
        pass

    def _learn(self, tokens: array) -> None:
        """Lets drafts say what has occurred since the last call; a text that is no longer than before is another one."""
        if len(tokens) < self._read or self._read == 0:
            self._read = 0
            self._sayable[:] = False
            self._sayable[:FIRST_TOKENS] = True
        before = np.count_nonzero(self._sayable)
        self._sayable[np.array(tokens[self._read :], np.int64)] = True
        self._read = len(tokens)
        if np.count_nonzero(self._sayable) != before or self._tokens.size == 0:
            self._tokens = np.flatnonzero(self._sayable)

    def draft(self, tokens: array, pending: int, length: Length, sampler: Sampler) -> Draft:
        if not length.wants_law():
            return NOTHING
        position = len(tokens)

        def step(token: int) -> np.ndarray:
            nonlocal position
            self._token[0] = token
            rows = self.engine.step(self._token, position, _FIRST_ROW)
            position += 1
            self.steps += 1
            return rows[0]

        self._learn(tokens)
        self.weight_bytes = self._all_bytes - self.engine.look(self.window, self._tokens)
        try:
            return logits.draw_tokens(step(pending), step, length, sampler)
        finally:
            self.engine.look(None)

    def close(self) -> None:
        pass
