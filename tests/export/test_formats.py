"""Weight formats: what is stored, how closely it gives the original's logits, and how many bytes it takes."""

import numpy as np
import onnx
import pytest
import tiny_models
import torch
from test_architectures import logits

from edgekv.export import exporter, parity, quantise
from edgekv.policy import CachePolicy

FLOAT16 = onnx.TensorProto.FLOAT16


def export(source, target, weights):
    return exporter.export(str(source), target, exporter.Options(CachePolicy(element="fp32", boundary=32), None, weights, check_parity=False))


def compare(source, bundle, count=100):
    ids = tiny_models.random_text(count)
    return parity.compare(tiny_models.expected(source, ids), logits(bundle, ids), ids)


def initialisers(bundle):
    return {t.name: t for t in onnx.load(bundle.graph_path, load_external_data=False).graph.initializer}


@pytest.mark.parametrize(("weights", "most_kl"), [("fp16", 1e-5), ("int8", 5e-3), ("int4", 0.3)])
@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-odd-sizes"])
def test_logits_stay_close(name, weights, most_kl, tmp_path):
    source = tiny_models.make(tmp_path / "model", name)
    bundle = export(source, tmp_path / "bundle", weights)
    assert bundle.manifest["weights"]["format"] == weights
    assert 0 < compare(source, bundle).mean_kl < most_kl


@pytest.mark.parametrize("size", [3.0, 1e-2, 1e-5])
@pytest.mark.parametrize("bits", [4, 8])
def test_scales_are_numbers_of_half_precision(bits, size):
    weight = np.random.default_rng(1).normal(size=(40, 100)).astype(np.float32) * np.float32(size)
    scales = (quantise.quantise_with_offsets(weight) if bits == 4 else quantise.quantise(weight, bits)).scales
    half = scales.astype(np.float16)
    near = np.abs(half.astype(np.float32) - scales) <= 0.01 * scales
    assert (half == scales)[near].all() and (near.all() or size < 1e-4)


def test_blocks_of_a_4_bit_file_pass_as_they_are():
    """What GGUF's Q4_1 holds, code * d + m in half precision, keeps its codes and its d, and m to what four bits can say of the rest."""
    random = np.random.default_rng(2)
    codes = random.integers(0, 16, (30, 8, 32))
    codes[..., 0], codes[..., 1] = 0, 15
    d = random.uniform(0.005, 0.02, (30, 8, 1)).astype(np.float16).astype(np.float32)
    m = (-7.5 * d * random.uniform(0.9, 1.1, d.shape)).astype(np.float16).astype(np.float32)
    blocks = quantise.quantise_with_offsets((codes * d + m).astype(np.float32).reshape(30, 256))
    np.testing.assert_array_equal(blocks.scales[:, :8], d[..., 0])
    np.testing.assert_array_equal(quantise.unpack(blocks.codes.reshape(30, -1), 9 * 32, 4)[:, :256].reshape(30, 8, 32), codes)


# A table as small as this one stays in single precision in the integer formats.
@pytest.mark.parametrize(("weights", "bytes_per_weight"), [("fp32", 4), ("fp16", 2)])
def test_tied_embedding_is_stored_once(weights, bytes_per_weight, llama, tmp_path):
    untied = tiny_models.make(tmp_path / "untied", "llama")
    sizes = [(export(m, tmp_path / f"{i}", weights).folder / "model.onnx.data").stat().st_size for i, m in enumerate((untied, llama))]
    table = tiny_models.VOCAB * tiny_models.SHAPE["hidden_size"]
    assert sizes[0] - sizes[1] >= table * bytes_per_weight


def test_half_precision_halves_the_file(llama, tmp_path):
    sizes = {w: sum(np.prod(t.dims) * (2 if t.data_type == FLOAT16 else 4) for t in initialisers(export(llama, tmp_path / w, w)).values()
                    if t.data_type in (FLOAT16, onnx.TensorProto.FLOAT)) for w in ("fp32", "fp16")}  # fmt: skip
    assert 0.48 < sizes["fp16"] / sizes["fp32"] < 0.56


def test_narrow_layers_keep_single_precision(tmp_path):
    """A linear layer with one output must export, and gains nothing from 4 bits."""
    import onnx_ir as ir

    from edgekv.export import formats

    weight = np.random.default_rng(0).normal(size=(64, 1)).astype(np.float32)
    values = {name: ir.val(name, ir.DataType.FLOAT, shape) for name, shape in (("x", [1, 3, 64]), ("w", [64, 1]), ("y", [1, 3, 1]))}
    values["w"].const_value = ir.tensor(weight, name="w")
    node = ir.Node("", "MatMul", [values["x"], values["w"]], outputs=[values["y"]])
    graph = ir.Graph([values["x"]], [values["y"]], nodes=[node], initializers=[values["w"]], opset_imports={"": 21})
    model = ir.Model(graph, ir_version=10)
    formats.apply(model, "int4")
    assert [n.op_type for n in model.graph] == ["MatMul"]


def test_single_precision_bundle_of_a_bfloat16_checkpoint_is_exact(tmp_path):
    from transformers import AutoModelForCausalLM

    source = tiny_models.make(tmp_path / "model", "llama")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tiny_models.save(source, model)
    found = compare(source, export(source, tmp_path / "bundle", "fp32"))
    assert found.max_difference <= 1e-3
