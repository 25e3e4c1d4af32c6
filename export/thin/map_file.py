"""The file of key maps beside the weights of a model that `edgekv finetune` made."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from edgekv.errors import UserError
from edgekv.export.thin.latent_maps import LatentMaps
from edgekv.export.thin.maps import KeyMaps, Maps
from edgekv.export.thin.pairs import PairMaps
from edgekv.geometry import LayerGeometry

FILE = "key_maps.safetensors"
REMEDY = "make it again with `edgekv finetune`"  # for a damaged one beside a model
_NAMES = {"projected": ("query_map", "key_map"), "latent": ("key_encode", "key_decode", "key_mean"), "pairs": ("key_pairs",)}  # tensors of a layer, each NAME.LAYER


def save(folder: Path, maps: Sequence[Maps]) -> None:
    tensors = {}
    for index, layer in enumerate(maps):
        kept = (*layer.parts(), layer.mean) if isinstance(layer, LatentMaps) else (layer.pairs,) if isinstance(layer, PairMaps) else layer.parts()
        # copies, because encoder and decoder of full rank are one tensor, which the format does not take
        tensors.update({f"{name}.{index}": x.clone().contiguous() for name, x in zip(_NAMES[layer.form], kept, strict=True)})
    save_file(tensors, folder / FILE, {"format": "pt"})


def there(folder: Path) -> bool:
    return (folder / FILE).is_file()


def load(folder: Path, remedy: str = REMEDY) -> list[Maps] | None:
    """The maps saved in `folder`, None when there is no such file; UserError, with what helps, when it is damaged. See fitted."""
    if not there(folder):
        return None
    path = folder / FILE
    try:
        form, layers = _read(path)
    except Exception as error:
        raise UserError(f"{path} is damaged ({error}); {remedy}.") from None
    for index, layer in enumerate(layers):
        if not all(x.numel() for x in layer):
            raise UserError(f"{path} is damaged (the maps of layer {index} hold no numbers); {remedy}.")
        if not _belong(form, layer):
            raise UserError(f"{path} is damaged (the maps of layer {index} do not fit each other); {remedy}.")
        if not all(torch.isfinite(x).all() for x in layer):
            raise UserError(f"{path} is damaged (the maps of layer {index} are not all numbers); {remedy}.")
    made = {"latent": lambda *layer: LatentMaps(*layer, None), "pairs": lambda *layer: PairMaps(*layer, None), "projected": KeyMaps}[form]
    return [made(*layer) for layer in layers]


def _read(path: Path) -> tuple[str, list[list[torch.Tensor]]]:
    """The form, and the tensors of every layer."""
    with safe_open(path, "pt") as file:
        found = set(file.keys())
        for form, names in _NAMES.items():
            count = len(found) // len(names)
            if found and found == {f"{name}.{i}" for name in names for i in range(count)}:
                return form, [[_numbers(form, file.get_tensor(f"{name}.{i}")) for name in names] for i in range(count)]
    raise ValueError("its tensors have other names")


def _numbers(form: str, x: torch.Tensor) -> torch.Tensor:
    if x.dtype != torch.int64 if form == "pairs" else not x.is_floating_point():
        raise ValueError(f"its numbers are {str(x.dtype)[6:]}")
    return x if form == "pairs" else x.float()


def _belong(form: str, layer: Sequence[torch.Tensor]) -> bool:
    shapes = [x.shape for x in layer]
    if form == "projected":
        query, key = shapes
        return len(query) == len(key) == 3 and query[1:] == key[1:]
    if form == "pairs":
        (pairs,) = layer  # of every head ascending, so none twice
        return pairs.dim() == 2 and pairs.shape[1] > 0 and bool((pairs[:, 1:] > pairs[:, :-1]).all()) and bool((pairs >= 0).all())
    encode, decode, mean = shapes
    return len(encode) == 2 and decode == encode[::-1] and mean == encode[:1]


def fitted(maps: Sequence[Maps], geometry: Sequence[LayerGeometry], origin: str, remedy: str = REMEDY) -> list[Maps]:
    """The maps for layers of these shapes; UserError, with what helps, when they do not fit them."""
    if len(maps) != len(geometry):
        raise UserError(f"{origin} holds key maps of {len(maps)} layers and the model has {len(geometry)}; {remedy}.")
    return [_fitted(layer, g, f"{origin} does not fit layer {index} of the model", remedy) for index, (layer, g) in enumerate(zip(maps, geometry, strict=True))]


def _fitted(layer: Maps, g: LayerGeometry, problem: str, remedy: str) -> Maps:
    if isinstance(layer, LatentMaps):
        numbers, wanted = layer.encoder.shape[0], g.kv_heads * g.key_dim
        if numbers != wanted or not 1 <= layer.rank <= wanted:
            raise UserError(f"{problem}: maps to {layer.rank} of {numbers} numbers per token, and the layer has {wanted}; {remedy}.")
        return dataclasses.replace(layer, geometry=g)
    if isinstance(layer, PairMaps):
        heads, half = layer.pairs.shape[0], g.rotary_dim // 2
        if heads != g.kv_heads or int(layer.pairs.max()) >= half:
            raise UserError(f"{problem}: rotary pairs up to {int(layer.pairs.max()) + 1} of {heads} kv heads, and the layer has {half} of {g.kv_heads}; {remedy}.")
        return dataclasses.replace(layer, geometry=g)
    heads = (layer.query.shape[0], layer.key.shape[0], layer.key.shape[1])
    if heads != (g.q_heads, g.kv_heads, g.key_dim) or not 1 <= layer.rank <= g.key_dim:
        raise UserError(
            f"{problem}: maps for {heads[0]} query and {heads[1]} kv heads of {heads[2]} numbers, and the layer has {g.q_heads} and {g.kv_heads} of {g.key_dim}; {remedy}."
        )
    return layer
