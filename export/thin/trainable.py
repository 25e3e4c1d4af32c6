"""A model whose keys have a bounded rank by construction, and the few parameters of it that a fine-tune may change."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from edgekv.export.thin import rounding
from edgekv.export.thin.attention import Session, using
from edgekv.export.thin.maps import Maps


class ThinModel(torch.nn.Module):
    """model(ids) through maps that are parameters themselves: whatever they learn, scores of a layer have rank `rank`. Maps that leave
    nothing out stay as they are.

    maps None: the model with whole keys (teacher, control). rounded: names of the model's parameters that are read on the 4-bit grid
    (rounding.py).
    """

    def __init__(self, model: Any, maps: Sequence[Maps] | None, rounded: Sequence[str] = ()):
        super().__init__()
        self.model, self._rounded = model, list(rounded)
        self._maps = list(maps or ())
        self.parts = torch.nn.ModuleList([
            torch.nn.ParameterList([torch.nn.Parameter(x.clone(), requires_grad=not m.whole) for x in m.parts()]) for m in self._maps
        ])  # fmt: skip

    def forward(self, ids: torch.Tensor, start: int = 0) -> torch.Tensor:
        """ids int64 [B, T], read from position `start` on: logits float32 [B, T, vocab]."""
        places = (start + torch.arange(ids.shape[1], device=ids.device))[None].expand(ids.shape[0], -1)
        maps = {i: m.with_parts(list(parts)).at(start) for i, (m, parts) in enumerate(zip(self._maps, self.parts, strict=True))}
        read = rounding.read(self.model, self._rounded)
        with using(Session(maps)):
            return torch.func.functional_call(self.model, read, (), {"input_ids": ids, "position_ids": places, "use_cache": False}).logits

    @torch.no_grad()
    def settle(self, stored: torch.dtype) -> None:
        """Gives the parameters that learn in the model the numbers that they are read with, in a type in which they can be saved."""
        for name, numbers in rounding.read(self.model, self._rounded).items():
            self.model.get_parameter(name).copy_(numbers)
        self._rounded = []
        for p in self.model.parameters():
            if p.requires_grad:
                p.copy_(p.to(stored).float())

    def maps(self) -> list[Maps]:
        return [m.with_parts([x.detach().cpu().clone() for x in parts]) for m, parts in zip(self._maps, self.parts, strict=True)]


def key_side(model: Any, ids: torch.Tensor) -> list[str]:
    """Names of the parameters inside the attention modules that queries or keys depend on and values do not: ids int64 [T] are read to
    see. In a model that makes all three with one matrix there are none, and the maps alone are trained."""
    seen: dict[int, tuple[Any, torch.Tensor, torch.Tensor]] = {}

    def tap(layer, module, q, k, v, scores):
        weights = [torch.randn(x.shape, generator=torch.Generator().manual_seed(layer)).to(x) for x in (q, k, v)]
        seen[layer] = (module, (q * weights[0]).sum() + (k * weights[1]).sum(), (v * weights[2]).sum())

    wanted = {name: p.requires_grad for name, p in model.named_parameters()}
    model.requires_grad_(True)
    try:
        with using(Session(tap=tap)):
            model(input_ids=ids[None], use_cache=False)
        names = {id(p): name for name, p in model.named_parameters()}
        found = []
        for layer in sorted(seen):
            module, keys, values = seen[layer]
            inside = list(module.parameters())
            of_keys = torch.autograd.grad(keys, inside, allow_unused=True, retain_graph=True)
            of_values = torch.autograd.grad(values, inside, allow_unused=True, retain_graph=True)
            found += [names[id(p)] for p, a, b in zip(inside, of_keys, of_values, strict=True) if a is not None and b is None]
        return found
    finally:
        for name, p in model.named_parameters():
            p.requires_grad_(wanted[name])


def only_these(model: Any, names: Sequence[str]) -> None:
    chosen = set(names)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)


def twin(model: Any, names: Sequence[str]) -> Any:
    """A copy that has its own numbers for the named parameters and shares all others."""
    chosen = set(names)
    shared = {id(p): p for name, p in model.named_parameters() if name not in chosen} | {id(b): b for b in model.buffers()}
    return copy.deepcopy(model, shared)
