"""Rotary positions of queries and keys outside the model: turned further, or back."""

from __future__ import annotations

import torch

from edgekv.geometry import LayerGeometry


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, g: LayerGeometry) -> torch.Tensor:
    """x [..., head_dim] with the pairs that the layer rotates turned by angles of which cos and sin [..., rotary_dim/2] are given."""
    half = g.rotary_dim // 2
    first = slice(0, g.rotary_dim, 2) if g.rotary_interleaved else slice(0, half)
    second = slice(1, g.rotary_dim, 2) if g.rotary_interleaved else slice(half, g.rotary_dim)
    a, b = x[..., first], x[..., second]
    both = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(both, -1).flatten(-2) if g.rotary_interleaved else torch.cat(both, -1)
    return turned if g.rotary_dim == x.shape[-1] else torch.cat((turned, x[..., g.rotary_dim :]), -1)


def rotated(x: torch.Tensor, g: LayerGeometry, start: int = 0, back: bool = False) -> torch.Tensor:
    """x [..., T, head_dim] turned to positions start, start + 1, ..., or back from them."""
    if not g.inv_freq:
        return x
    angle = torch.outer(start + torch.arange(x.shape[-2], dtype=torch.float64), torch.tensor(g.inv_freq, dtype=torch.float64)).to(x.device)
    return turn(x, angle.cos().float(), (-angle.sin() if back else angle.sin()).float(), g)
