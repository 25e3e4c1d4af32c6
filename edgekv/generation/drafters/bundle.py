"""Drafts with a smaller model: another bundle with the same tokenizer, in a bounded cache of its own.

The draft reads what the target commits, two tokens at once after a round in which everything was accepted. While it drafts it
commits its own guesses and takes them back afterwards, which is free inside one boundary interval; so a draft never runs across a
boundary of its cache. Leaving parts of a text out, or starting over in the middle, changes what it proposes, never what is
emitted: so it reads no more of a long text than it has a use for, and never ends because its cache is full.

Nobody knows beforehand whether a draft is any good, and reading a prompt can cost as much as writing a good part of the answer. So it
begins behind the last few tokens of the text. Guesses that come true earn the reading of the rest, wrong ones show that there is something
to gain from it: the text is read when it was earned and one guess in four is wrong. So what a useless draft costs does not depend on the
prompt, and a draft that is right anyway reads nothing it does not need.
"""

from __future__ import annotations

from array import array

import numpy as np

from edgekv.engine import Engine
from edgekv.errors import EdgekvError
from edgekv.generation.drafters import NOTHING, Draft, Length, logits
from edgekv.generation.sampling import Sampler
from edgekv.generation.session import Session

NEWEST = 8  # newest tokens of what was missed that are read at most, as long as no more was earned, by a draft of the target's size
_MOST_NEWEST = 64  # the same, by the smallest draft
_RIGHT_ENOUGH = 3  # right guesses for each wrong one, above which a draft reads no more than it has
_USUAL = 2  # tokens that are read before every draft: the pending one, and the last of a draft that was accepted as a whole
_FIRST_ROW = np.zeros(1, np.int64)


def first_look(target_bytes: int, draft_bytes: int) -> int:
    """Tokens that a draft may read before it has shown anything, by the bytes of both models' weights: a small one reads more in the time."""
    return min(NEWEST * max(target_bytes, draft_bytes) // max(draft_bytes, 1), _MOST_NEWEST)


class BundleDrafter:
    """Drafts with `engine`, which it owns.

    newest     tokens of what it missed that it reads before every draft, the newest
    vocab      logits per row of the target
    token_ids  int64 [rows of the draft's logits], the target's token of each row, when the draft knows only some; None: row i is
               token i, and rows that only one of the two models has are padding
    """

    name = "bundle"
    grades = logits.GRADES

    def __init__(self, engine: Engine, vocab: int, token_ids: np.ndarray | None = None, newest: int = NEWEST):
        self.engine = engine
        self.session = Session(engine)
        self.steps = 0
        self.weight_bytes = engine.bundle.weight_bytes
        self.arena_bytes = engine.arena.nbytes
        self.failure: str | None = None
        # Token i of the draft's text, from _joint on, is token _origin + i of the target's.
        self._origin = self._joint = 0
        self._partial = False  # whether parts of the text were left out that the cache has a use for
        # Guesses since the last reading. A right one saves a step of the target, in which the draft reads about half of `newest` tokens
        # on a CPU; three quarters of what they saved are kept.
        self._right = self._wrong = 0
        self._worth = max(newest // 8, 1)
        self._stale = 0  # guesses in the draft's own text that did not come true
        self._newest = newest
        self._anew = True  # whether any token of the text may be another one than last time
        self._guesses: list[int] = []  # the last draft, at place _guessed of the target's text
        self._guessed = 0
        self._token_ids = token_ids
        self._logits = None if token_ids is None and engine.vocab == vocab else np.full(vocab, -np.inf, np.float32)
        kept = max(layer["params"]["body_slots"] for layer in engine.bundle.layers) + engine.boundary
        self._reach = 2 * kept if engine.capacity is None else max(1, engine.capacity // 2)

    def prior(self, grade: int) -> float:
        return logits.prior(grade)

    def follow(self, tokens: array, anew: bool = False) -> None:
        self._anew = self._anew or anew
        wanted = min(len(tokens), self._reach)
        if self.failure or not (anew or self._partial) or not 0 < wanted <= self._right * self._worth:
            return
        if self._right <= _RIGHT_ENOUGH * self._wrong:
            if self._partial:
                self._restart(0)
            self._catch_up(np.frombuffer(tokens, np.int32), self._reach)
            self._right = self._wrong = 0

    def draft(self, tokens: array, pending: int, length: Length, sampler: Sampler) -> Draft:
        if self._guesses:
            self._earn(tokens, pending)
        size = len(tokens) + 1
        behind = size if self._anew else size - self._origin - len(self.session.tokens) + self._stale
        if self.failure or not length.wants_law(max(min(behind, self._newest) - _USUAL, 0)):
            return NOTHING
        first = self._catch_up(_Text(np.frombuffer(tokens, np.int32), pending), self._newest)
        if first is None:
            return NOTHING
        draft = logits.draw_tokens(first, self._step, length, sampler)
        if not draft.tokens and logits.grade(first) is None:
            self.failure = "its logits are not numbers"
        self._guesses, self._guessed = draft.tokens, size
        return draft

    def forget(self) -> None:
        """As if it had neither read nor drafted anything yet."""
        self._restart(0)
        self._right = self._wrong = self._stale = 0
        self._guesses, self._anew = [], True

    def close(self) -> None:
        self.engine.close()

    def _earn(self, tokens: array, pending: int) -> None:
        """Counts the guesses of the last draft that came true, and the first that did not."""
        guesses, self._guesses = self._guesses, []
        if self._anew:
            return
        right = 0
        for guess, token in zip(guesses, (*tokens[self._guessed :], pending)):
            if guess != token:
                self._wrong += 1
                break
            right += 1
        self._right += right
        self._stale = max(0, len(guesses) - 1 - right)

    def _catch_up(self, text: np.ndarray | _Text, reach: int) -> np.ndarray | None:
        """Feeds what the draft has not read yet, `reach` tokens at most; logits of the place behind it, None when the draft model fails."""
        try:
            missing = self._missing(text, reach, self._anew)
            self._anew, self._stale = False, 0
            self.steps += -(-missing.size // self.engine.chunk)
            return self._of_target(self.session.feed(missing))
        except EdgekvError as error:
            self.failure = str(error)
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
            self._partial = wanted < min(size, self._reach)
        elif wanted > reach:
            self._origin, self._joint = self._origin + wanted - reach, agreed
            wanted, self._partial = reach, self._partial or whole  # what it misses while it is idle stays a gap
        return text[size - wanted :]

    def _restart(self, origin: int) -> None:
        self.session.reset()
        self._origin, self._joint, self._partial = origin, 0, False

    def _step(self, token: int) -> np.ndarray | None:
        session = self.session
        if session.room < 2:  # a guess must not reach the boundary: what is compacted cannot be taken back
            return None
        try:
            rows = session.step([token], _FIRST_ROW)
        except EdgekvError as error:
            self.failure = str(error)
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
