"""Sampling against a plain implementation that sorts everything."""

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import EdgekvError, UserError
from edgekv.generation.sampling import Sampler, SamplingOptions, nucleus, top_k_ids


def plainly(logits, o, seen=()):
    """The law by definition, in float64, with full sorts: probabilities [V]."""
    scores = logits.astype(np.float64)
    for token in set(seen):
        scores[token] = scores[token] / o.repetition_penalty if scores[token] > 0 else scores[token] * o.repetition_penalty
    order = np.lexsort((np.arange(scores.size), -scores.astype(np.float32)))
    kept = order[:1] if o.greedy else order
    if o.top_k and not o.greedy:
        kept = kept[: o.top_k]
    p = np.exp((scores[kept] - scores[order[0]]) / (o.temperature or 1.0))
    total = np.cumsum(p)
    p = p[: int(np.sum(total < o.top_p * total[-1])) + 1]
    p = p[p >= o.min_p]
    dense = np.zeros(scores.size)
    dense[kept[: p.size]] = p / p.sum()
    return dense


VOCABS = st.sampled_from([1, 2, 63, 64, 65, 200, 1000, 5000])


@given(
    VOCABS, st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 1.0, 2.0]), st.sampled_from([0, 1, 2, 7, 50, 300]),
    st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]), st.sampled_from([0.0, 0.05, 0.5, 1.0]), st.sampled_from([1.0, 1.3]),
    st.sampled_from([0.01, 1.0, 8.0]),
)  # fmt: skip
def test_distribution_is_the_definition(vocab, seed, temperature, top_k, top_p, min_p, penalty, spread):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, spread, vocab).astype(np.float32)
    seen = rng.integers(0, vocab, 5).tolist()
    options = SamplingOptions(temperature, top_k, top_p, min_p, penalty)
    sampler = Sampler(options, vocab, seed=0)
    sampler.observe(seen)
    before = logits.copy()
    got, wanted = sampler.distribution(logits), plainly(logits, options, seen)
    assert np.array_equal(logits, before)
    assert got.sum() == pytest.approx(1.0, abs=1e-12)
    # where the borders of top-p and min-p fall within rounding, one token may differ: its mass is then the difference
    different = (got > 0) != (wanted > 0)
    assert different.sum() <= 1
    assert np.abs(got - wanted)[~different].max(initial=0) <= (2e-6 if not different.any() else 1.0)


@given(VOCABS, st.integers(1, 6000), st.integers(0, 2**32))
def test_top_k_with_ties_goes_to_lower_ids(vocab, k, seed):
    scores = np.random.default_rng(seed).integers(-3, 3, vocab).astype(np.float32)
    assert np.array_equal(top_k_ids(scores, k), np.lexsort((np.arange(vocab), -scores))[:k])


@given(VOCABS, st.floats(0.001, 0.9999), st.integers(0, 2**32))
def test_nucleus_is_the_smallest_set(vocab, top_p, seed):
    weights = (0.01 + np.random.default_rng(seed).random(vocab)).astype(np.float32) ** 20
    weights /= weights.max()
    ids = nucleus(weights, top_p)
    total = weights.sum(dtype=np.float64)
    assert weights[ids].sum(dtype=np.float64) >= top_p * total * (1 - 1e-12)
    assert weights[ids[:-1]].sum(dtype=np.float64) < top_p * total * (1 + 1e-12)
    assert np.array_equal(ids, np.lexsort((np.arange(vocab), -weights))[: ids.size])


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(1.0), SamplingOptions(0.7, top_k=5), SamplingOptions(1.3, top_p=0.9), SamplingOptions(1.0, min_p=0.1)],
)
def test_draws_follow_the_distribution(options):
    """Chi-square over 60,000 draws; 99.99 % quantile, so that the fixed seed decides nothing but is the same every time."""
    logits = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -6.0], np.float32)
    sampler, draws = Sampler(options, logits.size, seed=1), 60_000
    p = sampler.distribution(logits)
    counts = np.bincount([sampler.sample(logits) for _ in range(draws)], minlength=logits.size)
    assert counts[p == 0].sum() == 0
    likely = p > 1e-3
    statistic = np.sum((counts[likely] - draws * p[likely]) ** 2 / (draws * p[likely]))
    degrees = likely.sum() - 1
    # Wilson and Hilferty's approximation of the chi-square quantile
    assert statistic < degrees * (1 - 2 / (9 * degrees) + 3.719 * np.sqrt(2 / (9 * degrees))) ** 3


def test_draws_from_a_whole_vocabulary_follow_the_distribution():
    """The search by blocks: probabilities of groups of tokens, and no token of weight zero, ever."""
    rng = np.random.default_rng(3)
    logits = rng.normal(0, 1, 5003).astype(np.float32)
    logits[rng.random(5003) < 0.5] = -np.inf
    sampler, draws = Sampler(SamplingOptions(1.0), logits.size, seed=2), 60_000
    p = sampler.distribution(logits)
    tokens = np.array([sampler.sample(logits) for _ in range(draws)])
    assert np.all(p[tokens] > 0)
    groups = np.arange(5003) // 100
    expected = draws * np.bincount(groups, p)
    statistic = np.sum((np.bincount(groups[tokens], minlength=51) - expected) ** 2 / expected)
    assert statistic < 97.0  # the 99.99 % quantile of chi-square with 50 degrees of freedom is 96.9


def test_seed_repeats_the_text_and_is_told():
    logits = np.random.default_rng(0).normal(size=1000).astype(np.float32)
    first = Sampler(SamplingOptions(1.0), 1000)
    again = Sampler(SamplingOptions(1.0), 1000, first.seed)
    other = Sampler(SamplingOptions(1.0), 1000)
    texts = [[s.sample(logits) for _ in range(50)] for s in (first, again, other)]
    assert texts[0] == texts[1] != texts[2]


def test_greedy_takes_the_lowest_of_equal_maxima():
    logits = np.zeros(100, np.float32)
    logits[[40, 70]] = 1.0
    assert Sampler(SamplingOptions(), 100, 0).sample(logits) == 40


def test_repetition_penalty_moves_greedy_on():
    sampler = Sampler(SamplingOptions(repetition_penalty=2.0), 4, 0)
    logits = np.array([3.0, 2.0, -1.0, -1.5], np.float32)
    assert [sampler.sample(logits) for _ in range(2)] == [0, 1]
    assert sampler.distribution(np.array([-1.0, -9.0, -1.0, -1.5], np.float32), also=[2])[3] == 1.0  # -2, -18, -2, -1.5
    sampler.forget()
    assert sampler.sample(logits) == 0


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_logits_that_are_no_numbers_are_an_error(bad):
    logits = np.zeros(10, np.float32)
    logits[3] = bad
    with pytest.raises(EdgekvError, match="not numbers"):
        Sampler(SamplingOptions(1.0), 10, 0).sample(logits)


def test_tokens_the_model_forbids_are_never_drawn():
    logits = np.full(100, -np.inf, np.float32)
    logits[[5, 6]] = 0.0
    for options in (SamplingOptions(1.0), SamplingOptions(1.0, top_k=50), SamplingOptions(1.0, top_p=0.999)):
        p = Sampler(options, 100, 0).distribution(logits)
        assert p[5] == p[6] == 0.5


@pytest.mark.parametrize(
    "wrong",
    [dict(temperature=-1), dict(temperature=float("nan")), dict(temperature=1e-9), dict(top_k=-1), dict(top_p=0), dict(top_p=1.1),
     dict(min_p=-0.1), dict(min_p=2), dict(repetition_penalty=0), dict(repetition_penalty=float("inf"))],
)  # fmt: skip
def test_pain_16_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(UserError, match="--"):
        SamplingOptions(**wrong)


def test_fast_enough_for_large_vocabularies():
    """A coarse guard against sorting 152k logits: that takes over 10 ms. The best of many runs belongs to the code, not the load."""
    logits = np.random.default_rng(0).normal(0, 3, 151_936).astype(np.float32)
    for options in (SamplingOptions(), SamplingOptions(0.8, top_k=40), SamplingOptions(0.8, top_p=0.9), SamplingOptions(0.8, 40, 0.95, 0.05, 1.1)):
        sampler, best = Sampler(options, logits.size, 0), 1.0
        for _ in range(30):
            start = time.perf_counter()
            sampler.sample(logits)
            best = min(best, time.perf_counter() - start)
        assert best < 4e-3, options
