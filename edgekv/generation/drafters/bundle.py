"""Drafts with a smaller model: another bundle with the same tokenizer, in a bounded cache of its own.

The draft reads what the target commits, two tokens at once after a round in which everything was accepted. While it drafts it
commits its own guesses and takes them back afterwards, which is free inside one boundary interval; so a draft never runs across a
boundary of its cache. Leaving parts of a text out, or starting over in the middle, changes what it proposes, never what is
emitted: so it reads no more of a long text than it has a use for, and never ends because its cache is full.
"""

from __future__ import annotations

from array import array

import numpy as np

from edgekv.engine import Engine
from edgekv.errors import EdgekvError
from edgekv.generation.drafters import Draft, Length, logits
from edgekv.generation.sampling import Sampler
from edgekv.generation.session import Session

_RESUME = 64  # newest tokens that are read when the draft has been idle for longer than that
_USUAL = 2  # tokens that are read before every draft: the pending one, and the last of a draft that was accepted as a whole
_FIRST_ROW = np.zeros(1, np.int64)


class BundleDrafter:
    """Drafts with `engine`, which it owns.

    vocab      logits per row of the target
    token_ids  int64 [rows of the draft's logits], the target's token of each row, when the draft knows only some; None: row i is
               token i, and rows that only one of the two models has are padding
    """

    name = "bundle"
    grades = logits.GRADES

    def __init__(self, engine: Engine, vocab: int, token_ids: np.ndarray | None = None):
        self.engine = engine
        self.session = Session(engine)
        self.steps = 0
        self.weight_bytes = engine.bundle.weight_bytes
        self.arena_bytes = engine.arena.nbytes
        self.failed = False  # the draft model broke down: the target goes on alone
        # Token i of the draft's text, from _joint on, is token _origin + i of the target's.
        self._origin = self._joint = 0
        self._token_ids = token_ids
        self._logits = None if token_ids is None and engine.vocab == vocab else np.full(vocab, -np.inf, np.float32)
        kept = max(layer["params"]["body_slots"] for layer in engine.bundle.layers) + engine.boundary
        self._reach = 2 * kept if engine.capacity is None else max(1, engine.capacity // 2)

    def prior(self, grade: int) -> float:
        return logits.prior(grade)

    def follow(self, tokens: array) -> None:
        """Reads all committed tokens, or the newest that its cache has a use for."""
        if len(tokens) and not self.failed:
            self._catch_up(np.frombuffer(tokens, np.int32), self._reach, whole=True)

    def draft(self, tokens: array, pending: int, length: Length, sampler: Sampler) -> Draft:
        text = _Text(np.frombuffer(tokens, np.int32), pending)
        behind = len(text) - self._origin - len(self.session.tokens)
        if self.failed or not length.wants_law(min(max(behind - _USUAL, 0), _RESUME)):
            return Draft([], [], [])
        first = self._catch_up(text, _RESUME, whole=False)
        return Draft([], [], []) if first is None else logits.draw_tokens(first, self._step, length, sampler)

    def close(self) -> None:
        self.engine.close()

    def _catch_up(self, text: np.ndarray | _Text, reach: int, whole: bool) -> np.ndarray | None:
        """Feeds what the draft has not read yet; logits of the place behind it, None when the draft model fails."""
        try:
            missing = self._missing(text, reach, whole)
            self.steps += 1
            return self._of_target(self.session.feed(missing))
        except EdgekvError:
            self.failed = True
            return None

    def _missing(self, text: np.ndarray | _Text, reach: int, whole: bool) -> np.ndarray:
        """Takes back guesses that did not come true; returns the tokens to feed, int [n], n >= 1.

        reach  most tokens to feed
        whole  compare all of the draft's text, not just what could be guesses
        """
        session, capacity, size = self.session, self.engine.capacity, len(text)
        if whole and self._joint:
            self._restart(0)
        since = 0 if whole else max(session.tail_base, self._joint)
        theirs = text[self._origin + since :]
        mine = np.array(session.tokens[since:], np.int32)[: theirs.size]
        differing = np.flatnonzero(mine != theirs[: mine.size])
        agreed = since + min(int(differing[0]) if differing.size else mine.size, theirs.size - 1)  # one is fed for its logits
        if agreed < since or not session.rewind(agreed):
            self._restart(0)
            agreed = 0
        wanted = size - self._origin - agreed
        fits = capacity is None or agreed + min(wanted, reach) <= capacity
        if not fits or (wanted > reach and agreed == 0):
            wanted = min(reach, size if capacity is None else max(1, capacity // 2), size)
            self._restart(size - wanted)
        elif wanted > reach:
            self._origin, self._joint = self._origin + wanted - reach, agreed
            wanted = reach
        return text[size - wanted :]

    def _restart(self, origin: int) -> None:
        self.session.reset()
        self._origin, self._joint = origin, 0

    def _step(self, token: int) -> np.ndarray | None:
        session = self.session
        if session.room < 2:  # a guess must not reach the boundary: what is compacted cannot be taken back
            return None
        try:
            rows = session.step([token], _FIRST_ROW)
        except EdgekvError:
            self.failed = True
            return None
        session.commit(1)
        self.steps += 1
        return self._of_target(rows[0])

    def _of_target(self, rows: np.ndarray) -> np.ndarray:
        """The draft's logits [rows] as logits float32 [vocab] of the target's tokens; those it does not know are impossible."""
        if self._logits is None:
            return rows
        if self._token_ids is not None:
            self._logits[self._token_ids] = rows
        else:
            count = min(rows.size, self._logits.size)
            self._logits[:count] = rows[:count]
        return self._logits


class _Text:
    """`tokens` and one more, as a sequence whose slices are arrays; spares copying a long text every round."""

    def __init__(self, tokens: np.ndarray, pending: int):
        self._tokens, self._pending = tokens, np.array([pending], np.int32)

    def __len__(self) -> int:
        return self._tokens.size + 1

    def __getitem__(self, part: slice) -> np.ndarray:
        return np.concatenate([self._tokens[part.start :], self._pending]) if part.start < len(self) else self._pending[:0]
