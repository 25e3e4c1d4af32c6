"""Weights that learn through the rounding that an export to 4 bits will do: read rounded, changed as if they were not.

What a weight has to move for its rounded number to change adds up over steps, and a text that is read meanwhile has seen nothing but
rounded ones: what was learned is still there after `edgekv export --weights int4`. The gradient of the rounding is taken to be that of
no rounding (the straight-through estimator, Bengio et al., arXiv 1308.3432).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from edgekv.export.quantise import BLOCK

TOP = 15  # largest code of 4 bits


def matrices(model: torch.nn.Module, names: Collection[str]) -> list[str]:
    """Those of the named parameters that an export rounds: matrices of linear layers, which lie as [outputs, inputs]."""
    linear = {f"{name}.weight" if name else "weight" for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    return [name for name in names if name in linear]


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """float32 [N, K] on the 4-bit grid of its own blocks of 32 columns, from the smallest to the largest number of each; the gradient
    passes unchanged.

    The search of quantise.quantise_with_offsets is left out, which a step of training has no time for. Smallest and largest stay what
    they are, so both find the same grid again.
    """
    return _Rounded.apply(weight)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, weight: torch.Tensor) -> torch.Tensor:
        count = -(-weight.shape[1] // BLOCK)
        x = torch.nn.functional.pad(weight, (0, count * BLOCK - weight.shape[1]), mode="replicate").unflatten(1, (count, BLOCK))
        low, high = x.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / TOP).clamp_(min=1e-30)
        return (x - low).div_(step).round_().mul_(step).add_(low).flatten(1)[:, : weight.shape[1]]

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def read(module: torch.nn.Module, names: Collection[str]) -> dict[str, torch.Tensor]:
    """The named parameters of a module as they are read, for torch.func.functional_call."""
    return {name: rounded(module.get_parameter(name)) for name in names}
