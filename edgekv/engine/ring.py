"""Where tokens lie when TensorRT keeps the cache itself, without our plugin: one ring of slots, and a mask made on the host.

The plugin compacts at boundaries. Without it nothing is moved: a token stays in the slot it was written to, and what the keep rule
drops is masked until its slot is written again. That gives the same attention, for the policies that need no scores (`full`, and
`window` with positions of the text), at the cost of up to two boundary intervals of slots.

Slots come in blocks of one boundary interval E, so that no step ever wraps. With sinks, block 0 belongs to the first E tokens for good;
the other blocks are used in turn. Interval i (tokens iE..iE+E-1) lies in block i, or for i >= 1 in block 1 + (i - 1) mod ring.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv import layout
from edgekv.errors import UserError


class Ring:
    """The slots of one layer, from its parameters (fields of attributes.def). UserError for a policy that needs the plugin."""

    def __init__(self, params: Mapping):
        p = layout.complete(params)
        if layout.is_selfindex(p) or p["head_dim"] or p["latent"] or p["fused_rotary"] == layout.BY_HEAD:
            raise UserError("Compressed caches and thin keys cannot be built without edgekv's plugin; export with --cache dense and without --key-rank.")
        if p["keep"] == layout.KEEPS["heavy"]:
            raise UserError("Heavy hitters need edgekv's plugin; without it only the policies full and window can be built.")
        if p["positions"] != layout.POSITIONS["original"]:
            raise UserError("Positions of the cache need edgekv's plugin; without it export with --positions original.")
        self.interval, self.window = p["tail_slots"], p["sliding_window"]
        self.sinks = p["sinks"] if p["keep"] == layout.KEEPS["window"] else 0
        if self.sinks > self.interval:
            raise UserError(f"Without edgekv's plugin at most {self.interval} sinks can be kept, not {self.sinks}.")
        self.full = p["keep"] == layout.KEEPS["full"]
        self.recent = p["body_slots"] - self.sinks  # newest committed tokens that stay, beside the sinks
        self.fixed = 1 if self.sinks else 0
        self.ring = -(-self.recent // self.interval) + 1
        self.slots = (self.fixed + self.ring) * self.interval

    def key(self) -> tuple[int, ...]:
        """Layers with equal keys share a mask."""
        return self.interval, self.window, self.sinks, self.recent

    def slot(self, position: int) -> int:
        """Where the token at `position` is written; the tokens of its interval follow it in order."""
        interval, place = divmod(position, self.interval)
        block = interval if interval < self.fixed else self.fixed + (interval - self.fixed) % self.ring
        return block * self.interval + place

    def positions(self, position: int) -> np.ndarray:
        """Place in the text of what each slot holds, or will hold, in the interval of `position`: int64 [slots], -1 for nothing yet."""
        now = position // self.interval
        blocks = np.arange(self.fixed + self.ring)
        turn = blocks - self.fixed
        held = np.where(blocks < self.fixed, blocks, self.fixed + turn + (now - self.fixed - turn) // self.ring * self.ring)
        held = np.where((blocks >= self.fixed) & (now < blocks), -1, held)
        where = held[:, None] * self.interval + np.arange(self.interval)
        return np.where(held[:, None] < 0, -1, where).reshape(-1)

    def kept(self, base: int) -> np.ndarray:
        """Places in the text of what a cache compacted at `base` holds, in their order: int64 [kept]."""
        if self.full or base <= self.sinks + self.recent:
            return np.arange(base)
        return np.concatenate([np.arange(self.sinks), np.arange(base - self.recent, base)])

    def mask(self, position: int, rows: int, base: int | None = None, hidden: tuple[int, int] = (0, 0)) -> np.ndarray:
        """What rows at position.. may see: bool [rows, slots]. Equals the plugin's rule: kept or in the tail, not in the future, inside
        the model's own window.

        base    the last boundary that was compacted at; None: that before `position`
        hidden  a range of `kept(base)` that is left out
        """
        where, base = self.positions(position), position // self.interval * self.interval if base is None else base
        query = position + np.arange(rows)[:, None]
        seen = (where >= 0) & (where <= query)
        if not self.full:
            seen &= (where < self.sinks) | (where >= base - self.recent)
        if self.window:
            seen &= query - where < self.window
        if hidden[1] > hidden[0]:
            seen &= ~np.isin(where, self.kept(base)[slice(*hidden)])
        return seen
