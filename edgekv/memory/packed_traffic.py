"""Bytes that an attention step moves of a compressed body, by formula: the scan of the codes, second rankings, chosen records.

While rows attend to everything, each pass over the body unpacks every visible token once. Rows that retrieve scan the codes of
all they may see, rank `candidates` of them by their stored keys, and then read the records of the winners, or their values
alone where the retrieval hands scores over.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import groupby

from edgekv import layout

TILE = 128
PAIR = 4  # bytes of a zero point and a scale


class PackedBody:
    """One kv head of a compressed body with the given token positions (ascending), up to `tail_base`."""

    def __init__(self, params: Mapping, positions: Sequence[int], tail_base: int):
        self.params, self.positions = params, positions
        self.interval, self.intervals = params["tail_slots"], tail_base // params["tail_slots"]
        self.dim, self.group = params["key_dim"], params["q_heads"] // params["kv_heads"]
        magnitudes, values, key_pairs, value_pairs = layout.record_parts(params)
        self.key_bytes, self.value_bytes = magnitudes + key_pairs, values + value_pairs
        self.latent = layout.latent_bytes(params)  # of a latent key, without sign codes where it is rebuilt
        self.moved = dict.fromkeys(("read_body_keys", "read_body_values", "read_body_index", "read_body_meta"), 0)

    def _read(self, tokens: int, values: bool = True, means: int = 0) -> None:
        if not self.latent:
            self.moved["read_body_index"] += tokens * ((self.dim // 4 + 1) // 2)  # an odd code shares no byte with another token
        self.moved["read_body_keys"] += tokens * (self.latent or self.key_bytes)
        self.moved["read_body_values"] += tokens * self.value_bytes * values
        self.moved["read_body_meta"] += tokens * 4 + (0 if self.latent else means * 2 * self.dim)

    def _means_from(self, slot: int) -> int:
        """Mean keys of the intervals from that of a slot on."""
        return self.intervals - self.positions[slot] // self.interval

    def whole(self, low: int) -> None:
        """One pass over all slots from `low` on."""
        for at in range(0, len(self.positions), TILE):
            end = min(at + TILE, len(self.positions))
            if end > low:
                first = at + max(low - at, 0) // layout.LANES * layout.LANES
                loaded = sum(1 for _ in groupby(p // self.interval for p in self.positions[first:end]))
                self._read(end - first, means=loaded)

    def chosen(self, oldest: int, retrieve: int, candidates: int, passes: int, scored: bool) -> None:
        """One row: it sees tokens after position `oldest`; its query heads attend in `passes`. scored: the retrieval hands over the
        scores of the winners, and attention reads their values alone."""
        low = bisect_right(self.positions, oldest)
        visible = len(self.positions) - low
        wanted = min(retrieve, visible)
        candidates = wanted if self.latent else min(max(candidates, wanted), visible)
        scored = scored and not self.latent
        if not scored and not self.latent:
            self.moved["read_body_meta"] += self.group * self._means_from(0) * 2 * self.dim
        if wanted < visible:
            start = low // layout.INDEX_TOKENS * layout.INDEX_TOKENS
            scanned = -(-(len(self.positions) - start) // layout.INDEX_TOKENS) * layout.INDEX_TOKENS
            self.moved["read_body_index"] += scanned * self.dim // 8
            self.moved["read_body_meta"] += visible * 4 + 64 * self.dim + self._means_from(low) * 2 * self.dim
        if candidates > wanted or (scored and wanted):
            self._read(candidates, values=False, means=self.group * self._means_from(low))
        for _ in range(passes):
            if scored:
                self.moved["read_body_values"] += wanted * self.value_bytes
            else:
                self._read(wanted)
