"""Calibrating thin keys: what is seen of a model, what the closed form promises, and that refining never makes it worse."""

import numpy as np
import pytest
import torch
from tiny_models import make

from edgekv.export import exporter, load
from edgekv.export.thin import calibrate, stream
from edgekv.export.thin.attention import Scores, Session, attend, using
from edgekv.export.thin.make import load_model, starts_of
from edgekv.export.thin.maps import KeyMaps
from edgekv.export.thin.stream import LayerText

CHUNKS = torch.from_numpy(np.random.default_rng(5).integers(0, 256, (3, 48)))


@pytest.fixture(scope="module", params=["llama", "gemma2", "gpt2", "gptj"])
def model(request, tmp_path_factory):
    folder = make(tmp_path_factory.mktemp(request.param) / "model", request.param)
    source = load.find(str(folder))
    return source, load_model(source, 128)


def test_layers_are_seen_one_by_one_as_the_whole_model_runs_them(model):
    _, loaded = model
    want = {}
    for index, chunk in enumerate(CHUNKS):
        def tap(layer, module, q, k, v, scores, index=index):
            want[layer, index] = (q[0], k[0], scores)
        with torch.no_grad(), using(Session(tap=tap)):
            loaded(input_ids=chunk[None], use_cache=False)
    layers = 0
    for text in stream.layers(loaded, CHUNKS):
        for index in range(len(CHUNKS)):
            q, k, scores = want[text.layer, index]
            torch.testing.assert_close(text.q[index], q, atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(text.k[index], k, atol=1e-4, rtol=1e-4)
            assert text.scores == scores
        layers += 1
    assert layers == loaded.config.num_hidden_layers


@pytest.mark.parametrize("rank, value_dim", [(8, 16), (16, 16), (16, 12), (6, 24)])
def test_attention_through_maps_is_the_formula(rank, value_dim):
    random = torch.Generator().manual_seed(rank)
    q, k, v = (torch.randn(2, heads, 20, dim, generator=random) for heads, dim in ((4, 16), (2, 16), (2, value_dim)))
    found = KeyMaps(torch.randn(4, 16, rank, generator=random), torch.randn(2, 16, rank, generator=random))
    module = torch.nn.Module()
    module.layer_idx = 3
    with using(Session({3: found})):
        made, _ = attend(module, q, k, v)
    want = Scores(16**-0.5).logits(*found.apply(q, k)).softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(made, want.transpose(1, 2), atol=1e-5, rtol=1e-5)


def test_other_positions_change_keys_but_no_score(model):
    source, loaded = model
    geometry, _ = exporter.whole_geometry(source, 128, lambda stage, done, total: None, None)
    starts = [0, 40, 77]
    for plain, turned in zip(stream.layers(loaded, CHUNKS), stream.turned(stream.layers(loaded, CHUNKS), geometry, starts), strict=True):
        rotary = bool(geometry[plain.layer].inv_freq)
        assert torch.equal(plain.k, turned.k) != rotary
        torch.testing.assert_close(plain.scores.logits(plain.q, plain.k), turned.scores.logits(turned.q, turned.k), atol=1e-3, rtol=1e-3)
        if rotary:  # the model itself at these positions
            def tap(layer, module, q, k, v, scores, layer_wanted=plain.layer):
                if layer == layer_wanted:
                    found.append(k[0])
            found = []
            with torch.no_grad(), using(Session(tap=tap)):
                loaded(input_ids=CHUNKS[1][None], position_ids=(40 + torch.arange(48))[None], use_cache=False)
            torch.testing.assert_close(turned.k[1], found[0], atol=1e-3, rtol=1e-3)


def random_text(heads=2, group=2, dim=12, count=40, chunks=9, seed=0) -> LayerText:
    """Keys and queries with a few strong directions, as real ones have."""
    generator = torch.Generator().manual_seed(seed)
    strength = 0.7 ** torch.arange(dim).float()
    mix = torch.linalg.qr(torch.randn(heads, dim, dim, generator=generator))[0]
    k = torch.randn(chunks, heads, count, dim, generator=generator) * 3 * strength @ mix
    q = torch.randn(chunks, heads * group, count, dim, generator=generator) @ torch.randn(dim, dim, generator=generator) * 0.5
    return LayerText(0, q, k, Scores(0.4))


@pytest.mark.parametrize("rank", [2, 5, 11])
def test_the_closed_form_leaves_the_error_that_its_spectrum_says_and_no_map_leaves_less(rank):
    text = random_text()
    found = calibrate.moments(text)
    spectrum, full = calibrate.spectrum_and_maps(found, text.scores.scale, 2)
    maps = calibrate.cut(full, rank)

    def error(query, key):  # mean of (scale (q . k - qB . kA))^2 when queries and keys are independent
        gap = torch.eye(12) - key @ query[::2].transpose(1, 2)
        return torch.einsum("hab,hbc,hdc,had->h", gap.double(), found.queries, gap.double(), found.keys) * text.scores.scale**2

    best = error(maps.query, maps.key)
    np.testing.assert_allclose(best.numpy(), spectrum[:, rank:].sum(1), rtol=2e-2, atol=1e-6)
    generator = torch.Generator().manual_seed(1)
    for size in (1e-2, 1e-1):
        other = KeyMaps(*(x + size * x.abs().mean() * torch.randn(x.shape, generator=generator) for x in (maps.query, maps.key)))
        shared = other.query[::2].repeat_interleave(2, 0)
        assert (error(shared, other.key) >= best * (1 - 1e-6)).all()


def test_refining_lowers_the_divergence_on_text_it_has_not_seen():
    text = random_text()
    start = calibrate.cut(calibrate.closed_form_of(text)[1], 3)
    better = calibrate.refine(text, start, 60)
    assert calibrate.measure(text, better).attention_kl < calibrate.measure(text, start).attention_kl
    assert torch.equal(calibrate.refine(text, start, 0).key, start.key)
    again = calibrate.refine(text, start, 60)
    assert torch.equal(again.key, better.key) and torch.equal(again.query, better.query)


def test_whole_keys_have_no_error():
    text = random_text()
    whole = calibrate.cut(calibrate.closed_form_of(text)[1], 12)
    found = calibrate.measure(text, calibrate.refine(text, whole, 5))
    assert found.score_error < 1e-5 and abs(found.attention_kl) < 1e-6


def test_the_first_token_is_left_out():
    text = random_text()
    text.k[:, :, 0] *= 100
    plain = random_text()
    spectrum, outlier = calibrate.closed_form_of(text)[0], calibrate.closed_form_of(plain)[0]
    assert spectrum[:, 0].max() < 10 * outlier[:, 0].max()


def test_some_text_is_always_kept_for_measuring():
    assert [calibrate.held_out(0, 1)] == [False]
    assert [i for i in range(3) if calibrate.held_out(i, 3)] == [2]
    assert [i for i in range(17) if calibrate.held_out(i, 17)] == [7, 15]


def test_positions_are_spread_over_the_context():
    starts = starts_of(torch.zeros(5, 100, dtype=torch.int64), 1100)
    assert sorted(starts) == [0, 250, 500, 750, 1000]
    assert starts_of(torch.zeros(3, 100, dtype=torch.int64), 100) == [0, 0, 0]
