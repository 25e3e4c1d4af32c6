"""A compressed cache whose records hold values alone: one quantised latent per token stands for the keys of all kv heads (docs/thin_keys.md).

Sign codes of the rotated keys choose, as in SelfIndexCache, and what they choose is rebuilt, rotated to its position and attended to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgekv.layout import LANES, read_keys
from edgekv.reference.latent import encode
from edgekv.reference.rotary import rotate
from edgekv.reference.self_index import latents
from edgekv.reference.self_index.cache import SelfIndexCache, as_pairs
from edgekv.reference.self_index.quantise import dequantise, unpack
from edgekv.reference.self_index.transform import hadamard


class LatentIndexCache(SelfIndexCache):
    """SelfIndexCache for parameters with `latent`. Codes alone decide: there are no stored keys to rank by again.

    encoder, decoder  as for edgekv.reference.latent.encode
    """

    def __init__(self, params: Mapping, inv_freq: Sequence[float], encoder: np.ndarray, decoder: np.ndarray, retrieve: int | None = None):
        super().__init__(params, retrieve)
        self.inv_freq = np.asarray(inv_freq, np.float32)
        self.encoder, self.decoder = np.asarray(encoder, np.float32), np.asarray(decoder, np.float32)
        self.levels = latents.levels_of(self.decoder)

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 [heads, n, key_dim] turned to positions int [n]."""
        return rotate(x, positions, self.inv_freq, self.params["rotary_dim"], bool(self.params["rotary_interleaved"]))

    def body(self) -> tuple[np.ndarray, np.ndarray]:
        p, (_, value, _, pairs) = self.params, self._record_parts()
        keys = latents.rebuild(self.state.body_z[: self.count], p["latent"], self.levels)
        values = hadamard(dequantise(unpack(value, p["value_bits"]), as_pairs(pairs), p["value_dim"]))
        return self.rotated(keys, self.state.body_pos[0, : self.count]), values

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """As SelfIndexCache.attend, of queries and keys that are not rotated yet."""
        first, where = position - self.tail_base, position + np.arange(len(q))
        turned = [self.rotated(x.transpose(1, 0, 2), where).transpose(1, 0, 2) for x in (q, k)]
        y = super().attend(*turned, v, position)
        for end in range(first // LANES * LANES + LANES, first + len(q) + 1, LANES):
            self._encode(end - LANES, end)
        return y

    def _encode(self, begin: int, end: int) -> None:
        """Makes the latents of sixteen tail slots, whose last one has come, from the keys in the tail."""
        keys = read_keys(self.state.tail_k, begin, end)
        plain = self.rotated(keys, -(self.tail_base + np.arange(begin, end)))
        self.state.tail_z[begin:end] = latents.pack(encode(plain.transpose(1, 0, 2), self.encoder, self.decoder))

    def compact(self, position: int) -> None:
        p, s = self.params, self.state
        dropped, count = min(max(p["sinks"] - self.tail_base, 0), p["tail_slots"]), self.count
        records = np.concatenate([s.body_z[:count], s.tail_z[dropped:]])
        where = np.concatenate([s.body_pos[0, :count], np.arange(self.tail_base + dropped, self.tail_base + p["tail_slots"])])
        super().compact(position)
        s.body_z[: self.count] = records[np.searchsorted(where, s.body_pos[0, : self.count])]  # all kv heads keep the same tokens

    def _key_parts(self, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        none = np.zeros((*spread.shape[:2], 0), np.uint8)
        return none, none

    def _retrieve(self, query: np.ndarray, scores: np.ndarray, seen: np.ndarray) -> None:
        part = slice(self.sink_count, self.sink_count + self.count)
        chosen = self.retrieved_slots(query, seen[:, part])
        seen[:, part] = False
        for head, slots in enumerate(chosen):
            seen[head, self.sink_count + slots] = True


