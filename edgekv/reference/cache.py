"""One layer's cache: append to the tail and attend; compact the tail into the body at boundaries."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from edgekv import layout
from edgekv.errors import UserError
from edgekv.layout import StateView, read_keys, write_keys
from edgekv.reference.attention import softmax_row, visible
from edgekv.reference.keep import RULES
from edgekv.reference.rotary import rotate
from edgekv.reference.scores import key_ranking, observe, ranking


class ReferenceCache:
    """The cache of one decoder layer over one state block.

    params    fields of attributes.def
    inv_freq  [rotary_dim/2] radians per position; needed for positions = cache only
    block     uint8 [state_bytes(params)] to work on; an empty cache of its own when left out
    """

    def __init__(self, params: Mapping, inv_freq: Sequence[float] = (), block: np.ndarray | None = None):
        self.state = layout.new_state(params) if block is None else StateView(params, block)
        self.params = self.state.params
        self.inv_freq = np.asarray(inv_freq, np.float32)
        if self.params["positions"] == layout.POSITIONS["cache"] and self.inv_freq.size != self.params["rotary_dim"] // 2:
            raise UserError("positions = cache needs inv_freq with rotary_dim/2 numbers.")

    # ---- reading the state

    @property
    def count(self) -> int:
        """Filled body slots per kv head."""
        return int(self.state.header["body_count"])

    @property
    def tail_base(self) -> int:
        """Position in the text of tail slot 0."""
        return int(self.state.header["tail_base"])

    def tail_rows(self, position: int) -> int:
        """Committed tail rows when `position` tokens are committed."""
        self._check_header()
        rows = position - self.tail_base
        if not 0 <= rows <= self.params["tail_slots"]:
            raise UserError(f"position {position} does not lie in the boundary interval that starts at {self.tail_base}.")
        return rows

    def keys(self, tail_rows: int) -> np.ndarray:
        """Keys of the body and the first tail_rows of the tail, in slot order: float32 [kv_heads, n, key_dim]."""
        return np.concatenate([self.body_keys(), read_keys(self.state.tail_k, 0, tail_rows)], axis=1)

    def body_keys(self) -> np.ndarray:
        """Keys of the body in slot order: float32 [kv_heads, count, key_dim]."""
        return read_keys(self.state.body_k, 0, self.count)

    def values(self, tail_rows: int) -> np.ndarray:
        """As keys(): float32 [kv_heads, n, value_dim]."""
        parts = [self.state.body_v[:, : self.count], self.state.tail_v[:, :tail_rows]]
        return np.concatenate(parts, axis=1).astype(np.float32)

    def positions(self, tail_rows: int) -> np.ndarray:
        """As keys(), the places in the text: int64 [kv_heads, n], ascending."""
        tail = np.broadcast_to(self.tail_base + np.arange(tail_rows), (self.params["kv_heads"], tail_rows))
        return np.concatenate([self.state.body_pos[:, : self.count], tail], axis=1).astype(np.int64)

    # ---- the two operations

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """Append T rows after `position` committed tokens and attend: y float32 [T, q_heads, value_dim].

        q float32 [T, q_heads, key_dim], k [T, kv_heads, key_dim], v [T, kv_heads, value_dim], all rotated already. Each row is
        computed on its own over body and tail slots in order, so it does not depend on the rows beside it. Changes nothing but
        tail slots from the committed length on.
        """
        p, state = self.params, self.state
        rows, first = len(q), self.tail_rows(position)
        shapes = ((rows, p["q_heads"], p["key_dim"]), (rows, p["kv_heads"], p["key_dim"]), (rows, p["kv_heads"], p["value_dim"]))
        if rows < 1 or (q.shape, k.shape, v.shape) != shapes:
            raise UserError(f"q, k and v must have the shapes {shapes} with at least one row, not {q.shape}, {k.shape}, {v.shape}.")
        if first + rows > p["tail_slots"]:
            raise UserError(f"{rows} rows after {first} do not fit a tail of {p['tail_slots']} slots: blocks end at boundaries.")
        write_keys(state.tail_k, first, k.transpose(1, 0, 2))
        state.tail_v[:, first : first + rows] = v.transpose(1, 0, 2)
        self._store_queries(q, first)

        keys, values, where = (read(first + rows) for read in (self.keys, self.values, self.positions))
        y = np.empty((rows, p["q_heads"], p["value_dim"]), np.float32)
        for row in range(rows):
            n = self.count + first + row + 1
            query = q[row].astype(np.float32).reshape(p["kv_heads"], -1, p["key_dim"])
            seen = visible(where[:, :n], position + row, p["sliding_window"])
            seen[:, int(state.header["hidden_from"]) : int(state.header["hidden_to"])] = False
            weights = softmax_row(query, keys[:, :n], seen, p["scale"], p["softcap"])
            y[row] = np.matmul(weights, values[:, :n]).reshape(p["q_heads"], p["value_dim"])
        return y

    def compact(self, position: int, rank_base: int | None = None) -> None:
        """Move the whole tail into the body by the keep rule; `position` is the boundary just reached.

        rank_base is the rotary position that the next token gets: the boundary itself with positions = original (the default),
        min(position, largest body of any layer) with positions = cache.
        """
        p, state = self.params, self.state
        rank_base = position if rank_base is None else rank_base
        rows = self.tail_rows(position)
        if rows != p["tail_slots"]:
            raise UserError(f"compaction is for boundaries: position {position} is {rows} tokens after the last one.")
        values, where = self.values(rows), self.positions(rows)
        score, pairs = self._scores(rows, where)
        by_keys = layout.ranks_by_keys(p)
        kept = self._choose(self.rank_by_keys(rows) if by_keys else ranking(score, pairs, bool(p["score_normalise"])))
        count = kept.shape[1]

        cache_positions = p["positions"] == layout.POSITIONS["cache"]
        if rank_base < count or (not cache_positions and rank_base != position):
            raise UserError(f"rank_base {rank_base} is not possible at position {position} with {count} kept tokens.")
        self.move_keys(kept, rows, rank_base)
        for head, slots in enumerate(kept):
            state.body_v[head, :count] = values[head, slots]
            state.body_pos[head, :count] = where[head, slots]
            if layout.keeps_scores(p):
                state.body_score[head, :count] = score[head, slots]
                state.body_seen[head, :count] = pairs[head, slots]
        state.header["evicted"] += where.shape[1] - count
        state.header["body_count"] = count
        state.header["tail_base"] = position
        state.header["rank_base"] = rank_base

    def rank_by_keys(self, rows: int) -> np.ndarray:
        """What every candidate, of body and tail, ranks by when keys decide: float32 [kv_heads, n]."""
        return key_ranking(self.keys(rows))

    def move_keys(self, kept: np.ndarray, rows: int, rank_base: int) -> None:
        """Writes the keys of the kept candidates, int [kv_heads, count], to the body's first slots, turned to their ranks below rank_base."""
        p, keys, ranks, count = self.params, self.keys(rows), self._ranks(rows), kept.shape[1]
        new_ranks = rank_base - count + np.arange(count)
        for head, slots in enumerate(kept):
            head_keys = keys[head, slots]
            if p["positions"] == layout.POSITIONS["cache"]:
                turn = new_ranks - ranks[slots]
                turned = rotate(head_keys, turn, self.inv_freq, p["rotary_dim"], bool(p["rotary_interleaved"]))
                head_keys = np.where(turn[:, None] != 0, turned, head_keys)
            write_keys(self.state.body_k[head : head + 1], 0, head_keys[None])

    def committed_hash(self, position: int) -> int:
        """A number that changes when any committed byte changes: header (without traffic counters), filled body slots, committed
        tail rows and their observed queries. Comparable between reference states only."""
        rows = self.tail_rows(position)
        p, state, count = self.params, self.state, self.count
        digest = hashlib.blake2b(digest_size=8)
        digest.update(state.block[: layout.COMMITTED_HEADER_BYTES].tobytes())
        queries = max(rows - (p["tail_slots"] - p["observe"]), 0)
        for plane in (
            state.body_pos,
            state.body_score[:, :count],
            state.body_seen[:, :count],
            self.keys(rows),
            self.values(rows),
            state.tail_q[:, :queries],
        ):
            digest.update(np.ascontiguousarray(plane).tobytes())
        return int.from_bytes(digest.digest(), "little")

    # ---- parts

    def _check_header(self) -> None:
        header = self.state.header
        if header["magic"] != layout.STATE_MAGIC or header["layout_version"] != layout.LAYOUT_VERSION:
            raise UserError("this block of bytes is not a cache state of this version.")
        if header["params_hash"] != layout.params_hash(self.params):
            raise UserError("this cache state was made with other parameters.")
        if not 0 <= header["body_count"] <= self.params["body_slots"]:
            raise UserError("this cache state is damaged: more filled slots than the body has.")

    def _store_queries(self, q: np.ndarray, first: int) -> None:
        """Keep the queries of the last `observe` tail slots for compaction to score tokens with."""
        if not layout.keeps_scores(self.params):
            return
        start = self.params["tail_slots"] - self.params["observe"]
        for row in range(len(q)):
            if first + row >= start:
                self.state.tail_q[:, first + row - start] = q[row]

    def _scores(self, rows: int, where: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Scores and observing pairs of every candidate after this interval's queries: float32 [kv_heads, n] each."""
        p, state, count = self.params, self.state, self.count
        score = np.zeros(where.shape, np.float32)
        pairs = np.zeros(where.shape, np.float32)
        if not layout.keeps_scores(p):
            return score, pairs
        decay = np.float32(p["score_decay"])
        score[:, :count] = state.body_score[:, :count] * decay
        pairs[:, :count] = state.body_seen[:, :count] * decay
        query_pos = self.tail_base + rows - p["observe"] + np.arange(p["observe"])
        added = observe(
            state.tail_q.astype(np.float32), query_pos, self.keys(rows), where, p["scale"], p["softcap"], p["sliding_window"]
        )
        return score + added[0], pairs + added[1]

    def _choose(self, rank: np.ndarray) -> np.ndarray:
        heads, n = rank.shape
        if n <= self.params["body_slots"]:
            return np.broadcast_to(np.arange(n), (heads, n))
        return RULES[self.params["keep"]](self.params, rank)

    def _ranks(self, rows: int) -> np.ndarray:
        """Rotary position that each body slot and tail row carries now: int64 [count + rows]."""
        base = int(self.state.header["rank_base"])
        return base + np.arange(-self.count, rows)
