"""KeyMaps: what turns rotated queries and keys of one layer into fewer numbers, and the file that keeps those of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edgekv.errors import UserError

FILE = "key_maps.safetensors"  # beside the weights of a model that `edgekv finetune` made


class Maps(Protocol):
    """What thin keys of one layer are made with, whatever their form."""

    interval: int  # a query's own boundary interval of so many tokens keeps whole keys; 0: all keys are mapped

    @property
    def rank(self) -> int: ...
    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        ...

    def parts(self) -> tuple[torch.Tensor, ...]:
        """What a refinement changes."""
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

    interval = 0  # every key is mapped, those of a cache's tail too

    @property
    def rank(self) -> int:
        return int(self.key.shape[2])

    @property
    def whole(self) -> bool:
        return self.rank == self.key.shape[1]

    def parts(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.key

    def with_parts(self, parts: Sequence[torch.Tensor]) -> KeyMaps:
        return KeyMaps(*parts)

    def apply(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q [..., q_heads, T, head_dim] and k [..., kv_heads, T, head_dim] with the last axis replaced by `rank` numbers."""
        return q @ self.query, k @ self.key


def save(folder: Path, maps: Sequence[KeyMaps]) -> None:
    tensors = {}
    for index, layer in enumerate(maps):
        tensors[f"query_map.{index}"], tensors[f"key_map.{index}"] = layer.query.contiguous(), layer.key.contiguous()
    save_file(tensors, folder / FILE, {"format": "pt"})


def load(folder: Path) -> list[KeyMaps] | None:
    """The maps saved in `folder`, None when there is no such file; UserError when it is damaged."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            names = set(file.keys())
            count = len(names) // 2
            if names != {f"{kind}_map.{i}" for kind in ("query", "key") for i in range(count)}:
                raise ValueError("its tensors have other names")
            maps = [KeyMaps(file.get_tensor(f"query_map.{i}").float(), file.get_tensor(f"key_map.{i}").float()) for i in range(count)]
    except Exception as error:
        raise UserError(f"{path} is damaged ({error}); make it again with `edgekv finetune`.") from None
    for index, layer in enumerate(maps):
        if layer.query.dim() != 3 or layer.key.dim() != 3 or layer.query.shape[1:] != layer.key.shape[1:]:
            raise UserError(f"{path} is damaged (the maps of layer {index} do not fit each other); make it again with `edgekv finetune`.")
        if not (torch.isfinite(layer.query).all() and torch.isfinite(layer.key).all()):
            raise UserError(f"{path} is damaged (the maps of layer {index} are not all numbers); make it again with `edgekv finetune`.")
    return maps


def check(maps: Sequence[KeyMaps], geometry: Sequence, origin: str) -> None:
    """UserError when maps do not fit the layers of a model (LayerGeometry each)."""
    if len(maps) != len(geometry):
        raise UserError(f"{origin} holds key maps of {len(maps)} layers and the model has {len(geometry)}.")
    for index, (layer, g) in enumerate(zip(maps, geometry, strict=True)):
        heads = (layer.query.shape[0], layer.key.shape[0], layer.key.shape[1])
        if heads != (g.q_heads, g.kv_heads, g.key_dim) or not 1 <= layer.rank <= g.key_dim:
            raise UserError(
                f"{origin} does not fit layer {index} of the model: maps for {heads[0]} query and {heads[1]} kv heads of {heads[2]} numbers, "
                f"and the layer has {g.q_heads} and {g.kv_heads} of {g.key_dim}."
            )
