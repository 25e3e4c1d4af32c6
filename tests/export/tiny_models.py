"""Small random models of many architectures, made in code, with weights large enough that logits and attention mean something."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from tiny_bundle import VOCAB, byte_tokenizer
from transformers import AutoModelForCausalLM, CONFIG_MAPPING

CONTEXT = 512
SHAPE = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": VOCAB, "max_position_embeddings": CONTEXT, "bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 257,
}  # fmt: skip

# name -> (model type, changes to SHAPE); None removes a field
MODELS: dict[str, tuple[str, dict]] = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-rope-scaled": (
        "llama",
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 4.0, "low_freq_factor": 1.0,
                             "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    ),  # fmt: skip
    "llama-yarn": (
        "llama",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}},
    ),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "mistral": ("mistral", {"sliding_window": 24, "head_dim": 16}),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0}),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 16, "sliding_window": 24, "num_hidden_layers": 3,
         "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    ),  # fmt: skip
    "gemma4-two-head-sizes": (
        "gemma4_text",
        {"head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": 24, "num_kv_shared_layers": 0,
         "hidden_size_per_layer_input": 0, "layer_types": ["sliding_attention", "full_attention"]},
    ),  # fmt: skip
    "phi3": ("phi3", {}),
    "phi3-longrope": (
        "phi3",
        {"original_max_position_embeddings": 64,
         "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64,
                             "short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [1.0 + 0.5 * i for i in range(8)]}},
    ),  # fmt: skip
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "gpt2": ("gpt2", {"n_positions": CONTEXT}),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.25}),
    "gptj": ("gptj", {"n_positions": CONTEXT, "rotary_dim": 8}),
    "opt": ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 3.0, "logits_scaling": 2.0}),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2}),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.25}),
    "cohere": ("cohere", {}),
    "glm4": ("glm4", {"head_dim": 16}),
    "olmo3": ("olmo3", {"sliding_window": 24}),
    "exaone4": ("exaone4", {"sliding_window": 24, "sliding_window_pattern": 2}),
    "starcoder2": ("starcoder2", {}),
    "llama-head-80": ("llama", {"head_dim": 80, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama-odd-sizes": ("llama", {"hidden_size": 72, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 24}),
}  # fmt: skip


def make(folder: Path, name: str, vocab: int = VOCAB, seed: int = 0, **changes) -> Path:
    """Saves the model of MODELS[name] and a byte tokenizer to `folder`."""
    kind, own = MODELS[name]
    fields = {**SHAPE, "vocab_size": vocab, **own, **changes}
    config = CONFIG_MAPPING[kind](**{k: v for k, v in fields.items() if v is not None})
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    save(folder, model)
    return folder


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Matrices of unit gain, vectors (norms, biases) away from the neutral values that would hide a mistake."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 2 and "embed" not in name and "wte" not in name and "wpe" not in name:
                parameter.copy_(noise * 1.5 / parameter.shape[-1] ** 0.5)
            elif parameter.dim() == 2:
                parameter.copy_(noise * 0.7)
            else:
                parameter.add_(noise * 0.2)


def save(folder: Path, model: torch.nn.Module) -> None:
    model.save_pretrained(folder)
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_text(count: int, vocab: int = VOCAB, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab, count)


def expected(folder: Path, ids: np.ndarray, **options) -> np.ndarray:
    """float32 [T, vocab] from transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options).eval()
    with torch.no_grad():
        return model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
