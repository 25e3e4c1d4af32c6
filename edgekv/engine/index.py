"""The runtime's own fields in the headers of compressed layers: how many tokens each row retrieves, and what was read."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgekv import layout
from edgekv.bundle import Bundle
from edgekv.engine import Reads
from edgekv.errors import UserError
from edgekv.retrieval import Retrieval, candidates_for, parse_retrieval


class Index:
    """Sets `retrieve` and `candidates` in every compressed layer's header, only when they change.

    states  uint8 [bytes] of every layer, at least the header, where they lie while the engine runs; or copies, which an engine
            with states elsewhere keeps up to date and sends there when something was set

    A percentage is of the tokens that are compressed at the moment, so it is resolved anew after every compaction.
    """

    def __init__(self, bundle: Bundle, states: Sequence[np.ndarray]):
        first = layout.HEADER.fields["retrieve"][1]
        compressed = [s for s, layer in zip(states, bundle.layers, strict=True) if layout.is_selfindex(layer["params"])]
        self._headers = [state[: layout.HEADER.itemsize].view(layout.HEADER) for state in compressed]
        self._fields = [state[first : first + 8].view(np.int32) for state in compressed]  # retrieve, candidates
        policy = bundle.manifest["policy"]
        self.amount: Retrieval | None = parse_retrieval(policy["retrieve"]) if compressed else None
        self.rerank: int | None = policy.get("rerank") if compressed else None
        self._limit: int | None = None
        self._said: tuple[str, int | None] | None = None  # what the headers say: ("all", None) or ("some", limit); None: unknown

    def retrieve(self, amount: Retrieval, rerank: int | None) -> None:
        if self.amount is None:
            raise UserError("This cache is not compressed, so every token is attended to; export with --cache selfindex to retrieve.")
        self.amount, self.rerank = amount, self.rerank if rerank is None else rerank
        self.grown()

    def grown(self) -> None:
        """The number of compressed tokens has changed, or the headers were written anew."""
        self._said = None

    def limit(self, tokens: int | None) -> None:
        """At most so many tokens per row, chosen by their codes alone; None: as many as usual."""
        self._limit = tokens

    def attend_to_all(self) -> bool:
        """The next step is of a prompt. Whether headers were written."""
        if self._said == ("all", None):
            return False
        for fields in self._fields:
            fields[:] = 0
        self._said = "all", None
        return True

    def choose(self) -> bool:
        """The next step retrieves. Whether headers were written."""
        if self._said == ("some", self._limit):
            return False
        for header, fields in zip(self._headers, self._fields, strict=True):
            count = int(header["body_count"][0])
            wanted = self.amount.resolve(count)
            if self._limit is not None and self._limit < (wanted or count):
                fields[:] = self._limit, 0
            else:
                fields[:] = wanted, candidates_for(wanted, self.rerank)
        self._said = "some", self._limit
        return True

    def reads(self) -> Reads:
        traffic = np.sum([header["traffic"][0] for header in self._headers], axis=0, dtype=np.uint64)
        index, keys, values, steps = (int(traffic[layout.TRAFFIC.index(name)]) for name in ("read_body_index", "read_body_keys", "read_body_values", "steps"))
        held = max(int(header["body_count"][0]) for header in self._headers)
        return Reads(steps // len(self._headers), index, keys + values, self.amount.resolve(held) or held, held)

    def close(self) -> None:
        self._headers, self._fields = [], []
