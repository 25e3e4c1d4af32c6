"""The one attention function: every supported model calls it through transformers' own registry, so no model needs code here.

transformers hands queries, keys and values of one layer to a registered attention function. Ours first records what each layer
stores (`discover`), and later, under torch.export, emits one `edgekv::BoundedCacheAttention` node per layer (`emitting`). The
mask function that belongs to it returns nothing: masks are built by the operator from stored positions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from edgekv.errors import UserError
from edgekv.geometry import LayerGeometry

NAME = "edgekv"  # what a model is loaded with: attn_implementation=NAME
OP_TYPE = "edgekv::BoundedCacheAttention"
# Arguments that change the formula and that the operator does not know, by the name transformers gives them.
UNKNOWN_TERMS = {
    "s_aux": "attention sinks (a learned extra logit per head)",
    "position_bias": "a position bias added to the scores (relative positions or ALiBi)",
    "attention_bias": "a bias added to the scores",
    "alibi": "ALiBi position biases",
    "relative_position_bias": "relative position biases",
}


@dataclass
class Recorder:
    """What the attention function is doing at the moment.

    position  int64 [1], states int8 [bytes] per layer: graph inputs while emitting, None while discovering
    layers    layer index -> LayerGeometry, without rotation (the function sees rotated queries and keys)
    updated   layer index -> the state that the emitted node returns
    """

    position: torch.Tensor | None = None
    states: list[torch.Tensor] | None = None
    layers: dict[int, LayerGeometry] = field(default_factory=dict)
    updated: dict[int, torch.Tensor] = field(default_factory=dict)


_recorder: Recorder | None = None


@contextlib.contextmanager
def recording(recorder: Recorder) -> Iterator[Recorder]:
    """Routes the attention function to `recorder` inside the block."""
    global _recorder
    before, _recorder = _recorder, recorder
    try:
        yield recorder
    finally:
        _recorder = before


def _geometry(module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: dict[str, Any]) -> LayerGeometry:
    """Of q [1, q_heads, T, key_dim], k [1, kv_heads, T, key_dim], v [1, kv_heads, T, value_dim]; UserError names what we lack."""
    where = f"layer {module.layer_idx}"
    for name, what in UNKNOWN_TERMS.items():
        if options.get(name) is not None:
            raise UserError(f"This model uses {what} ({where}), which edgekv does not have.")
    causal = options.get("is_causal")
    if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
        raise UserError(f"Attention of {where} is not causal (encoder or cross attention), which edgekv does not have.")
    if key.shape[2] != query.shape[2] or value.shape[1] != key.shape[1]:
        raise UserError(f"Keys of {where} do not come from the same tokens as its queries (cross attention), which edgekv does not have.")
    scale = options.get("scaling")
    window = options.get("sliding_window")
    return LayerGeometry(
        q_heads=int(query.shape[1]),
        kv_heads=int(key.shape[1]),
        key_dim=int(query.shape[3]),
        value_dim=int(value.shape[3]),
        scale=float(scale) if scale is not None else int(query.shape[3]) ** -0.5,
        softcap=float(options.get("softcap") or 0.0),
        sliding_window=int(window or 0),
    )


def attend(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: torch.Tensor | None = None, **options: Any
) -> tuple[torch.Tensor, None]:
    """Called by transformers for every layer; q, k, v as in _geometry, rotated; returns [1, T, q_heads, value_dim]."""
    if _recorder is None:
        raise RuntimeError("a model loaded for export can only be traced, not run")
    layer = getattr(module, "layer_idx", None)
    if layer is None:
        raise UserError("An attention layer of this model has no index, so edgekv cannot give it a cache.")
    shape = (1, query.shape[2], query.shape[1], value.shape[3])
    if _recorder.states is None:
        if layer in _recorder.layers:
            raise UserError(f"Layer {layer} of this model attends more than once per token, which edgekv does not have.")
        _recorder.layers[layer] = _geometry(module, query, key, value, options)
        return query.new_zeros(shape), None
    state = _recorder.states[layer]
    y, updated = torch.onnx.ops.symbolic_multi_out(
        OP_TYPE,
        [query, key, value, _recorder.position, state],
        {"layer": layer},
        dtypes=[torch.float32, torch.int8],
        shapes=[[1, query.shape[2], query.shape[1] * value.shape[3]], [state.shape[0]]],
        version=1,
    )
    _recorder.updated[layer] = updated
    return y.view(shape), None


AttentionInterface.register(NAME, attend)
AttentionMaskInterface.register(NAME, lambda *args, **kwargs: None)
