"""Losses, their ranges and comparisons, and agreement, against sums done another way."""

import numpy as np
import pytest
import tiny_bundle

from edgekv.errors import CacheFullError
from edgekv.quality import agreement, perplexity
from edgekv.quality.perplexity import Scores

TEXT = np.random.default_rng(5).integers(0, 256, 300)


def one_by_one(session, ids):
    """The same quantities from single steps, in double precision, straight from the definition."""
    session.reset()
    losses, best = [], []
    for token, following in zip(ids, ids[1:], strict=False):
        row = session.step([token])[0].astype(np.float64)
        session.commit(1)
        losses.append(np.logaddexp.reduce(row) - row[following])
        best.append(int(row.argmax()))
    return np.array(losses), np.array(best)


@pytest.mark.parametrize("kind", ["full", "window"])
@pytest.mark.parametrize("rows", [5, 32])
def test_matches_the_definition_however_the_text_is_cut(request, session_of, kind, rows):
    bundle = request.getfixturevalue(kind)
    found = perplexity.score(session_of(bundle, rows), TEXT)
    losses, best = one_by_one(session_of(bundle), TEXT)
    np.testing.assert_allclose(found.loss, losses, atol=1e-4)
    assert (found.argmax == best).all()
    assert found.perplexity() == pytest.approx(np.exp(losses.mean()), rel=1e-5)


def test_a_model_that_knows_the_text(tmp_path, session_of):
    bundle = tiny_bundle.make(tmp_path / "b", attention=0.0, follows=tiny_bundle.follow("abcdefgh", then=ord("a")))
    ids = np.array([tiny_bundle.BOT, *b"abcdefgh"])
    # its logits are 30 for the right token and 0 for the others
    expected = np.log(np.exp(30.0) + tiny_bundle.VOCAB - 1) - 30.0
    np.testing.assert_allclose(perplexity.score(session_of(bundle, 8), ids).loss, expected, atol=1e-7)


def test_text_beyond_a_full_cache_is_an_error(tmp_path, session_of):
    bundle = tiny_bundle.make(tmp_path / "b", keep="full", kept=32)
    with pytest.raises(CacheFullError):
        perplexity.score(session_of(bundle, 8), TEXT)


@pytest.mark.parametrize("tokens", [2, 255, 256, 257, 5000])
def test_ranges_hold_every_scored_token_once(tokens):
    scores = Scores(np.arange(tokens - 1.0), np.zeros(tokens - 1, np.int64))
    covered = [i for start, stop in scores.ranges() for i in range(start, stop)]
    assert covered == list(range(1, tokens))


def test_perplexity_of_a_part():
    scores = Scores(np.array([1.0, 2.0, 3.0, 4.0]), np.zeros(4, np.int64))
    assert scores.perplexity(3) == pytest.approx(np.exp(3.5))  # tokens 3 and 4
    assert scores.perplexity(1, 3) == pytest.approx(np.exp(1.5))
    assert scores.perplexity(5) is None


def test_ratio_of_a_constant_difference_has_no_spread():
    base = np.random.default_rng(0).gamma(2.0, 1.0, 1000)
    ratio = perplexity.compare(Scores(base + 0.05, base.astype(int)), Scores(base, base.astype(int)))
    assert (ratio.ratio, ratio.low, ratio.high) == pytest.approx((np.exp(0.05),) * 3)


def test_intervals_hold_the_truth_about_as_often_as_they_say():
    rng, inside = np.random.default_rng(1), 0
    for _ in range(400):
        noise = rng.normal(0.02, 0.5, 64 * 30)
        noise += np.repeat(rng.normal(0, 0.1, 30), 64)  # what neighbouring tokens share
        ratio = perplexity.compare(Scores(noise, noise), Scores(np.zeros_like(noise), noise))
        inside += ratio.low <= np.exp(0.02) <= ratio.high
    assert 0.90 <= inside / 400 <= 0.98


def test_too_short_to_compare():
    losses = np.ones(2 * perplexity.BLOCK - 1)
    assert perplexity.compare(Scores(losses, losses), Scores(losses, losses)) is None


def test_agreement():
    ours, other = np.array([1, 2, 3, 4]), np.array([1, 9, 3, 9])
    a, b = Scores(np.zeros(4), ours), Scores(np.zeros(4), other)
    assert agreement.top1(a, b) == 0.5
    assert agreement.top1(a, b, start=4) == 0.0
    assert agreement.top1(a, b, start=5) is None
    assert agreement.top1(a, a) == 1.0
