"""The parity gate: a sound bundle passes and carries its figures, a wrong one is not left behind."""

import numpy as np
import pytest
import tiny_models

from edgekv import machine
from edgekv.errors import UserError
from edgekv.export import exporter, graph, load, parity
from edgekv.export.passes import match
from edgekv.policy import CachePolicy, parse_budget


def options(**changes):
    return exporter.Options(**{"policy": CachePolicy(element="fp32", boundary=32), "budget": None, "weights": "fp32", **changes})


def test_figures_are_in_the_manifest(llama, tmp_path):
    bundle = exporter.export(str(llama), tmp_path / "bundle", options())
    figures = bundle.manifest["parity"]
    assert figures["tokens"] == parity.MOST_TOKENS
    assert figures["max_difference"] <= 1e-3
    assert figures["argmax_agreement"] == 1.0
    assert 0 <= figures["mean_kl"] < 1e-6
    assert figures["perplexity_bundle"] == pytest.approx(figures["perplexity_original"], rel=1e-4)


def test_bounded_cache_is_compared_within_its_budget(llama, tmp_path):
    policy = CachePolicy(keep="window", element="fp32", boundary=32)
    bundle = exporter.export(str(llama), tmp_path / "bundle", options(policy=policy, budget=parse_budget("128tok")))
    assert bundle.manifest["parity"]["tokens"] == 96
    assert bundle.manifest["parity"]["max_difference"] <= 1e-3


def test_switched_off(llama, tmp_path):
    assert exporter.export(str(llama), tmp_path / "bundle", options(check_parity=False)).manifest["parity"] is None


@pytest.mark.parametrize("weights", ["fp32", "int4"])
def test_pain_03_wrong_graph_fails_and_leaves_nothing(llama, tmp_path, monkeypatch, weights):
    def swapped(model, *args, original=graph.simplify, **kwargs):
        """A graph with a plausible mistake: sine and cosine exchanged in one layer."""
        rotations = original(model, *args, **kwargs)
        node = match.attentions(model)[0]
        cos, sin = node.inputs[5:7]
        node.replace_input_with(5, sin)
        node.replace_input_with(6, cos)
        return rotations

    monkeypatch.setattr(graph, "simplify", swapped)
    with pytest.raises(UserError, match="does not match the original on"):
        exporter.export(str(llama), tmp_path / "bundle", options(weights=weights))
    assert list(tmp_path.iterdir()) == []


def test_logits_that_are_no_numbers_fail():
    ids = np.arange(8)
    good = np.random.default_rng(0).normal(size=(8, 10)).astype(np.float32)
    bad = good.copy()
    bad[3, 4] = np.nan
    with pytest.raises(UserError, match="not numbers"):
        parity.judge(parity.compare(good, bad, ids % 10), parity.LIMITS["int4", "fp16"])


def test_figures_of_known_distributions():
    """Two tokens, vocabulary of two: KL of (1/2, 1/2) against (3/4, 1/4) is (ln 2/3 + ln 2) / 2."""
    original = np.zeros((2, 2), np.float32)
    ours = np.log(np.array([[0.75, 0.25]] * 2, np.float32))
    found = parity.compare(original, ours, np.array([0, 0]))
    assert found.mean_kl == pytest.approx(0.5 * np.log(2 / 3) + 0.5 * np.log(2), rel=1e-6)
    assert found.perplexity_original == pytest.approx(2.0)
    assert found.perplexity_bundle == pytest.approx(4 / 3, rel=1e-6)
    assert found.max_difference == pytest.approx(np.log(4), rel=1e-6)


def test_too_little_memory_is_said_before_any_work(llama, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "available_memory", lambda: 1000)
    with pytest.raises(UserError, match="--no-parity"):
        exporter.export(str(llama), tmp_path / "bundle", options())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("context", "factors"), [(512, "long"), (128, "short")])
def test_pain_12_longrope_uses_the_factors_of_its_context(context, factors, tmp_path):
    """Beyond the original 128 positions the long set, else the short one, from the first token on."""
    from test_architectures import logits

    source = tiny_models.make(tmp_path / "model", "phi3-longrope")
    bundle = exporter.export(str(source), tmp_path / "bundle", options(context=context, check_parity=True))
    assert bundle.manifest["parity"]["max_difference"] <= 1e-3
    ids = tiny_models.random_text(160 if factors == "long" else 100)  # transformers chooses by the length of the text
    assert np.abs(logits(bundle, ids) - tiny_models.expected(source, ids)).max() <= 1e-3
    config = load.find(str(source)).config
    first = 1.0 / config.rope_parameters[f"{factors}_factor"][0]
    assert bundle.manifest["inv_freq"][0][0] == pytest.approx(first, rel=1e-6)
