"""Parameter counts and cache geometry from config.json alone, against the models of transformers (built without weights)."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from edgekv.errors import UserError
from edgekv.memory.model import load_shape, shape_from_config

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 6, "num_attention_heads": 4, "vocab_size": 300}
GROUPED = {**SMALL, "num_key_value_heads": 2}
CONFIGS = {
    "llama": GROUPED,
    "llama-biased": {**GROUPED, "model_type": "llama", "attention_bias": True, "mlp_bias": True},
    "llama-tied": {**GROUPED, "model_type": "llama", "tie_word_embeddings": True},
    "mistral": {**GROUPED, "sliding_window": 32},
    "qwen2": GROUPED,
    "qwen3": {**GROUPED, "head_dim": 32},
    "gemma": {**GROUPED, "head_dim": 32},
    "gemma2": {**GROUPED, "head_dim": 32, "sliding_window": 16},
    "gemma3_text": {**GROUPED, "head_dim": 32, "sliding_window": 16},
    "olmo2": GROUPED,
    "granite": {**GROUPED, "attention_multiplier": 0.3},
    "phi3": {**GROUPED, "pad_token_id": 0},
    "smollm3": {**GROUPED, "pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300, "n_positions": 128},
    "gpt_neox": {**SMALL, "rotary_pct": 0.25},
    "opt": {**SMALL, "ffn_dim": 160, "word_embed_proj_dim": 64, "max_position_embeddings": 128},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_parameters_and_geometry_equal_the_model(name, tmp_path):
    kind = CONFIGS[name].get("model_type", name)
    config = transformers.AutoConfig.for_model(kind, **{k: v for k, v in CONFIGS[name].items() if k != "model_type"})
    config.save_pretrained(tmp_path)
    shape = load_shape(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == model.num_parameters()
    assert shape.tied == bool(config.tie_word_embeddings)
    assert not shape.notes
    assert len(shape.layers) == config.num_hidden_layers
    kinds = getattr(config, "layer_types", None)
    for index, layer in enumerate(shape.layers):
        sliding = kinds[index] == "sliding_attention" if kinds else bool(getattr(config, "sliding_window", None))
        assert bool(layer.sliding_window) == sliding
        attention = [m for m in model.modules() if hasattr(m, "scaling") and hasattr(m, "layer_idx")]
        if attention:
            assert layer.scale == pytest.approx(attention[index].scaling)


def test_step_reads_the_tied_table_once_and_an_untied_embedding_not_at_all():
    tied = shape_from_config({"model_type": "llama", **GROUPED, "tie_word_embeddings": True}, "m")
    untied = shape_from_config({"model_type": "llama", **GROUPED}, "m")
    assert untied.parameters - tied.parameters == 300 * 64
    assert untied.step_parameters == tied.step_parameters


def test_smollm2_needs_23040_bytes_per_token():
    config = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152,
              "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "max_position_embeddings": 8192}  # fmt: skip
    shape = shape_from_config(config, "smollm2")
    assert shape.kv_bytes_per_token() == 23040
    assert shape.parameters == 134_515_008


def test_unknown_type_is_counted_as_llama_and_says_so():
    shape = shape_from_config({"model_type": "brandnew", **GROUPED}, "m")
    assert "Llama-like" in shape.notes[0]


def test_multimodal_config_counts_its_language_model():
    shape = shape_from_config({"model_type": "qwen2_5_vl", "text_config": {**GROUPED, "model_type": "qwen2_5_vl_text"}}, "m")
    assert shape.hidden == 64 and "language model" in shape.notes[0]


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ([], "JSON object"),
        ({}, "hidden_size"),
        ({**GROUPED, "hidden_size": -4}, "hidden_size must be a whole number"),
        ({**GROUPED, "num_hidden_layers": 10**9}, "num_hidden_layers must be"),
        ({**GROUPED, "num_local_experts": 8}, "mixture of experts"),
        ({**GROUPED, "num_key_value_heads": 3}, "cannot share"),
        ({**GROUPED, "rope_theta": "high"}, "rope_theta must be a number"),
    ],
)
def test_configs_that_cannot_be_planned_are_refused(data, sentence):
    with pytest.raises(UserError, match=sentence):
        shape_from_config(data, "m")


@pytest.mark.parametrize("text", ["", "{", "[" * 100000, '{"hidden_size": NaN}', "\xff"])
def test_damaged_files_are_refused(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError):
        load_shape(tmp_path)


def test_missing_model_says_what_is_accepted(tmp_path):
    with pytest.raises(UserError, match="no config.json"):
        load_shape(tmp_path)
    with pytest.raises(UserError, match="There is no file"):
        load_shape(tmp_path / "none")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", **GROUPED}))
    assert load_shape(tmp_path / "config.json").name == tmp_path.name
