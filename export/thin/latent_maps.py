"""LatentMaps: what makes a few numbers of the keys of all kv heads of a token, before their rotation, and keys of those again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from edgekv.export.thin.rotation import rotated
from edgekv.geometry import LayerGeometry


@dataclass(frozen=True)
class LatentMaps:
    """Of one layer: encoder float32 [kv_heads * head_dim, rank], decoder [rank, kv_heads * head_dim], mean [kv_heads * head_dim].

    A key is stored as (keys of all kv heads - mean) encoder and read as that times decoder + mean, rotated. geometry: how; None in maps
    that were read from a file and have not met their model yet (map_file.fitted). start: position that the first key of a text has.
    interval: keys of the boundary interval that a query is in are not mapped (a cache's tail); 0: all are.
    """

    encoder: torch.Tensor
    decoder: torch.Tensor
    mean: torch.Tensor
    geometry: LayerGeometry | None
    start: int = 0
    interval: int = 0

    form = "latent"

    @property
    def rank(self) -> int:
        return int(self.encoder.shape[1])

    @property
    def whole(self) -> bool:
        return self.rank == self.encoder.shape[0]

    def at(self, start: int) -> LatentMaps:
        return dataclasses.replace(self, start=start)

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.encoder, self.decoder  # the mean stays: steps relative to its size would be far too long for what it can gain

    def with_parts(self, parts: Sequence[torch.Tensor]) -> LatentMaps:
        encoder, decoder = parts
        return dataclasses.replace(self, encoder=encoder, decoder=decoder)

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q as it is, and what is read in place of k [..., kv_heads, T, head_dim], which is rotated."""
        plain = joint(rotated(k, self.geometry, self.start, back=True))
        mean = self.mean.to(k.device)
        rebuilt = (plain - mean) @ self.encoder @ self.decoder + mean
        apart = rebuilt.unflatten(-1, (k.shape[-3], k.shape[-1])).transpose(-2, -3)
        return q, rotated(apart, self.geometry, self.start)

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """The operator's inputs: key_encode [kv_heads * key_dim, latent] and key_decode [kv_heads, latent + 1, key_dim]."""
        both = torch.cat([self.decoder, self.mean[None]]).view(self.rank + 1, self.geometry.kv_heads, -1).transpose(0, 1)
        return self.encoder.contiguous().numpy(), both.contiguous().numpy()


def joint(k: torch.Tensor) -> torch.Tensor:
    """[..., kv_heads, T, head_dim] as [..., T, kv_heads * head_dim]."""
    return k.transpose(-2, -3).flatten(-2)
