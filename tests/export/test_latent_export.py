"""Bundles with latent keys: what they compute, the bytes they take, and what is refused."""

import json
import shutil

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from tiny_models import expected, make, random_text

from edgekv import layout
from edgekv.bundle import MANIFEST, open_bundle
from edgekv.cli import main
from edgekv.errors import UserError
from edgekv.export import exporter, replan
from edgekv.export.parity import bundle_logits
from edgekv.export.thin import calibrate, latent, ranks
from edgekv.export.thin.attention import Scores
from edgekv.export.thin.make import KeyOptions
from edgekv.export.thin.rotation import rotated
from edgekv.export.thin.stream import LayerText
from edgekv.geometry import LayerGeometry
from edgekv.policy import CachePolicy, parse_budget

EXACT = {"policy": CachePolicy(element="fp32", boundary=32), "budget": None, "weights": "fp32", "context": 128}


def export(folder, target, rank="50%", **changes):
    return exporter.export(str(folder), target, exporter.Options(**{**EXACT, "keys": KeyOptions(ranks.parse(rank), "latent", None, 384, 3), **changes}))


# the parity gate compares logits with the same maps in transformers beyond the first boundary, to 0.01 and a KL of 1e-5
@pytest.mark.parametrize("name", ["llama", "phi", "gemma2", "qwen3", "mistral", "gpt2", "smollm3"])
def test_a_latent_bundle_computes_what_the_model_with_the_same_maps_does(tmp_path, name):
    folder = make(tmp_path / "model", name)
    made = export(folder, tmp_path / "bundle")
    keys, ids = made.manifest["keys"], random_text(100)
    assert keys["form"] == "latent" and made.manifest["parity"]["max_difference"] < 1e-3
    assert keys["token_bytes"] * 2 == keys["token_bytes_whole"] and made.latent and made.first_loss == 32
    for layer, rank in zip(made.layers, keys["ranks"], strict=True):
        p = layer["params"]
        assert p["latent"] == rank == p["kv_heads"] * p["key_dim"] // 2
        planes = layout.planes(p)
        assert np.prod(planes["body_k"][1]) == 0 and np.prod(planes["body_z"][1]) == p["body_slots"] * rank
    difference = np.abs(bundle_logits(made, ids) - expected(folder, ids)).max(-1)
    assert difference[:32].max() < 1e-3 < difference[32:].max()  # whole keys up to the first boundary


@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
def test_full_rank_leaves_the_logits_alone(tmp_path, name):
    folder = make(tmp_path / "model", name)
    ids = random_text(120)
    made = export(folder, tmp_path / "bundle", rank="100%")
    np.testing.assert_allclose(bundle_logits(made, ids), expected(folder, ids), atol=1e-3)


@pytest.mark.parametrize("policy, budget", [
    (CachePolicy(keep="window", element="fp32"), "64tok"), (CachePolicy(keep="heavy", score="keys", element="fp32"), "80tok"),
])  # fmt: skip
def test_latent_keys_go_with_keep_rules_and_another_cache(tmp_path, policy, budget):
    made = export(make(tmp_path / "model", "llama"), tmp_path / "bundle", policy=policy, budget=parse_budget(budget))
    assert np.isfinite(bundle_logits(made, random_text(120))).all()
    again = replan.replan(made, tmp_path / "again", CachePolicy(element="fp32", boundary=64), None)  # the parity check runs again
    assert again.manifest["keys"] == made.manifest["keys"] and again.latent


@pytest.mark.parametrize("name", ["llama", "phi", "gpt2"])
@pytest.mark.parametrize("policy, budget", [
    (CachePolicy(format="selfindex", element="fp32", boundary=32, value_bits=8, sinks=0), None),
    (CachePolicy(keep="window", format="selfindex", element="fp32", boundary=32, value_bits=8), "64tok"),
])  # fmt: skip
def test_latent_keys_go_into_a_compressed_cache(tmp_path, name, policy, budget):
    folder, ids = make(tmp_path / "model", name), random_text(100)
    made = export(folder, tmp_path / "bundle", policy=policy, budget=parse_budget(budget) if budget else None)  # its parity check runs
    assert made.latent and made.compressed and made.first_loss == 32 and made.manifest["policy"]["rerank"] == 1
    for layer in made.layers:
        p = layer["params"]
        assert layout.packs_latents(p) and made.manifest["keys"]["token_bytes"] == len(made.layers) * layout.latent_bytes(p)
    logits = bundle_logits(made, ids)
    assert np.abs(logits[:32] - expected(folder, ids)[:32]).max() < 1e-3
    dense = replan.replan(made, tmp_path / "dense", CachePolicy(element="fp32", boundary=32), None)
    again = replan.replan(dense, tmp_path / "again", policy, parse_budget(budget) if budget else None)
    np.testing.assert_array_equal(bundle_logits(again, ids), logits)
    if budget is None:
        assert np.abs(logits - bundle_logits(dense, ids)).mean() < 0.25


def test_one_budget_is_spread_by_measured_divergence(tmp_path):
    keys = export(make(tmp_path / "model", "llama"), tmp_path / "bundle", rank="auto:50%").manifest["keys"]
    assert keys["token_bytes"] <= keys["token_bytes_whole"] // 2 and all(rank % ranks.STEP == 0 for rank in keys["ranks"])


def test_curves_decide_who_gets_how_much():
    steep = [(4, 9.0), (8, 1.0), (16, 0.0)]
    flat = [(4, 3.0), (8, 2.0), (16, 0.0)]
    assert ranks.by_curves(0.5, [(1, 16), (1, 16)], [steep, flat]) == [8, 8]
    assert ranks.by_curves(0.625, [(1, 16), (1, 16)], [steep, flat]) == [8, 12]
    assert ranks.by_curves(1.0, [(1, 16), (1, 16)], [steep, flat]) == [16, 16]
    bent = [(4, 1.0), (8, 5.0), (16, 0.0)]  # what lies above the line between its neighbours is no reason to stop there
    assert ranks.by_curves(0.5, [(1, 16), (1, 16)], [steep, bent]) == [12, 4]


def text_of(g: LayerGeometry, count=160, chunks=17):
    generator = torch.Generator().manual_seed(2)
    mix = torch.randn(g.kv_heads * g.key_dim, g.kv_heads * g.key_dim, generator=generator) * 0.8 ** torch.arange(g.kv_heads * g.key_dim)[:, None]
    plain = (torch.randn(chunks, count, g.kv_heads * g.key_dim, generator=generator) @ mix + 2).unflatten(-1, (g.kv_heads, g.key_dim)).transpose(1, 2)
    q = torch.randn(chunks, g.q_heads, count, g.key_dim, generator=generator) @ torch.randn(g.key_dim, g.key_dim, generator=generator) * 0.3 + 0.5
    return LayerText(0, rotated(q, g), rotated(plain, g), Scores(g.scale))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary", [0, 6, 12])
def test_calibration_rebuilds_keys_and_refining_lowers_the_divergence(rotary, interleaved):
    g = LayerGeometry(4, 2, 12, 12, 0.3, rotary_dim=rotary, rotary_interleaved=interleaved, inv_freq=tuple(0.5**i for i in range(rotary // 2)))
    text = text_of(g)
    full = latent.closed_form(text, g)
    torch.testing.assert_close(full.apply(text.q, text.k)[1], text.k, atol=1e-3, rtol=1e-3)
    assert torch.equal(latent.cut(full, 24).encoder, torch.eye(24))
    errors = [calibrate.measure(text, latent.cut(full, rank)).attention_kl for rank in (4, 12, 20)]
    assert errors[0] > errors[1] > errors[2] > 0
    start = latent.cut(full, 8)
    better = calibrate.refine(text, start, 60)
    assert calibrate.measure(text, better).attention_kl < calibrate.measure(text, start).attention_kl
    encode, decode = better.arrays()
    assert encode.shape == (24, 8) and decode.shape == (2, 9, 12)


def test_pairs_that_no_query_looks_at_take_no_number():
    g = LayerGeometry(2, 1, 8, 8, 0.3, rotary_dim=8, inv_freq=(1.0, 0.5, 0.2, 0.1))
    text = text_of(g)
    text.q[..., [1, 5]] = 0  # both halves of a pair
    maps = latent.cut(latent.closed_form(text, g), 6)
    assert calibrate.measure(text, maps).attention_kl < 1e-5


def run(*arguments):
    return CliRunner().invoke(main, [str(a) for a in arguments])


def test_what_cannot_be_is_refused_in_one_sentence(tmp_path):
    folder = make(tmp_path / "model", "llama")
    turned = make(tmp_path / "turned", "gptj")
    options = ("-o", tmp_path / "bundle", "--context", "128", "--key-steps", "0", "--key-form", "latent", "--key-rank")
    for model, more, sentence in [
        (folder, ("50%", "--cache", "selfindex", "--key-bits", "2"), "key magnitudes"), (folder, ("50%", "--cache", "selfindex", "--rerank", "2"), "rerank must be 1"),
        (folder, ("50%", "--cache", "selfindex", "--keep", "heavy", "--score", "keys", "--kv-budget", "96tok"), "cannot be ranked"),
        (folder, ("50%", "--keep", "heavy", "--kv-budget", "64tok"), "the score 'keys'"),
        (folder, ("50%", "--keep", "window", "--kv-budget", "64tok", "--positions", "cache"), "--positions original"),
        (folder, ("33",), "more than the 32 numbers"), (turned, ("50%",), "was not recognised in the graph"),
    ]:  # fmt: skip
        result = run("export", model, *options, *more)
        assert result.exit_code == 2 and sentence in result.output, (more, result.output)
        assert not (tmp_path / "bundle").exists()


def test_export_inspect_run_and_profile_say_what_was_done(tmp_path):
    folder, bundle = make(tmp_path / "model", "llama"), tmp_path / "bundle"
    result = run("export", folder, "-o", bundle, "--context", "128", "--key-rank", "25%", "--key-form", "latent", "--key-steps", "2", "--key-tokens", "300", "--weights", "fp32")
    assert result.exit_code == 0 and "Thin keys (latent): 8 numbers for the keys of all kv heads" in result.output, result.output
    shown = run("inspect", bundle)
    assert "keys 16 (8 latent numbers per token)" in shown.output.replace("\n", " ") and "Thin keys" in shown.output
    assert json.loads(run("inspect", bundle, "--json").output)["keys"]["ranks"] == [8, 8]
    assert open_bundle(bundle).manifest["keys"]["token_bytes"] == 2 * 8 * 2
    result = run("build", bundle, "-o", tmp_path / "engine", "--dry-run")
    assert result.exit_code == 2


@pytest.fixture(scope="module")
def latent_bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("latent")
    return export(make(folder / "model", "llama"), folder / "bundle", check_parity=False).folder


@pytest.mark.parametrize("section, damage", [
    *(("layers", damage) for damage in ({"latent": 0}, {"latent": 33}, {"latent": -4}, {"latent": 7}, {"latent": "8"}, {"format": 1}, {"head_dim": 16}, {"fused_rotary": 0})),
    *(("keys", damage) for damage in ({"form": 7}, {"ranks": [8]}, {"ranks": None}, {"ranks": [8, 9]}, {"ranks": [-8, 0]}, {"form": "pairs"}, {"form": "projected"}, {"token_bytes": 0}, {"token_bytes_whole": "x"}, {"attention_kl": [1.0]}, {"score_error": None})),
])  # fmt: skip
def test_a_damaged_manifest_is_refused(latent_bundle, tmp_path, section, damage):
    path = shutil.copytree(latent_bundle, tmp_path / "bundle") / MANIFEST
    manifest = json.loads(path.read_text())
    part = manifest["keys"] if section == "keys" else manifest["layers"][1]["params"]
    part |= damage
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError):
        open_bundle(path.parent)
