"""Speculative decoding: a drafter proposes, one step of the target verifies, and only the position moves.

One round: the drafter proposes up to gamma tokens behind the pending one; the target computes the pending token and all proposals
as one block in the tail of its cache, with logits for every row; the acceptance rule says how many stand and which token follows
them. Committing means advancing the position over what stands. Rejected rows lie beyond the position and are overwritten.

A block never crosses a boundary of the target's cache, so compaction sees committed tokens only. A round is committed when all of
its tokens have been taken: an answer that ends in the middle of one leaves the same cache behind as plain decoding.

The text has exactly the law of the target alone under its own cache policy; greedy decoding gives the same tokens. (The
arithmetic of a step may round differently for blocks of different sizes, as with any batching; see docs/speculation.md.)
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from edgekv.generation.drafters import Drafter, Length
from edgekv.generation.sampling import Sampler
from edgekv.generation.session import Session
from edgekv.generation.speculation_rule import AcceptanceRule, Verdict


class LengthControl(Length, Protocol):
    """A `Length` for one round after another, and for plain steps between them."""

    def rest(self) -> int:
        """Plain steps that can be made before a round is worth starting."""
        ...

    def rested(self, seconds: Sequence[float]) -> None:
        """They were made, or some of them: seconds of each."""
        ...

    def start(self, room: int) -> None:
        """Begins a round with at most `room` drafted tokens."""
        ...

    def finish(self, grades: Sequence[int], accepted: int, seconds: float) -> None:
        """Ends it: grades of what was drafted, how many of these tokens were accepted, seconds of the whole round."""
        ...


@dataclass
class Tally:
    """What speculation did, summed over rounds; seconds exclude the consumer's time.

    steps            steps of the target after the prompt
    emitted          tokens that were taken from them: of the last step perhaps not all
    draft_steps      steps of the drafter's model meanwhile
    tried            drafted tokens that were judged: all up to the first rejected one of each draft
    lengths          rounds by number of drafted tokens; 0 is a plain step
    reading_seconds  of the drafter with the text, beside the drafts
    """

    steps: int = 0
    draft_steps: int = 0
    emitted: int = 0
    drafted: int = 0
    accepted: int = 0
    tried: int = 0
    lengths: Counter = field(default_factory=Counter)
    reading_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    sampling_seconds: float = 0.0


class Speculation:
    """A decoder (edgekv.generation.decoders) that speculates.

    vocab  logits per row of the target
    The engine of the session must give logits for the longest draft + 1 rows (`max_rows`).
    """

    def __init__(self, drafter: Drafter, length: LengthControl, vocab: int):
        self.drafter, self.length = drafter, length
        self.tally = Tally()
        self._rule = AcceptanceRule(vocab)

    def __call__(self, session: Session, sampler: Sampler, logits: np.ndarray, most: int | None = None) -> Iterator[int]:
        """Lets the drafter see the prompt, then yields tokens; `logits` float32 [vocab] belong to the last committed token."""
        first = sampler.sample(logits)  # before the drafter runs: `self` may share the buffer of the logits
        self._follow(session, anew=True)
        return self._rounds(session, sampler, first, math.inf if most is None else most - 1)

    def _follow(self, session: Session, anew: bool = False) -> None:
        start, steps = time.perf_counter(), self.drafter.steps
        self.drafter.follow(session.tokens, anew)
        self.tally.reading_seconds += time.perf_counter() - start
        self.tally.draft_steps += self.drafter.steps - steps

    def _rounds(self, session: Session, sampler: Sampler, token: int, most: float) -> Iterator[int]:
        yield token
        while session.room >= 1:
            if rest := self.length.rest():
                token, steps = yield from self._rest(session, sampler, token, rest)
                most -= steps
                continue
            self._follow(session)
            block, accepted, token = self._round(session, sampler, token, most)
            most -= accepted + 1
            taken = 0
            try:
                for emitted in (*block[1 : accepted + 1], token):
                    taken += 1  # so many tokens of the block lie before the emitted one
                    sampler.observe((emitted,))
                    yield emitted
            finally:  # also where the consumer wants no more
                self.tally.emitted += taken
                session.commit(taken)

    def _rest(self, session: Session, sampler: Sampler, token: int, most: int) -> Generator[int, None, tuple[int, int]]:
        """Yields up to `most` tokens of plain steps, with as little between them as plain decoding has; returns the last one and how many."""
        tally, clock, seconds = self.tally, time.perf_counter, []
        block = np.empty(1, np.int64)
        try:
            while len(seconds) < most and session.room >= 1:
                begun = clock()
                block[0] = token
                rows = session.step(block)
                verified = clock()
                token = sampler.sample(rows[0])
                judged = clock()
                seconds.append(judged - begun)
                tally.verify_seconds += verified - begun
                tally.sampling_seconds += judged - verified
                session.commit(1)  # the token before, which was taken
                yield token
        finally:
            tally.steps += len(seconds)
            tally.emitted += len(seconds)
            tally.lengths[0] += len(seconds)
            self.length.rested(seconds)
        return token, len(seconds)

    def _round(self, session: Session, sampler: Sampler, pending: int, most: float) -> tuple[list[int], int, int]:
        """Drafts and verifies, for at most `most` tokens; returns the block, how many of its drafted tokens stand, and the token behind them."""
        tally, clock = self.tally, time.perf_counter
        begun, steps = clock(), self.drafter.steps
        self.length.start(int(min(session.room, session.engine.max_rows, max(most, 1))) - 1)
        draft = self.drafter.draft(session.tokens, pending, self.length, sampler)
        drafted = clock()
        block = [pending, *draft.tokens]
        rows = session.step(block)
        verified = clock()
        if draft.tokens:
            verdict = self._rule.verify(
                draft.tokens, draft.laws, lambda row: sampler.candidates(rows[row], block[1 : row + 1]), sampler
            )
        else:  # what the rule does with no tokens, in less time
            verdict = Verdict(0, sampler.sample(rows[0]))
        judged = clock()
        self.length.finish(draft.grades, verdict.accepted, judged - begun)
        count = len(draft.tokens)
        tally.steps += 1
        tally.draft_steps += self.drafter.steps - steps
        tally.drafted += count
        tally.accepted += verdict.accepted
        tally.tried += min(verdict.accepted + 1, count)
        tally.lengths[count] += 1
        tally.draft_seconds += drafted - begun
        tally.verify_seconds += verified - drafted
        tally.sampling_seconds += judged - verified
        return block, verdict.accepted, verdict.token
