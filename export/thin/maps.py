"""Maps: what keys of one layer get thinner with. KeyMaps: those that turn rotated queries and keys into fewer numbers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch


class Maps(Protocol):
    """What thin keys of one layer are made with, whatever their form."""

    form: str  # projected (or absorbed: the same maps, multiplied into the weights), pairs or latent
    interval: int  # a query's own boundary interval of so many tokens keeps whole keys; 0: all keys are mapped

    @property
    def rank(self) -> int: ...
    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        ...

    def at(self, start: int) -> Self:
        """The same for a text whose first key has the position `start`."""
        ...

    def parts(self) -> tuple[torch.Tensor, ...]:
        """What learns."""
        ...

    def with_parts(self, parts: Sequence[torch.Tensor]) -> Self: ...

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What is scored in place of rotated q [..., q_heads, T, head_dim] and k [..., kv_heads, T, head_dim]."""
        ...


@dataclass(frozen=True)
class KeyMaps:
    """Of one layer: query float32 [q_heads, head_dim, rank], key float32 [kv_heads, head_dim, rank].

    A score is scale * (q query) . (k key), which stands for q . k: the product query key^T has a rank of at most `rank` for every head,
    whatever the numbers are.
    """

    query: torch.Tensor
    key: torch.Tensor

    form = "projected"
    interval = 0  # every key is mapped, those of a cache's tail too

    @property
    def rank(self) -> int:
        return int(self.key.shape[2])

    @property
    def whole(self) -> bool:
        return self.rank == self.key.shape[1]

    def at(self, start: int) -> KeyMaps:
        return self  # they meet rotated numbers, wherever those stand

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key

    def with_parts(self, parts: Sequence[torch.Tensor]) -> KeyMaps:
        return KeyMaps(*parts)

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [..., q_heads, T, head_dim] and k [..., kv_heads, T, head_dim] with the last axis replaced by `rank` numbers."""
        return q @ self.query, k @ self.key
