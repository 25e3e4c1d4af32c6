"""Latent thin keys: one layer's cache whose body keeps a few numbers for the keys of all kv heads of a token (docs/thin_keys.md).

The numbers are made before the rotation, of what a layer gives, and turned back into keys, rotated to their positions, where they are read.
The tail holds both: whole rotated keys, which a step attends to, and what the body will hold of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from edgekv.errors import UserError
from edgekv.layout import read_keys, write_keys
from edgekv.reference.cache import ReferenceCache
from edgekv.reference.projection import project
from edgekv.reference.rotary import rotate
from edgekv.reference.scores import key_ranking


def encode(keys: np.ndarray, encoder: np.ndarray, decoder: np.ndarray) -> np.ndarray:
    """float32 [T, latent] of keys before their rotation, float32 [T, kv_heads, key_dim]; encoder [kv_heads key_dim, latent] and decoder
    [kv_heads, latent + 1, key_dim], the last row of a head its mean key."""
    centred = keys.astype(np.float32) - decoder[None, :, -1]
    return project(centred.reshape(len(keys), 1, -1), encoder[None])[:, 0]


def rebuild(latent: np.ndarray, decoder: np.ndarray) -> np.ndarray:
    """Keys without rotation, float32 [kv_heads, n, key_dim], of latent float32 [n, latent]."""
    return latent @ decoder[:, :-1] + decoder[:, -1:]


class LatentCache(ReferenceCache):
    """ReferenceCache for parameters with `latent`.

    encoder, decoder  as for encode()
    """

    def __init__(self, params: Mapping, inv_freq: Sequence[float], encoder: np.ndarray, decoder: np.ndarray, block: np.ndarray | None = None):
        super().__init__(params, inv_freq, block)
        p = self.params
        self.encoder, self.decoder = np.asarray(encoder, np.float32), np.asarray(decoder, np.float32)
        shapes = (p["kv_heads"] * p["key_dim"], p["latent"]), (p["kv_heads"], p["latent"] + 1, p["key_dim"])
        if not p["latent"] or (self.encoder.shape, self.decoder.shape) != shapes:
            raise UserError(f"a cache of {p['latent']} latent numbers takes maps of the shapes {shapes}, not {self.encoder.shape} and {self.decoder.shape}.")
        if self.inv_freq.size != p["rotary_dim"] // 2:
            raise UserError("latent keys need inv_freq with rotary_dim/2 numbers.")

    def rotated(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """float32 [heads, n, key_dim] turned to positions int [n]."""
        return rotate(x, positions, self.inv_freq, self.params["rotary_dim"], bool(self.params["rotary_interleaved"]))

    def body_keys(self) -> np.ndarray:
        latent = read_keys(self.state.body_z[None], 0, self.count)[0]
        return self.rotated(rebuild(latent, self.decoder), self.state.body_pos[0, : self.count])

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """As ReferenceCache.attend, of queries and keys that are not rotated yet."""
        first, where = self.tail_rows(position), position + np.arange(len(q))
        turned = [self.rotated(x.transpose(1, 0, 2), where).transpose(1, 0, 2) for x in (q, k)]
        y = super().attend(*turned, v, position)
        write_keys(self.state.tail_z[None], first, encode(k, self.encoder, self.decoder)[None])
        return y

    def rank_by_keys(self, rows: int) -> np.ndarray:
        """Tokens are kept for all kv heads together, so what is compared is what stands for the keys of all."""
        planes = (self.state.body_z, self.count), (self.state.tail_z, rows)
        ranking = key_ranking(np.concatenate([read_keys(plane[None], 0, n) for plane, n in planes], axis=1))
        return np.broadcast_to(ranking, (self.params["kv_heads"], ranking.shape[1]))

    def move_keys(self, kept: np.ndarray, rows: int, rank_base: int) -> None:
        planes = (self.state.body_z, self.count), (self.state.tail_z, rows)
        latent = np.concatenate([read_keys(plane[None], 0, n) for plane, n in planes], axis=1)
        write_keys(self.state.body_z[None], 0, latent[:, kept[0]])
