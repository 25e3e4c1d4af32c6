"""Calibrated rounding of linear layers to 4 bits (GPTQ: Frantar et al., arXiv 2210.17323, algorithm 1).

Plain rounding treats all inputs of a layer alike. Here the columns of a weight matrix are rounded one after the other, and what
each rounding does to the layer's output on a calibration text is made good by the columns that are still free. Scales and zero
points of a block are chosen, among a few shares of its range, with each column weighted by how little the others can make good
for it. Layers see the outputs of the layers before them as already rounded, so that errors are answered, not added up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from edgekv.export.quantise import BLOCK, Rounded, blocks_of

DAMPING = 0.01  # of the mean of the Hessian's diagonal, added to it: keeps its inverse tame on a short text
SHARES = (1.06, 1.03, 1.0, 0.97, 0.94, 0.91, 0.88)  # of a block's range that are tried as the range of the codes


@dataclass
class _Group:
    """Linear layers of one decoder layer that read the same input; `hessian` float32 [K, K] is the sum of x x^T over the text."""

    members: list[tuple[str, nn.Module]]
    hessian: torch.Tensor | int = 0


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The longest list of modules of one class: the decoder layers, under whatever name an architecture gives them."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(child) for child in m}) == 1]
    return list(max(lists, key=len)) if lists else []


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | Conv1D)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel, texts: torch.Tensor, bits: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, Rounded]:
    """Rounds the linear layers inside the decoder layers; their weights in `model` are replaced by the rounded ones.

    texts    int64 [count, length] token ids, each row read on its own
    returns  parameter name -> rounded weight of [outputs, inputs]
    """
    layers = decoder_layers(model)
    names = {id(module): name for name, module in model.named_modules()}
    hidden, calls = _first_inputs(model, layers, texts)
    done: dict[str, Rounded] = {}
    for index, layer in enumerate(layers):
        for group in _observe(layer, names, hidden, calls[index]):
            weights = [_weight(module) for _, module in group.members]
            rounded = round_columns(torch.cat(weights), group.hessian, bits)
            for (name, module), part in zip(group.members, rounded.split([w.shape[0] for w in weights]), strict=True):
                done[f"{name}.weight"] = part
                values = part.dequantised()[:, : _weight(module).shape[1]]
                module.weight.copy_(values.T if isinstance(module, Conv1D) else values)
        for row, call in enumerate(calls[index]):
            hidden[row] = _run(layer, hidden[row], call)
        progress(index + 1, len(layers))
    return done


def _weight(module: nn.Module) -> torch.Tensor:
    return module.weight.T if isinstance(module, Conv1D) else module.weight


def _first_inputs(model: PreTrainedModel, layers: list[nn.Module], texts: torch.Tensor):
    """Hidden states before the first decoder layer, per text, and how the model calls each layer with the rest of its arguments."""
    hidden: list[torch.Tensor] = []
    calls: list[list[tuple[tuple, dict]]] = [[] for _ in layers]

    def before(index: int):
        def hook(module, args, kwargs):
            kwargs = dict(kwargs)
            states = args[0] if args else kwargs.pop("hidden_states")
            if index == 0:
                hidden.append(states)
            calls[index].append((args[1:], kwargs))

        return hook

    hooks = [layer.register_forward_pre_hook(before(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        for row in texts:
            model(input_ids=row[None], use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()
    return hidden, calls


def _run(layer: nn.Module, hidden: torch.Tensor, call: tuple[tuple, dict]) -> torch.Tensor:
    out = layer(hidden, *call[0], **call[1])
    return out[0] if isinstance(out, tuple) else out


def _observe(layer: nn.Module, names: dict[int, str], hidden: list[torch.Tensor], calls: list) -> Iterator[_Group]:
    """Runs the layer on all texts and groups its linear layers by input, in the order in which they read it."""
    groups: dict[int, _Group] = {}  # by the first member that reads the input
    leader: dict[int, int] = {}  # linear layer -> key of its group
    seen: dict[int, tuple[int, torch.Tensor]] = {}  # address of an input in this run -> who read it first; holds it alive

    def hook(module, args, output):
        x = args[0]
        if id(x) not in seen:
            seen[id(x)] = (id(module), x)
        key = leader.setdefault(id(module), seen[id(x)][0])
        group = groups.setdefault(key, _Group([]))
        if all(member is not module for _, member in group.members):
            group.members.append((names[id(module)], module))
        if key == id(module):
            rows = x.reshape(-1, x.shape[-1]).float()
            group.hessian = group.hessian + rows.T @ rows

    hooks = [m.register_forward_hook(hook) for m in layer.modules() if is_linear(m) and _weight(m).shape[1] >= BLOCK]
    try:
        for states, call in zip(hidden, calls, strict=True):
            seen.clear()
            _run(layer, states, call)
    finally:
        for h in hooks:
            h.remove()
    yield from groups.values()


def round_columns(weight: torch.Tensor, hessian: torch.Tensor, bits: int) -> Rounded:
    """Rounds float32 [N, K] so that the error on inputs with this Hessian [K, K] is small, column by column."""
    rows, columns = weight.shape
    count, top = blocks_of(columns), (1 << bits) - 1
    hessian = hessian.clone()
    diagonal = torch.diagonal(hessian)
    diagonal[diagonal == 0] = 1.0  # an input that is always zero: any weight will do
    diagonal += DAMPING * diagonal.mean()
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian.double()))
    factor = torch.linalg.cholesky(inverse, upper=True).float()  # row j: how later columns answer an error in column j

    codes = torch.zeros(rows, count * BLOCK, dtype=torch.uint8)
    scales, zeros = torch.ones(rows, count), torch.zeros(rows, count, dtype=torch.uint8)
    left = weight.float().clone()
    for block in range(count):
        start, stop = block * BLOCK, min((block + 1) * BLOCK, columns)
        within = factor[start:stop, start:stop]
        current = left[:, start:stop].clone()
        scale, zero = _grid(current, torch.diagonal(within) ** -2, top)
        errors = torch.empty_like(current)
        for j in range(stop - start):
            column = current[:, j : j + 1]
            code = (torch.round(column / scale) + zero).clamp_(0, top)
            codes[:, start + j] = code[:, 0].to(torch.uint8)
            error = (column - (code - zero) * scale) / within[j, j]
            current[:, j:] -= error @ within[j : j + 1, j:]
            errors[:, j : j + 1] = error
        left[:, stop:] -= errors @ factor[start:stop, stop:]
        scales[:, block], zeros[:, block] = scale[:, 0], zero[:, 0].to(torch.uint8)
        if stop - start < BLOCK:  # padding columns decode to zero
            codes[:, stop:] = zeros[:, block : block + 1]
    return Rounded(codes, scales, zeros, bits)


def _grid(x: torch.Tensor, importance: torch.Tensor, top: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and zero point [N, 1] of blocks [N, columns] with the least weighted error."""
    low, high = x.amin(-1, keepdim=True).clamp(max=0.0), x.amax(-1, keepdim=True).clamp(min=0.0)
    best, scale, zero = torch.full_like(low, torch.inf), torch.ones_like(low), torch.zeros_like(low)
    for share in SHARES:
        s = (high - low) * (share / top)
        s = torch.where(s > 0, s, torch.ones_like(s))
        nearest = torch.round(-low / s)
        for shift in (-1, 0, 1):
            z = (nearest + shift).clamp_(0, top)
            error = (((torch.round(x / s) + z).clamp_(0, top) - z) * s - x).square_().mul_(importance).sum(-1, keepdim=True)
            better = error < best
            best, scale, zero = (torch.where(better, new, old) for new, old in ((error, best), (s, scale), (z, zero)))
    return scale, zero
