"""What one decoder layer stores per token and how it scores: LayerGeometry."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edgekv.errors import UserError
from edgekv.fields import check_count, is_number, known_fields


@dataclass(frozen=True)
class LayerGeometry:
    """Head counts, numbers per key and value, score formula and rotation of one decoder layer.

    A score is scale * (q . k), then softcap * tanh(score / softcap) unless softcap is 0. A query sees keys with
    0 <= query_pos - key_pos (< sliding_window unless that is 0). The first rotary_dim numbers of a head are rotated in pairs
    (i, i + rotary_dim/2), or (2i, 2i + 1) when interleaved; inv_freq holds rotary_dim/2 angles in radians per position
    (attention scaling of long-context variants is part of the model's graph, not of inv_freq). head_dim is for thin keys: a head has
    that many numbers, which are rotated, and key_dim numbers made of them are stored; 0: they are stored as they are. latent is for
    thin keys as well: so many numbers are stored for the keys of all kv heads of a token together; 0: keys are stored one by one.
    """

    q_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    scale: float
    softcap: float = 0.0
    sliding_window: int = 0
    rotary_dim: int = 0
    rotary_interleaved: bool = False
    inv_freq: tuple[float, ...] = ()
    head_dim: int = 0
    latent: int = 0

    def __post_init__(self):
        for name in ("q_heads", "kv_heads", "key_dim", "value_dim"):
            check_count(f"{name} of a layer", getattr(self, name), least=1)
        for name in ("sliding_window", "rotary_dim", "head_dim", "latent"):
            check_count(f"{name} of a layer", getattr(self, name))
        if self.q_heads % self.kv_heads:
            raise UserError(f"{self.q_heads} query heads cannot share {self.kv_heads} key/value heads evenly.")
        if self.head_dim and self.head_dim < self.key_dim:
            raise UserError(f"head_dim must be 0 or at least key_dim ({self.key_dim}), not {self.head_dim}.")
        if self.latent and (self.head_dim or self.latent > self.kv_heads * self.key_dim):
            raise UserError(f"latent must be 0 or at most {self.kv_heads * self.key_dim}, the numbers of all keys of a token, and without head_dim.")
        if self.rotary_dim % 2 or self.rotary_dim > self.given_dim:
            raise UserError(f"rotary_dim must be even and at most the size of a head ({self.given_dim}), not {self.rotary_dim}.")
        if not isinstance(self.rotary_interleaved, bool):
            raise UserError("rotary_interleaved of a layer must be true or false.")
        if not isinstance(self.inv_freq, (list, tuple)):
            raise UserError("inv_freq of a layer must be a list of numbers.")
        if not all(is_number(f) for f in (self.scale, self.softcap, *self.inv_freq)) or self.softcap < 0:
            raise UserError("scale, softcap and inv_freq of a layer must be finite numbers, softcap not negative.")
        if len(self.inv_freq) not in (0, self.rotary_dim // 2):
            raise UserError(f"inv_freq must hold rotary_dim/2 = {self.rotary_dim // 2} numbers, not {len(self.inv_freq)}.")
        object.__setattr__(self, "inv_freq", tuple(float(f) for f in self.inv_freq))

    @property
    def given_dim(self) -> int:
        """Numbers per key and query head as the model makes them."""
        return self.head_dim or self.key_dim

    def token_bytes(self, element_bytes: int) -> int:
        """Bytes of one token's key and value over all kv heads; kv heads, not query heads, are what is stored."""
        return element_bytes * (self.key_numbers + self.kv_heads * self.value_dim)

    @property
    def key_numbers(self) -> int:
        """Numbers stored for the keys of one token, of all kv heads."""
        return self.latent or self.kv_heads * self.key_dim

    def to_json(self) -> dict:
        return dataclasses.asdict(self) | {"inv_freq": list(self.inv_freq)}

    @classmethod
    def from_json(cls, obj: object) -> LayerGeometry:
        """Inverse of to_json on untrusted input; UserError names what is wrong."""
        return cls(**known_fields(cls, obj, "layer geometry"))
