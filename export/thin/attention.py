"""The attention that thin keys are calibrated, trained and checked with: transformers' formula, with maps between, on any device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from edgekv.export.thin.maps import Maps

NAME = "edgekv_thin"  # what a model is loaded with: attn_implementation=NAME

# tap(layer, module, q [B, q_heads, T, head_dim], k and v [B, kv_heads, T, ...], Scores of the layer), before maps are applied
Tap = Callable[[int, Any, torch.Tensor, torch.Tensor, torch.Tensor, "Scores"], None]


@dataclass(frozen=True)
class Scores:
    """How one layer turns q . k into logits of its softmax: scale, softcap (0: none), sliding window in tokens (0: none)."""

    scale: float
    softcap: float = 0.0
    window: int = 0

    def logits(self, q: torch.Tensor, k: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        """float [..., q_heads, R, T] of q [..., q_heads, R, n] at the positions `rows` (all when None) and k [..., kv_heads, T, n];
        keys that a query does not see are -inf."""
        heads, count = k.shape[-3], q.shape[-2]
        grouped = (q * self.scale).unflatten(-3, (heads, -1)).flatten(-3, -2)  # query heads of one kv head as rows of one product
        x = (grouped @ k.transpose(-1, -2)).unflatten(-2, (-1, count)).flatten(-4, -3)
        if self.softcap:
            x = self.softcap * torch.tanh(x / self.softcap)
        return x.masked_fill_(~self.seen(k.shape[-2], rows, x.device), float("-inf"))

    def seen(self, count: int, rows: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """bool [R, T]: which keys the queries see."""
        keys = torch.arange(count, device=device)
        back = (keys if rows is None else rows)[:, None] - keys[None]
        return (back >= 0) & (back < self.window) if self.window else back >= 0


@dataclass
class Session:
    """What the attention function does at the moment: maps of layers (layers without any attend as usual), and who looks on."""

    maps: Mapping[int, Maps] = field(default_factory=dict)
    tap: Tap | None = None


_session = Session()


@contextlib.contextmanager
def using(session: Session) -> Iterator[Session]:
    global _session
    before, _session = _session, session
    try:
        yield session
    finally:
        _session = before


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Called by transformers: query [B, q_heads, T, head_dim], key and value [B, kv_heads, T, ...], rotated; [B, T, q_heads, value_dim]."""
    scale = options.get("scaling")
    scores = Scores(
        float(scale) if scale is not None else query.shape[3] ** -0.5, float(options.get("softcap") or 0.0), int(options.get("sliding_window") or 0)
    )
    if _session.tap is not None:
        _session.tap(module.layer_idx, module, query, key, value, scores)
    maps = _session.maps.get(module.layer_idx)
    whole, interval = (query, key), maps.interval if maps is not None else 0
    if maps is not None:
        query, key = maps.apply(query, key)
    group = query.shape[1] // value.shape[1]
    if scores.softcap or scores.window or interval:
        logits = scores.logits(query, key)
        if interval:
            place = torch.arange(key.shape[2], device=key.device) // interval
            logits = torch.where(place[:, None] == place[None], scores.logits(*whole), logits)
        weights = logits.softmax(-1)
        y = weights @ (value.repeat_interleave(group, 1) if group > 1 else value)
    else:
        short = value.shape[3] - query.shape[3]
        if short > 0:  # zeros change no score, and torch's fused attention wants heads of one size
            query, key = (torch.nn.functional.pad(x, (0, short)) for x in (query, key))
        y = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scores.scale, enable_gqa=group > 1)
    return y.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
