"""Tiny random models, exported like real ones, for tests of what TensorRT gets to see."""

from __future__ import annotations

from pathlib import Path

import torch
import transformers
from tiny_bundle import byte_tokenizer

from edgekv.bundle import Bundle
from edgekv.export.exporter import Options, export
from edgekv.export.thin.make import KeyOptions
from edgekv.policy import CachePolicy, parse_budget

SHAPES = {
    "llama": (
        transformers.LlamaConfig,
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True},
    ),
    "qwen2": (  # biases on q, k and v
        transformers.Qwen2Config,
        {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
    ),
    "gpt2": (  # layer norm, learnt positions, biases everywhere
        transformers.GPT2Config,
        {"n_embd": 64, "n_head": 4, "n_positions": 512},
    ),
    "gemma3_text": (  # norms on q and k, two rotations, sliding windows, scaled embedding
        transformers.Gemma3TextConfig,
        {
            "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 32,
        },
    ),
}  # fmt: skip


def tiny(folder: Path, name: str, weights: str = "fp32", keep: str = "window", positions: str = "original", keys: KeyOptions | None = None, **packed) -> Bundle:
    """A bundle of a random two-layer model with a vocabulary of bytes; boundary interval 32, chunk 32. packed: fields of a policy with
    format = selfindex."""
    kind, options = SHAPES[name]
    torch.manual_seed(0)
    common = {"vocab_size": 260, "num_hidden_layers": 2, "max_position_embeddings": 512, "bos_token_id": 256, "eos_token_id": 257}
    if name == "gpt2":
        common = {"vocab_size": 260, "n_layer": 2, "bos_token_id": 256, "eos_token_id": 257}
    model = transformers.AutoModelForCausalLM.from_config(kind(**common, **options))
    for parameter in model.parameters():  # the usual start is so small that attention hardly matters
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=0.15)
    source = folder / f"{name}-model"
    model.save_pretrained(source)
    byte_tokenizer().save(str(source / "tokenizer.json"))
    policy = CachePolicy(
        keep=keep, sinks=0 if keep == "full" and not packed else 4, window=16 if keep == "heavy" else 0, observe=32 if keep == "heavy" else 0,
        score="attention" if keep == "heavy" else None, score_normalise=keep == "heavy", element="fp16", positions=positions, boundary=32, **packed,
    )  # fmt: skip
    budget = None if keep == "full" else parse_budget("128tok")
    target = folder / "-".join([name, weights, keep, *([packed["format"]] if packed else []), *([keys.form] if keys else [])])
    return export(str(source), target, Options(policy, budget, weights, context=512, chunk=32, check_parity=False, force=True, keys=keys))
