"""Model shapes that several tests plan: SmolLM2-135M, and the models behind published figures."""

from __future__ import annotations

from pathlib import Path

import yaml

from edgekv.memory.model import ModelShape, shape_from_config

SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
PUBLISHED = yaml.safe_load((Path(__file__).parent / "data" / "models.yaml").read_text())


def shape(name: str) -> ModelShape:
    return shape_from_config(SMOLLM2 if name == "smollm2" else PUBLISHED[name], name)
