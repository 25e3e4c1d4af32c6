"""What an architecture needs and edgekv lacks is refused by name, before anything is written."""

import json

import pytest
import tiny_models
from transformers import CONFIG_MAPPING

from edgekv.errors import UserError
from edgekv.export import exporter
from edgekv.policy import CachePolicy

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 260}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
CASES = {
    "bloom": ("bloom", {}, "ALiBi"),
    "mpt": ("mpt", {}, "ALiBi"),
    "falcon with ALiBi": ("falcon", {"alibi": True}, "ALiBi"),
    "deepseek": ("deepseek_v3", {}, "multi-head latent attention"),
    "gpt-oss": ("gpt_oss", {}, "attention sinks"),
    "mamba": ("mamba", {}, "state-space"),
    "rwkv": ("rwkv", {}, "recurrent"),
    "jamba": ("jamba", {}, "layers of the kind linear_attention"),
    "falcon-h1": ("falcon_h1", {}, "layers of the kind hybrid"),
    "t5": ("t5", {}, "cross attention"),
    "gpt2 with cross attention": ("gpt2", {"add_cross_attention": True}, "cross attention"),
    "dynamic rope": ("llama", {"rope_parameters": DYNAMIC}, "dynamic NTK"),
    "gemma3 with images": ("gemma3", {}, "inputs other than text"),
    "mixtral": ("mixtral", {}, "a mixture of experts"),
    "qwen2-moe": ("qwen2_moe", {}, "a mixture of experts"),
    "gpt-neo": ("gpt_neo", {}, "attention interface"),
}


def only_config(folder, kind, fields):
    folder.mkdir()
    config = CONFIG_MAPPING[kind](**fields)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return folder


def export(source, target, **options):
    return exporter.export(str(source), target, exporter.Options(CachePolicy(), None, check_parity=False, **options))


@pytest.mark.parametrize("case", CASES)
def test_feature_that_edgekv_lacks_is_named(case, tmp_path):
    kind, fields, words = CASES[case]
    source = only_config(tmp_path / "model", kind, fields)
    with pytest.raises(UserError) as refused:
        export(source, tmp_path / "bundle")
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model"]


@pytest.mark.parametrize(("kind", "words"), [("bert", "not causal"), ("nemotron_h", "layers of the kind linear_attention"), ("falcon", "attention interface")])
def test_feature_found_in_the_model_is_named(kind, words, tmp_path):
    source = only_config(tmp_path / "model", kind, SMALL)
    tiny = tiny_models.make(tmp_path / "other", "llama")
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((tiny / name).read_bytes())
    with pytest.raises(UserError) as refused:
        export(source, tmp_path / "bundle")
    assert words in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "bundle").exists()


def test_quantised_checkpoint_is_refused(tmp_path):
    source = only_config(tmp_path / "model", "llama", SMALL)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(UserError, match="already quantised .gptq."):
        export(source, tmp_path / "bundle")


def test_context_beyond_the_trained_range_is_refused(tmp_path):
    source = tiny_models.make(tmp_path / "model", "llama")
    with pytest.raises(UserError, match="more than the 512 positions"):
        export(source, tmp_path / "bundle", context=513)


def test_cache_positions_without_rotary_positions_are_refused(tmp_path):
    source = tiny_models.make(tmp_path / "model", "gpt2")
    from edgekv.policy import parse_budget

    policy = CachePolicy(keep="window", positions="cache")
    with pytest.raises(UserError, match="needs rotary positions in every layer"):
        exporter.export(str(source), tmp_path / "bundle", exporter.Options(policy, parse_budget("128tok"), check_parity=False))
    assert not (tmp_path / "bundle").exists()
