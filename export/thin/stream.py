"""A text through a model layer by layer: every layer's queries and keys are seen once and forgotten, so that memory holds the hidden
states of the text and one layer's numbers, however many layers there are.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from edgekv.errors import UserError
from edgekv.export.thin.attention import Scores, Session, using
from edgekv.export.thin.rotation import turn
from edgekv.geometry import LayerGeometry


@dataclass(frozen=True)
class LayerText:
    """What one layer sees of the text: q float32 [chunks, q_heads, T, head_dim], k [chunks, kv_heads, T, head_dim], rotated."""

    layer: int
    q: torch.Tensor
    k: torch.Tensor
    scores: Scores


@dataclass(frozen=True)
class Reading:
    """One layer at work on the text: hidden states float32 [1, T, hidden] that its block reads, of every chunk; what else the block is
    called with; and what its attention sees."""

    hidden: Sequence[torch.Tensor]
    call: tuple[tuple, dict]
    text: LayerText


class _Stop(Exception):
    pass


def _blocks(model: Any, attentions: list[Any]) -> list[Any]:
    """The decoder block around each attention module: the member of a list of modules that holds it."""
    members = {id(child): child for m in model.modules() if isinstance(m, torch.nn.ModuleList) for child in m}
    blocks = []
    for attention in attentions:
        around = [child for child in members.values() if any(m is attention for m in child.modules())]
        if not around:
            raise UserError("The decoder layers of this model are not a list of modules, so its keys cannot be calibrated.")
        blocks.append(max(around, key=lambda child: sum(1 for _ in child.modules())))
    return blocks


def _hidden(args: tuple, kwargs: dict) -> torch.Tensor:
    return args[0] if args else kwargs["hidden_states"]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b)


@torch.no_grad()
def _inputs(model: Any, chunk: torch.Tensor) -> tuple[list[Any], list[tuple[tuple, dict]]]:
    """Decoder blocks in the order of their layers, and what each is called with beside the hidden states."""
    attentions: dict[int, Any] = {}
    with using(Session(tap=lambda layer, module, *rest: attentions.setdefault(layer, module))):
        model(input_ids=chunk[None], use_cache=False)
    if sorted(attentions) != list(range(len(attentions))):
        raise UserError(f"Only layers {sorted(attentions)} of {type(model).__name__} attend; their keys cannot be calibrated.")
    blocks = _blocks(model, [attentions[index] for index in range(len(attentions))])
    return blocks, _arguments(model, blocks, chunk)


@torch.no_grad()
def _arguments(model: Any, blocks: list[Any], chunk: torch.Tensor) -> list[tuple[tuple, dict]]:
    found: dict[int, tuple[tuple, dict]] = {}
    hooks = [
        block.register_forward_pre_hook(
            lambda module, args, kwargs, index=index: found.setdefault(index, (args[1:], {k: v for k, v in kwargs.items() if k != "hidden_states"})) and None,
            with_kwargs=True,
        )
        for index, block in enumerate(blocks)
    ]
    try:
        model(input_ids=chunk[None], use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [found[index] for index in range(len(blocks))]


@torch.no_grad()
def _first_hidden(model: Any, block: Any, chunk: torch.Tensor) -> torch.Tensor:
    taken: list[torch.Tensor] = []

    def take(module, args, kwargs):
        taken.append(_hidden(args, kwargs))
        raise _Stop

    hook = block.register_forward_pre_hook(take, with_kwargs=True)
    try:
        model(input_ids=chunk[None], use_cache=False)
    except _Stop:
        pass
    finally:
        hook.remove()
    return taken[0]


def layers(model: Any, chunks: torch.Tensor) -> Iterator[LayerText]:
    """What each layer sees, in order; see readings."""
    return (reading.text for reading in readings(model, chunks))


@torch.no_grad()
def readings(model: Any, chunks: torch.Tensor) -> Iterator[Reading]:
    """What each layer reads and sees, in order. chunks int64 [N, T]: pieces of text of one length, each read from position 0.

    model: loaded with attn_implementation=attention.NAME. UserError when its layers cannot be run one by one.
    """
    blocks, calls = _inputs(model, chunks[0])
    if len(chunks) > 1:
        others = _arguments(model, blocks, chunks[-1])
        if not all(_same(a, b) for a, b in zip(calls, others, strict=True)):
            raise UserError("The decoder layers of this model take more of a text than hidden states, so its keys cannot be calibrated layer by layer.")
    hidden = [_first_hidden(model, blocks[0], chunk) for chunk in chunks]
    for index, block in enumerate(blocks):
        seen: list[tuple[torch.Tensor, torch.Tensor, Scores]] = []
        tap = Session(tap=lambda layer, module, q, k, v, scores: seen.append((q[0].clone(), k[0].clone(), scores)))  # noqa: B023 (used at once)
        (more, named), read = calls[index], hidden
        with using(tap):
            results = [block(x, *more, **named) for x in read]
        hidden = [out[0] if isinstance(out, (tuple, list)) else out for out in results]
        text = LayerText(index, torch.stack([q for q, _, _ in seen]), torch.stack([k for _, k, _ in seen]), seen[0][2])
        yield Reading(read, calls[index], text)


def blocks(model: Any, chunk: torch.Tensor) -> list[Any]:
    """The decoder blocks in the order of their layers. chunk int64 [T] is read to see; UserError when they cannot be run one by one."""
    return _inputs(model, chunk)[0]


def queries_and_keys(
    block: Any, hidden: torch.Tensor, call: tuple[tuple, dict], read: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """What a block's attention would see of hidden [1, T, hidden] (a Reading's, with its call), with gradients: q [q_heads, T, head_dim]
    and k [kv_heads, T, head_dim], rotated. What comes behind in the block is not computed. read: parameters of the block that others
    stand in for."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def tap(layer, module, q, k, v, scores):
        seen.append((q[0], k[0]))
        raise _Stop

    with using(Session(tap=tap)):
        try:
            torch.func.functional_call(block, dict(read or {}), (hidden, *call[0]), call[1])
        except _Stop:
            pass
    return seen[0]


def turned(texts: Iterable[LayerText], geometry: Sequence[LayerGeometry], starts: Sequence[int]) -> Iterator[LayerText]:
    """The same as if chunk i began at position starts[i]: queries and keys of rotary layers are turned further.

    That changes no score, but maps to fewer numbers are made for the rotated keys: what they leave out at the first few hundred positions
    may be what counts some thousands later, where slowly rotating pairs point elsewhere.
    """
    for text in texts:
        g = geometry[text.layer]
        if not g.inv_freq:
            yield text
            continue
        yield LayerText(text.layer, *(_further(x, g, torch.tensor(starts)[:, None, None]) for x in (text.q, text.k)), text.scores)


def further(x: torch.Tensor, g: LayerGeometry, start: int) -> torch.Tensor:
    """Rotated queries or keys x [heads, T, head_dim] of one chunk as if it began at position `start`; see turned."""
    return _further(x, g, torch.tensor(start)) if g.inv_freq else x


def _further(x: torch.Tensor, g: LayerGeometry, starts: torch.Tensor) -> torch.Tensor:
    angle = (starts.double()[..., None] * torch.tensor(g.inv_freq, dtype=torch.float64)).to(x.device)
    return turn(x, angle.cos().float(), angle.sin().float(), g)
