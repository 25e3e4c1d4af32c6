"""Bundles with thin keys: what they compute, the bytes they take, and what is refused."""

import json

import numpy as np
import onnx_ir as ir
import pytest
import torch
from click.testing import CliRunner
from tiny_models import expected, make, random_text
from transformers import AutoModelForCausalLM

from edgekv import layout
from edgekv.bundle import MANIFEST, open_bundle
from edgekv.cli import main
from edgekv.errors import BundleError, UserError
from edgekv.export import exporter, load, replan
from edgekv.export.parity import bundle_logits
from edgekv.export.thin import attention, map_file, ranks
from edgekv.export.thin.attention import Session, using
from edgekv.export.thin.make import KeyOptions
from edgekv.export.thin.maps import KeyMaps
from edgekv.export.thin.pairs import PairMaps
from edgekv.policy import CachePolicy, parse_budget

TOKENS, STEPS = 384, 3
EXACT = {"policy": CachePolicy(element="fp32"), "budget": None, "weights": "fp32", "context": 128}


def export(folder, target, rank="50%", form=None, **changes):
    wanted = KeyOptions(ranks.parse(rank) if rank else None, form, None, TOKENS, STEPS)
    return exporter.export(str(folder), target, exporter.Options(**{**EXACT, "keys": wanted, **changes}))


def random_maps(folder, heads, kv_heads, dim, rank, layers=2, orthogonal=False):
    """Maps saved beside a model; orthogonal: of full rank, so that they change no score."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for _ in range(layers):
        key = torch.randn(kv_heads, dim, dim, generator=generator)
        key = torch.linalg.qr(key)[0] if orthogonal else key * dim**-0.5
        made.append(KeyMaps(key.repeat_interleave(heads // kv_heads, 0)[..., :rank], key[..., :rank]))
    map_file.save(folder, made)
    return made


# the parity gate compares logits with the same maps in transformers, to 0.01 and a KL of 1e-5
@pytest.mark.parametrize("name", ["llama", "phi", "gptj", "gemma2", "gpt2", "opt", "smollm3"])
def test_a_thin_bundle_computes_what_the_model_with_the_same_maps_does(tmp_path, name):
    made = export(make(tmp_path / "model", name), tmp_path / "bundle")
    keys = made.manifest["keys"]
    assert keys["form"] == ("absorbed" if name in ("gpt2", "opt") else "projected")
    assert made.manifest["parity"]["max_difference"] < 1e-2
    for layer, rank in zip(made.layers, keys["ranks"], strict=True):
        params = layer["params"]
        assert params["key_dim"] == rank == params["value_dim"] // 2
        assert params["head_dim"] == (0 if keys["form"] == "absorbed" else params["value_dim"])
        planes = layout.planes(params)
        slots = params["body_slots"] + params["tail_slots"]
        assert sum(np.prod(planes[p][1]) * 4 for p in ("body_k", "tail_k")) == 4 * params["kv_heads"] * slots * rank
    assert keys["token_bytes"] * 2 == keys["token_bytes_whole"]
    assert len(keys["score_error"]) == len(keys["attention_kl"]) == len(made.layers)


# the parity gate as above; biases (qwen2), all three from one matrix (phi3), scaled tables (yarn), a part of the head rotated (stablelm),
# an MLP of the same input (phi, cohere)
@pytest.mark.parametrize("name, rank", [("llama", "50%"), ("qwen2", "25%"), ("phi3", "50%"), ("llama-yarn", "6"), ("gemma2", "auto:50%"), ("stablelm", "auto:90%"), ("phi", "75%"), ("cohere", "50%")])
def test_rotary_pairs_leave_the_graph(tmp_path, name, rank):
    made = export(make(tmp_path / "model", name), tmp_path / "bundle", rank=rank, form="pairs")
    keys = made.manifest["keys"]
    assert keys["form"] == "pairs" and made.manifest["parity"]["max_difference"] < 1e-2
    for layer, rank in zip(made.layers, keys["ranks"], strict=True):
        params = layer["params"]
        assert params["key_dim"] == rank < params["value_dim"] and params["fused_rotary"] == layout.BY_HEAD and params["head_dim"] == 0
    nodes = [node for node in ir.load(made.graph_path).graph if node.op_type == "BoundedCacheAttention"]
    gone = sum((p["q_heads"] + p["kv_heads"]) * (p["value_dim"] - p["key_dim"]) for p in (layer["params"] for layer in made.layers))
    original = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(tmp_path / "model").parameters())
    assert made.model["parameters"] == original - (made.model["hidden"] + (name in ("qwen2", "phi"))) * gone
    splits = {value.producer() for node in nodes for value in node.inputs[5:7]}
    assert len(splits) == 2 and {split.op_type for split in splits} == {"Split"}  # cos and sin, gathered for all layers at once


@pytest.mark.parametrize("policy, budget", [
    (CachePolicy(keep="window", element="fp32"), "64tok"), (CachePolicy(keep="heavy", element="fp32"), "80tok"),
    (CachePolicy(format="selfindex", value_bits=4, boundary=32), None),
])  # fmt: skip
def test_fewer_pairs_go_with_every_keep_rule_and_with_compression(tmp_path, policy, budget):
    made = export(make(tmp_path / "model", "llama"), tmp_path / "bundle", form="pairs", policy=policy, budget=budget and parse_budget(budget))
    again = replan.replan(made, tmp_path / "again", CachePolicy(element="fp32"), None)  # the parity check runs again
    assert again.manifest["keys"] == made.manifest["keys"] and again.layers[0]["params"]["fused_rotary"] == layout.BY_HEAD
    with pytest.raises(UserError, match="positions 'cache' cannot be had with fewer rotary pairs"):
        replan.replan(made, tmp_path / "turned", CachePolicy(keep="window", positions="cache"), parse_budget("64tok"))


def test_all_pairs_are_the_whole_key(tmp_path):
    folder = make(tmp_path / "model", "llama")
    made = export(folder, tmp_path / "bundle", rank="100%", form="pairs")
    ids = random_text(100)
    np.testing.assert_allclose(bundle_logits(made, ids), expected(folder, ids), atol=1e-3)


@pytest.mark.parametrize("name, rank, sentence", [
    ("llama", "7", "an even number of its 16 rotated numbers, which --key-rank 7 does not give"),
    ("gpt2", "50%", "a rotation is all that comes between a linear layer and the scores, and in layer 0 it is not"),
    ("qwen3", "50%", "a rotation is all that comes between a linear layer and the scores, and in layer 0 it is not"),
])  # fmt: skip
def test_pairs_that_cannot_be_left_out(tmp_path, name, rank, sentence):
    with pytest.raises(UserError, match=sentence):
        export(make(tmp_path / "model", name), tmp_path / "bundle", rank=rank, form="pairs")
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize("name, heads, kv_heads, dim", [("llama", 4, 2, 16), ("gpt2", 4, 4, 16)])
@pytest.mark.parametrize("form", [None, "projected"])
def test_maps_of_full_rank_leave_the_logits_alone(tmp_path, name, heads, kv_heads, dim, form):
    folder = make(tmp_path / "model", name)
    random_maps(folder, heads, kv_heads, dim, dim, orthogonal=True)
    made = export(folder, tmp_path / "bundle", rank=None, form=form, check_parity=False)
    ids = random_text(100)
    np.testing.assert_allclose(bundle_logits(made, ids), expected(folder, ids), atol=1e-3)


def test_absorbed_maps_equal_the_reconstructed_weights(tmp_path):
    """W_K replaced by W_K A B^T in transformers: what the smaller matrices stand for."""
    folder = make(tmp_path / "model", "gpt2")
    made = random_maps(folder, 4, 4, 16, 8)
    bundle = export(folder, tmp_path / "bundle", rank=None, check_parity=False)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for block, layer in zip(model.transformer.h, made, strict=True):
        both = torch.block_diag(*(layer.key @ layer.query.transpose(1, 2)))
        for rows in (block.attn.c_attn.weight.data, block.attn.c_attn.bias.data[None]):
            rows[:, 64:128] = rows[:, 64:128] @ both
    ids = random_text(100)
    with torch.no_grad():
        want = model(torch.from_numpy(ids)[None]).logits[0].numpy()
    np.testing.assert_allclose(bundle_logits(bundle, ids), want, atol=1e-4)


def test_maps_of_a_model_are_used_as_they_are(tmp_path):
    folder = make(tmp_path / "model", "llama")
    made = random_maps(folder, 4, 2, 16, 6)
    bundle = export(folder, tmp_path / "bundle", rank=None)
    ids = random_text(60)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention.NAME).eval()
    with torch.no_grad(), using(Session(dict(enumerate(made)))):
        want = model(torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    np.testing.assert_allclose(bundle_logits(bundle, ids), want, atol=1e-3)
    with pytest.raises(UserError, match="brings its own thin keys"):
        export(folder, tmp_path / "other")


@pytest.mark.parametrize("policy, budget", [
    (CachePolicy(keep="window", element="fp32"), "64tok"), (CachePolicy(keep="heavy", element="fp32"), "80tok"),
    (CachePolicy(format="selfindex", value_bits=4, boundary=32), None),
])  # fmt: skip
def test_thin_keys_go_with_every_keep_rule_and_with_compression(tmp_path, policy, budget):
    folder = make(tmp_path / "model", "llama")
    made = export(folder, tmp_path / "bundle", policy=policy, budget=budget and parse_budget(budget))
    assert all(p["params"]["key_dim"] == 8 for p in made.layers)
    ids = random_text(120)
    assert np.isfinite(bundle_logits(made, ids)).all()
    again = replan.replan(made, tmp_path / "again", CachePolicy(element="fp32"), None)  # the parity check runs again
    assert again.manifest["keys"] == made.manifest["keys"]
    with pytest.raises(UserError, match="positions 'cache' cannot be had"):
        replan.replan(made, tmp_path / "turned", CachePolicy(keep="window", positions="cache"), parse_budget("64tok"))


def test_maps_have_the_type_of_what_the_cache_stores(tmp_path):
    folder = make(tmp_path / "model", "llama")
    random_maps(folder, 4, 2, 16, 8)
    half = export(folder, tmp_path / "half", rank=None, policy=CachePolicy())

    def maps(bundle):
        held = {v.name: v.const_value for v in ir.load(bundle.graph_path).graph.initializers.values() if "_map" in v.name}
        assert sorted(held) == [f"layers.{layer}.{kind}_map" for layer in range(2) for kind in ("key", "query")]
        return {name: tensor.numpy() for name, tensor in held.items()}

    stored = maps(half)
    single = replan.replan(half, tmp_path / "single", CachePolicy(element="fp32"), None)
    once_more = replan.replan(half, tmp_path / "once more", CachePolicy(element="fp32"), None)  # from a file that two bundles share now
    again = replan.replan(single, tmp_path / "again", CachePolicy(format="selfindex", boundary=32), None)  # two nodes read query_map
    for found, dtype in ((stored, np.float16), (maps(single), np.float32), (maps(once_more), np.float32), (maps(again), np.float16)):
        for name, array in found.items():
            assert array.dtype == dtype
            np.testing.assert_array_equal(array, stored[name])

    with open(half.folder / "model.onnx.data", "r+b") as file:
        file.truncate(4096)
    with pytest.raises(BundleError, match="_map' cannot be read; export the model again"):
        replan.replan(half, tmp_path / "cut", CachePolicy(element="fp32"), None)


def test_one_budget_is_spread_over_the_layers(tmp_path):
    made = export(make(tmp_path / "model", "llama"), tmp_path / "bundle", rank="auto:50%")
    keys = made.manifest["keys"]
    assert keys["token_bytes"] <= keys["token_bytes_whole"] // 2
    assert all(rank % ranks.STEP == 0 for rank in keys["ranks"])


def test_spectra_decide_who_gets_how_much():
    steep, flat = np.array([[9.0] * 4 + [0.01] * 12]), np.array([[5.0] * 16])
    assert ranks.choose(ranks.parse("auto"), [(1, 16), (1, 16)], [steep, flat]) == [4, 12]
    assert ranks.choose(ranks.parse("25%"), [(2, 64), (1, 128)]) == [16, 32]
    assert ranks.choose(ranks.parse("7"), [(2, 64)]) == [7]


@pytest.mark.parametrize("text", ["0", "-3", "abc", "0%", "101%", "auto:0%", "auto25%", "25.5", ""])
def test_ranks_that_mean_nothing_are_refused(text):
    with pytest.raises(UserError, match="--key-rank takes"):
        ranks.parse(text)


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_what_cannot_be_is_refused_in_one_sentence(tmp_path):
    folder = make(tmp_path / "model", "llama")
    short = tmp_path / "short.txt"
    short.write_text("too short")
    for options, sentence in [
        (("--key-rank", "50%", "--key-form", "absorbed"), "does not commute with a rotation"),
        (("--key-rank", "50%", "--keep", "window", "--kv-budget", "64tok", "--positions", "cache"), "--positions original"),
        (("--key-rank", "50%", "--key-form", "pairs", "--keep", "window", "--kv-budget", "64tok", "--positions", "cache"), "original: each head turns at"),
        (("--key-rank", "50%", "--key-form", "pairs", "--key-steps", "5"), "pairs has none"),
        (("--key-form", "pairs"), "brings no thin keys; give --key-rank too"),
        (("--key-rank", "17"), "more than the 16 numbers"),
        (("--key-rank", "x"), "--key-rank takes"),
        (("--key-rank", "50%", "--key-text", short), "at least"),
        (("--key-rank", "50%", "--key-text", tmp_path / "none"), "cannot be read"),
        (("--key-tokens", "500"), "they need --key-rank"),
    ]:
        result = run("export", folder, "-o", tmp_path / "bundle", "--context", "128", "--key-steps", "0", *options) if "--key-rank" in options else run("export", folder, "-o", tmp_path / "bundle", *options)
        assert result.exit_code == 2 and sentence in result.output, (options, result.output)
        assert not (tmp_path / "bundle").exists()
    random_maps(folder, 4, 2, 16, 8)
    turned = ("--keep", "window", "--kv-budget", "64tok", "--positions", "cache")
    result = run("export", folder, "-o", tmp_path / "bundle", *turned)
    assert result.exit_code == 2 and "The thin keys of model need --positions original: keys that were mapped" in result.output
    save_pairs(folder)
    result = run("export", folder, "-o", tmp_path / "bundle", *turned)
    assert result.exit_code == 2 and "The thin keys of model need --positions original: each head turns" in result.output
    whole = (folder / map_file.FILE).read_bytes()
    for damaged in (b"nonsense", whole[:-8], b"\xff" * 7 + b"\x7f" + whole[8:], whole.replace(b"[2,4]", b"[2,9]")):
        (folder / map_file.FILE).write_bytes(damaged)
        result = run("export", folder, "-o", tmp_path / "bundle")
        assert result.exit_code == 2 and "is damaged" in result.output and "make it again with `edgekv finetune`" in result.output


def save_pairs(folder):
    """Pairs of a llama saved beside it."""
    map_file.save(folder, [PairMaps(torch.arange(4).repeat(2, 1), None)] * 2)


def test_the_manifest_says_what_the_layers_store(tmp_path):
    folder = make(tmp_path / "model", "llama")
    save_pairs(folder)
    path = export(folder, tmp_path / "bundle", rank=None, check_parity=False).folder / MANIFEST
    kept = json.loads(path.read_text())
    assert (kept["keys"]["form"], kept["keys"]["ranks"]) == ("pairs", [8, 8])
    for damage in ({"ranks": [-8, 0]}, {"ranks": [8, 9]}, *({"form": form} for form in ("latent", "projected", "absorbed"))):
        path.write_text(json.dumps({**kept, "keys": {**kept["keys"], **damage}}))
        with pytest.raises(BundleError, match="another form or other ranks"):
            open_bundle(path.parent)


def test_export_and_inspect_say_what_was_done(tmp_path):
    folder = make(tmp_path / "model", "llama")
    result = run("export", folder, "-o", tmp_path / "bundle", "--context", "128", "--key-rank", "25%", "--key-steps", "2", "--key-tokens", "300", "--weights", "fp32")
    assert result.exit_code == 0, result.output
    assert "Thin keys (projected): 4 numbers per key" in result.output
    shown = run("inspect", tmp_path / "bundle")
    assert "keys 4 of 16, values 16" in shown.output and "Thin keys" in shown.output
    assert json.loads(run("inspect", tmp_path / "bundle", "--json").output)["keys"]["ranks"] == [4, 4]
    assert run("export", tmp_path / "bundle", "-o", tmp_path / "other", "--key-rank", "50%").exit_code == 2
    model = load.find(str(folder))
    assert open_bundle(tmp_path / "bundle").manifest["keys"]["rank"] == "25%" and model.name == "model"
