"""Which weights a decoder has, per model family, as far as config.json leaves it unsaid.

A new family is one line in FAMILIES. Counts are checked against the models themselves in tests/memory/test_model.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """gated: three MLP matrices instead of two. *_bias: vectors beside those matrices. norm: vectors per norm (1 RMS, 2 layer
    norm with bias). norms: norms of hidden size per layer. final_norm: one more at the end. qk_norm: 'head' (one vector of
    head_dim each for q and k), 'full' (of all heads) or ''. tied: default of tie_word_embeddings. learned_positions: rows
    beyond the context of a learned position table, None when positions are rotary.
    """

    gated: bool = True
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    norm: int = 1
    norms: int = 2
    final_norm: bool = True
    qk_norm: str = ""
    tied: bool = False
    learned_positions: int | None = None
    scaled_by: str = ""  # config field that replaces 1/sqrt(head_dim): query_pre_attn_scalar, attention_multiplier


LLAMA = Family()
_PLAIN = {"gated": False, "qkv_bias": True, "out_bias": True, "mlp_bias": True, "norm": 2}

FAMILIES: dict[str, Family] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "ministral": LLAMA,
    "smollm3": LLAMA,
    "phi3": LLAMA,
    "granite": Family(scaled_by="attention_multiplier"),
    "qwen2": Family(qkv_bias=True),
    "qwen2_5_vl_text": Family(qkv_bias=True),
    "qwen3": Family(qk_norm="head"),
    "qwen3_vl_text": Family(qk_norm="head"),
    "gemma": Family(tied=True),
    "gemma2": Family(norms=4, tied=True, scaled_by="query_pre_attn_scalar"),
    "gemma3_text": Family(norms=4, qk_norm="head", tied=True, scaled_by="query_pre_attn_scalar"),
    "olmo2": Family(qk_norm="full"),
    "gpt2": Family(**_PLAIN, tied=True, learned_positions=0),
    "gpt_neox": Family(**_PLAIN),
    "opt": Family(**_PLAIN, tied=True, learned_positions=2),
}
ALIASES = {"gemma3": "gemma3_text", "qwen2_5_vl": "qwen2_5_vl_text", "qwen3_vl": "qwen3_vl_text"}
