"""Weight bytes by formula: against bundles that the exporter writes, and by hand."""

from __future__ import annotations

import pytest
import torch
import transformers
from memory_shapes import shape

from edgekv.memory.model import shape_from_bundle, shape_from_config
from edgekv.memory.weights import FORMATS, packed_extra, streams

PAGE = 4096


def save_model(folder, tied: bool):
    """A Hugging Face folder with random weights; returns its config."""
    from tokenizers import Tokenizer, models

    config = transformers.LlamaConfig(
        hidden_size=192, intermediate_size=416, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2, vocab_size=640,
        max_position_embeddings=512, tie_word_embeddings=tied, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    Tokenizer(models.BPE(vocab={f"t{i}": i for i in range(640)}, merges=[])).save(str(folder / "tokenizer.json"))
    return config


@pytest.mark.parametrize(("name", "tied"), [("fp16", False), ("int8", True), ("int4", True), ("int4", False)])
def test_formula_is_what_the_exporter_writes(name, tied, tmp_path):
    from edgekv.export.exporter import Options, export
    from edgekv.policy import CachePolicy

    config = save_model(tmp_path / "hf", tied)
    bundle = export(str(tmp_path / "hf"), tmp_path / "b", Options(CachePolicy(), None, weights=name, check_parity=False))
    planned = shape_from_config(config.to_dict(), "m")
    data = (bundle.folder / "model.onnx.data").stat().st_size
    tensors = 4 * (7 * 3 + 2) + 2 * 3 + 1  # each starts on a page of its own
    stored = FORMATS[name].stored_bytes(planned)
    assert stored - 4 * planned.vectors <= data <= stored + tensors * PAGE
    read = shape_from_bundle(bundle.folder)
    assert read.parameters == pytest.approx(planned.parameters, rel=0.01) and read.tied == planned.tied
    scale = bundle.weight_bytes / FORMATS[name].stored_bytes(read)
    assert sum(streams(read, FORMATS[name], "gpu").values()) == pytest.approx(FORMATS[name].step_bytes(planned) * scale, rel=0.02)


def test_int4_of_smollm2_by_hand():
    """576 columns are 18 blocks and one of offsets: 19 x (16 + 4) bytes and 10 of zero points per row; the head has 8 bits."""
    s = shape("smollm2")
    rows = 30 * (576 + 2 * 192 + 576 + 2 * 1536)
    down = 30 * 576 * ((48 + 2) * 20 + 25)
    head = 49152 * (18 * 36 + 18)
    assert FORMATS["int4"].step_bytes(s) == rows * (19 * 20 + 10) + down + head + 4 * s.vectors
    assert FORMATS["int4"].streams(s)["int8"] == head


def test_untied_embedding_is_stored_and_not_streamed():
    s = shape("qwen2.5-7b")
    assert FORMATS["fp16"].stored_bytes(s) - FORMATS["fp16"].step_bytes(s) == s.vocab * s.hidden * 2


def test_packing_turns_zero_points_into_sums_and_keeps_the_tied_table():
    s = shape("smollm2")
    packed = sum(FORMATS["int8"].packed_bytes(m) for m in s.matrices)
    assert packed == s.step_parameters // 32 * 40
    table = 49152 * (18 * 36 + 18)
    assert packed_extra(s, FORMATS["int8"]) == packed - sum(FORMATS["int8"].matrix_bytes(m) for m in s.matrices) + table
    assert packed_extra(shape("qwen2.5-7b"), FORMATS["fp32"]) == 0
