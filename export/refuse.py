"""What an architecture may need and edgekv lacks, found in its configuration and refused by name before any work is done."""

from __future__ import annotations

from typing import Any

from edgekv.errors import UserError

LAYER_KINDS = {"full_attention", "sliding_attention", "attention"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
# Architectures that do not say in their configuration what they need.
NAMED = {
    "bloom": "ALiBi position biases",
    "mpt": "ALiBi position biases",
    "mamba": "state-space layers",
    "mamba2": "state-space layers",
    "falcon_mamba": "state-space layers",
    "rwkv": "recurrent layers",
    "gpt_oss": "attention sinks (a learned extra logit per head)",
    "gpt_neo": "an attention that transformers does not route through its attention interface",
}


def _text(config: Any) -> Any:
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def check_config(config: Any) -> None:
    """Raises UserError with one sentence that names the feature."""

    def refuse(what: str) -> None:
        raise UserError(f"The architecture {config.model_type!r} needs {what}, which edgekv does not have.")

    if getattr(config, "quantization_config", None):
        method = _get(config.quantization_config, "quant_method")
        raise UserError(f"This checkpoint is already quantised ({method}); export the original one with --weights int4 instead.")
    if config.model_type in NAMED:
        refuse(NAMED[config.model_type])
    if getattr(config, "is_encoder_decoder", False) or getattr(config, "add_cross_attention", False):
        refuse("cross attention to an encoder")
    if _text(config) is not config:
        refuse("inputs other than text (it is a multimodal model; export its text model)")
    if getattr(config, "alibi", False) or getattr(config, "position_embedding_type", None) == "alibi":
        refuse("ALiBi position biases")
    if getattr(config, "kv_lora_rank", None) and getattr(config, "qk_rope_head_dim", None):
        refuse("multi-head latent attention (MLA)")
    if getattr(config, "num_kv_shared_layers", 0):
        refuse("layers that share the keys and values of other layers")
    kinds = set(getattr(config, "layer_types", None) or ()) - LAYER_KINDS
    if kinds:
        refuse(f"layers of the kind {', '.join(sorted(map(str, kinds)))}")
    if any(isinstance(count := getattr(config, name, None), int) and count > 1 for name in EXPERTS):
        refuse("a mixture of experts")
    if getattr(config, "attention_chunk_size", None):
        refuse("chunked attention")
    for rope in _ropes(config):
        if str(_get(rope, "rope_type")) == "dynamic":
            refuse("dynamic NTK rotary positions (frequencies that change with the length of the text)")


def _ropes(config: Any) -> list[Any]:
    """Rotary parameters: one set, or one per layer kind."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None)
    if not isinstance(rope, dict):
        return []
    return [rope, *(value for value in rope.values() if isinstance(value, dict))]


def _get(holder: Any, name: str) -> Any:
    return holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)


def check_model(model: Any) -> None:
    """The same for what only the model's class says."""
    if getattr(model, "_is_stateful", False):
        raise UserError(f"{type(model).__name__} has recurrent or state-space layers, which edgekv does not have.")
