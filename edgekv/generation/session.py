"""One text over one engine: where it stands, what is committed, and when the cache is compacted.

The rules that make rollback free (docs/cache.md): a step writes to the tail only and commits nothing; `commit` advances the
position by as many tokens as were accepted; blocks end at boundaries, and compaction happens at boundaries only. So the
state depends on committed tokens alone, never on how they were fed.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from edgekv.engine import Engine
from edgekv.errors import CacheFullError

_NO_ROWS = np.zeros(0, np.int64)


class Session:
    """The committed text of an engine.

    tokens    committed token ids, array of int32 (4 bytes per token is all that grows with the text)
    position  their number

    After an exception from `step` or `feed` the committed text is what `tokens` says and the session can be used on.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self.tokens = array("i")
        self.tail_base = 0  # position of the last compaction
        self.compaction_seconds = 0.0
        self._block = _NO_ROWS  # tokens of the last step, not committed yet
        self._all_rows = np.arange(max(engine.chunk, engine.max_rows), dtype=np.int64)
        engine.reset()

    @property
    def position(self) -> int:
        return len(self.tokens)

    @property
    def room(self) -> int:
        """Most tokens the next step may take: up to the next boundary, a chunk, or what a full cache still holds."""
        room = min(self.engine.chunk, self.tail_base + self.engine.boundary - self.position)
        return room if self.engine.capacity is None else min(room, self.engine.capacity - self.position)

    def step(self, block: Sequence[int] | np.ndarray, rows: np.ndarray | None = None, prompt: bool = False) -> np.ndarray:
        """Runs tokens after the committed text without committing them; replaces an uncommitted block.

        block    T token ids, 1 <= T <= room
        rows     int64 [R] indices into the block whose logits are wanted; None: all of them
        prompt   the tokens are read, not generated: in a compressed cache their rows attend to everything
        returns  logits float32 [R, vocab], a view that the next step overwrites

        Raises CacheFullError when the cache is full, ValueError when the block is longer than `room`.
        """
        tokens = np.asarray(block, dtype=np.int64)
        room = self.room
        if room < 1:
            raise CacheFullError(f"the cache is full: it holds {self.engine.capacity} tokens and evicts none")
        if not 1 <= tokens.size <= room:
            raise ValueError(f"a block of {tokens.size} tokens does not fit the {room} left before the boundary")
        self._block = _NO_ROWS
        run = self._read if prompt else self.engine.step
        logits = run(tokens, self.position, self._all_rows[: tokens.size] if rows is None else rows)
        self._block = tokens.copy()  # the caller may reuse its array
        return logits

    def _read(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        """A step of a prompt."""
        return (self.engine.step if self.engine.retrieval is None else self.engine.read)(tokens, position, rows)

    def commit(self, count: int) -> None:
        """Makes the first `count` tokens of the last step part of the text, and compacts when that reaches a boundary.

        The rest of the block is forgotten; commit(0) rejects it all.
        """
        if not 0 <= count <= self._block.size:
            raise ValueError(f"the last step had {self._block.size} tokens, {count} cannot be committed")
        self.tokens.extend(self._block[:count].tolist())
        self._block = _NO_ROWS
        position = self.position
        if position == self.tail_base + self.engine.boundary and position != self.engine.capacity:
            start = time.perf_counter()
            self.engine.compact(position)
            self.tail_base = position
            self.compaction_seconds += time.perf_counter() - start

    def feed(
        self,
        tokens: Sequence[int] | np.ndarray,
        stop: Callable[[], bool] | None = None,
        progress: Callable[[int, int], None] | None = None,
        foresee: bool = False,
    ) -> np.ndarray | None:
        """Commits tokens in blocks of at most a chunk; returns logits float32 [vocab] of the last one, a view.

        stop      asked between blocks; when it says so, feeding ends and None is returned
        progress  told the number of tokens fed so far, and of all of them, after each block
        foresee   these tokens are a whole prompt: a cache that ranks tokens by the attention they receive keeps, at every boundary
                  inside it at which some must go, what the end of the prompt and the answer that would follow attend to, so that the
                  question decides what is remembered of the text before it. The state then depends on where the prompt ended,
                  still not on the blocks
        """
        tokens = np.asarray(tokens, dtype=np.int64)
        if tokens.size == 0:
            raise ValueError("there are no tokens to feed")
        logits, fed, foreseen = None, 0, False
        while fed < tokens.size:
            if stop is not None and not foreseen and stop():
                return None
            until = self._until_foresight(tokens.size, fed) if foresee else None
            if until == 0:
                self._look_ahead(tokens)
                foreseen = True
            block = tokens[fed : fed + max(1, min(self.room, until or self.room))]
            logits = self.step(block, self._all_rows[block.size - 1 : block.size], prompt=True)
            self.commit(block.size)
            fed += block.size
            foreseen = foreseen and self.position != self.tail_base
            if progress is not None:
                progress(fed, tokens.size)
        return logits[0]

    def _look_ahead(self, prompt: np.ndarray) -> None:
        """Lets the end of the prompt, and the answer that it would get now, choose at the coming boundary what is kept.

        The first half of the last `observe` slots of the tail takes the newest tokens of the prompt, the other half what greedy decoding
        says after them; nothing is committed. Observing the end of a prompt is SnapKV's (arXiv 2404.14469, section 4), letting a guessed
        answer observe as well Lookahead Q-Cache's (arXiv 2505.20334): small models look for what they were asked only while they answer.
        """
        end, place = prompt[-(self.engine.observe - self.engine.observe // 2) :], self.position
        while place < self.tail_base + self.engine.boundary:
            block = end[: self.engine.chunk]
            logits = self._read(block, place, self._all_rows[block.size - 1 : block.size])
            place += block.size
            end = end[block.size :] if end.size > block.size else logits[0].argmax(keepdims=True)
        self.engine.hold_queries()

    def _until_foresight(self, size: int, fed: int) -> int | None:
        """Tokens before the end of the prompt is to be looked at, None when not in this interval.

        That is for intervals that end inside the prompt (of `size` tokens, `fed` of them committed) by dropping tokens.
        """
        observe, boundary = self.engine.observe, self.tail_base + self.engine.boundary
        if not 0 < observe <= size or size - fed <= boundary - self.position:
            return None
        first = self.engine.bundle.first_eviction
        until = boundary - observe - self.position
        return until if first is not None and first <= boundary and until >= 0 else None

    def rewind(self, position: int) -> bool:
        """Takes back committed tokens from `position` on when they are all in the tail still; says whether it could."""
        if not self.tail_base <= position <= self.position:
            return False
        del self.tokens[position:]
        self._block = _NO_ROWS
        return True

    def reset(self) -> None:
        """Starts an empty text in the same memory."""
        self.engine.reset()
        del self.tokens[:]
        self.tail_base = 0
        self._block = _NO_ROWS
