"""Rotary positions that depend on the length of the text are settled before tracing: a graph has one set of frequencies.

`longrope` models (phi3) have two, for texts within the original range and beyond it. Switching in the middle of a text would
leave stored keys with the wrong rotation, so the exported context decides: beyond the original range the long set, else the short.
"""

from __future__ import annotations

from typing import Any

import torch

from edgekv.errors import UserError


def choose_context(config: Any, asked: int | None) -> int:
    """Positions the bundle may use: the model's trained range, or less when the user asks for less."""
    trained = next((int(n) for n in (getattr(config, name, None) for name in ("max_position_embeddings", "n_positions")) if n), None)
    if trained is None:
        raise UserError(f"The configuration of this {config.model_type} does not say how many positions it was trained for.")
    if asked is None:
        return trained
    if asked > trained:
        raise UserError(f"--context {asked} is more than the {trained} positions this model was trained for.")
    return asked


def freeze(model: Any, context: int) -> None:
    """Makes the rotary tables of longrope modules constant, with the factors that belong to `context`."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    for module in model.modules():
        if getattr(module, "rope_type", None) != "longrope":
            continue
        inv_freq, scaling = ROPE_INIT_FUNCTIONS["longrope"](module.config, torch.device("cpu"), seq_len=context)
        module.register_buffer("inv_freq", inv_freq, persistent=False)
        module.attention_scaling = scaling
        module.rope_type = "default"  # forward would otherwise look at the positions
