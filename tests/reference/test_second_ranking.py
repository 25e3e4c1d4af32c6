"""The second ranking in whole numbers: close to a softmax over the stored keys, within the bounds that kernels rely on."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.reference.attention import softmax_row
from edgekv.reference.self_index import ranking
from edgekv.reference.self_index.quantise import dequantise, quantise, unbiased
from edgekv.reference.self_index.transform import hadamard


@pytest.mark.parametrize("softcap", [0.0, 3.0])
@pytest.mark.parametrize("bits", [2, 4])
@given(st.sampled_from([32, 64, 80, 128]), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=20)
def test_weights_are_nearly_those_of_a_softmax_over_the_stored_keys(bits, softcap, dim, group, seed):
    rng = np.random.default_rng(seed)
    spread, query = rng.standard_normal((60, dim)).astype(np.float32), rng.standard_normal((group, dim)).astype(np.float32)
    means, interval = rng.standard_normal((3, dim)).astype(np.float32), np.sort(rng.integers(0, 3, 60))
    codes, pairs = quantise(np.abs(spread), bits)
    pairs = unbiased(np.abs(spread), codes, pairs)
    signs = np.where(spread >= 0, 1.0, -1.0)
    got = ranking.weights(ranking.scores(query, hadamard(query), codes, pairs, signs, bits, means, interval, dim**-0.5, softcap), softcap)
    keys = hadamard(signs * dequantise(codes, pairs, dim)) + means[interval]
    want = softmax_row(query[None], keys[None].astype(np.float32), np.ones((1, 60), bool), dim**-0.5, softcap)[0].sum(0)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0.12, atol=1e-4)


@given(st.integers(0, 99), st.sampled_from([2, 4]))
def test_whole_numbers_stay_within_what_kernels_can_add_up(seed, bits):
    rng = np.random.default_rng(seed)
    pairs = rng.uniform(-0.1, 1, (40, 4, 2)).astype(np.float16) * np.float16(10.0 ** rng.integers(-4, 4))
    codes = rng.integers(0, 2**bits, (40, 4, 32)).astype(np.uint8)
    keys, _ = ranking.whole_keys(codes, pairs, np.where(rng.random((40, 128)) < 0.5, 1, -1), bits)
    assert np.abs(keys).max() <= 127 and (keys % 2 == 1).all()
    queries, _ = ranking.whole_queries(rng.standard_normal((3, 128)).astype(np.float32) * np.float32(10.0 ** rng.integers(-20, 20)))
    assert np.abs(queries).max(1).tolist() == [64, 64, 64]


def test_numbers_that_hold_nothing_rank_nothing():
    assert not ranking.whole_queries(np.zeros((2, 8), np.float32))[0].any()
    keys, largest = ranking.whole_keys(np.zeros((1, 1, 32), np.uint8), np.zeros((1, 1, 2), np.float16), np.ones((1, 32)), 2)
    assert (keys == 1).all() and largest == [0]  # half a level of nothing


def test_exp2_is_accurate():
    x = np.linspace(-100, 60, 20001, dtype=np.float32)
    np.testing.assert_allclose(ranking.exp2(x), np.exp2(x.astype(np.float64)), rtol=2e-7)
