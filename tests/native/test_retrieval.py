"""Steps on a compressed body against the NumPy oracle, which fills the states: the same slots, the same outputs within rounding."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import expect_slots, filled, oracle_step, packed_params, scan_scores, twin

from edgekv import layout, native
from edgekv.errors import NativeError
from edgekv.reference.self_index import SelfIndexCache, index_plane

pytestmark = pytest.mark.usefixtures("instruction_set")


def native_step(fields, text: Text, position: int, rows: int, state: np.ndarray, scored: bool = False, **more) -> tuple[np.ndarray, np.ndarray]:
    """Retrieval and attention: (slots, y)."""
    part = slice(position, position + rows)
    slots = native.retrieve(fields, text.q[part], position, state, scored=scored, **more)
    return slots, native.attend(fields, text.q[part], text.k[part], text.v[part], position, state, slots=slots, **more)


@given(packed_params(), st.integers(0, 300), st.integers(1, 16), st.integers(0, 70), st.integers(0, 300), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=25)
def test_slots_and_outputs_equal_the_oracle(params, n, rows, retrieve, candidates, threads, seed):
    cache, text = filled(params, n, seed)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    cache.state.header["retrieve"], cache.state.header["candidates"] = retrieve, candidates
    fields, state = native.LayerParams(**params), twin(cache)
    slots, y = native_step(fields, text, n, rows, state, threads=threads)
    if retrieve:
        expect_slots(cache, text, n, rows, slots, retrieve, candidates)
    else:
        assert slots.shape == (params["kv_heads"], rows, 0)
    want = oracle_step(cache, text, n, rows, slots if slots.size else None)
    np.testing.assert_allclose(y, want, atol=1e-4)
    np.testing.assert_array_equal(state[256:], cache.block[256:])
    assert native.state_hash(fields, state, n) == native.state_hash(fields, twin(cache), n)


@given(packed_params(), st.integers(100, 300), st.sampled_from([0, 5, 40]), st.integers(0, 150), st.integers(2, 16))
@settings(max_examples=15)
def test_a_row_of_a_block_has_the_slots_and_the_bits_it_has_alone(params, n, retrieve, candidates, rows):
    cache, text = filled(params, n)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    cache.state.header["retrieve"], cache.state.header["candidates"] = retrieve, candidates
    fields, block, single = native.LayerParams(**params), twin(cache), twin(cache)
    slots, y = native_step(fields, text, n, rows, block, threads=2)
    for row in range(rows):
        alone, z = native_step(fields, text, n + row, 1, single)
        np.testing.assert_array_equal(alone[:, 0], slots[:, row])
        np.testing.assert_array_equal(z[0], y[row])
        np.testing.assert_array_equal(native_step(fields, text, n + row, 1, single, scored=True)[1][0], y[row])
    assert native.state_hash(fields, block, n + rows) == native.state_hash(fields, single, n + rows)


def test_the_best_table_scores_by_brute_force_over_many_blocks():
    params = make_params("full", 4096, 256, format=1, intervals=16, key_dim=64, value_dim=64, sinks=20, q_heads=4, kv_heads=2)
    cache, text = filled(params, 2048 + 7)
    fields, state = native.LayerParams(**params), twin(cache)
    header = state[:256].view(layout.HEADER)[0]
    query = text.q[2055].reshape(2, 2, 64)
    scores = [scan_scores(cache, head, query[head]) for head in range(2)]
    for retrieve in (1, 31, 500, 2000, 2027, 2028, 5000):
        header["retrieve"] = retrieve
        slots = native.retrieve(fields, text.q[2055:2056], 2055, state)
        for head in range(2):
            np.testing.assert_array_equal(slots[head, 0], np.sort(np.lexsort((np.arange(2028), -scores[head]))[:retrieve]))


@pytest.mark.parametrize("spread", ["random", "one place", "alike", "rare"])
def test_the_best_of_a_long_text_however_its_scores_are_spread(spread):
    """A sample of the scores says where their threshold lies, and may be wrong."""
    count, tail = 20_000, 512
    params = make_params("full", 20_480, tail, format=1, intervals=40, key_dim=16, value_dim=4, q_heads=2, kv_heads=1)
    rng, cache, text = np.random.default_rng(len(spread)), SelfIndexCache(params), Text(params, 1)
    codes = rng.integers(0, 16, (count, 4), np.uint8)
    if spread == "one place":
        codes = codes[np.lexsort(codes.T)]
    elif spread == "alike":
        codes[:] = 5
    elif spread == "rare":
        codes[rng.random(count) > 0.002] = 5
    index_plane.write(cache.state.index, codes[None])
    cache.state.body_pos[:] = np.arange(20_480)
    cache.state.codebook[...] = rng.standard_normal(cache.state.codebook.shape)
    header = cache.state.header
    header["body_count"], header["evicted"], header["tail_base"], header["rank_base"] = count, 480, 20_480, 20_480
    fields, state, seen = native.LayerParams(**params), twin(cache), np.ones((1, count), bool)
    for cache.retrieve in (1, 2, 40, 96, 1500, 9999, 19_000, 19_999):
        state[:256].view(layout.HEADER)["retrieve"] = cache.retrieve
        slots = native.retrieve(fields, text.q[:1], 20_480, state)
        np.testing.assert_array_equal(slots[0, 0], cache.retrieved_slots(text.q[0].reshape(1, 2, 16), seen)[0])


@pytest.mark.parametrize("sliding", [0, 90])
def test_retrieving_everything_is_attending_to_everything(sliding):
    params = make_params("full", 320, 16, format=1, intervals=64, key_dim=64, value_dim=32, sinks=4, sliding_window=sliding)
    cache, text = filled(params, 300)
    fields, y = native.LayerParams(**params), []
    for retrieve in (0, 292, 10_000):
        cache.state.header["retrieve"] = retrieve
        y.append(native_step(fields, text, 300, 4, twin(cache))[1])
    np.testing.assert_array_equal(y[1], y[2])
    np.testing.assert_allclose(y[0], y[1], atol=0.15)  # scores from whole numbers
    assert np.abs(y[0] - y[1]).mean() < 0.03


@given(packed_params(), st.integers(60, 250), st.integers(1, 16))
@settings(max_examples=10)
def test_rejected_rows_leave_no_trace(params, n, rows):
    cache, text = filled(params, n)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    cache.state.header["retrieve"], cache.state.header["candidates"] = 9, 18
    fields, state = native.LayerParams(**params), twin(cache)
    before = native.state_hash(fields, state, n)
    wrong = Text(params, n + 48, 77)
    native_step(fields, wrong, n, rows, state)
    assert native.state_hash(fields, state, n) == before
    for got, want in zip(native_step(fields, text, n, 1, state), native_step(fields, text, n, 1, twin(cache))):
        np.testing.assert_array_equal(got, want)


def test_wrong_slots_are_refused_and_change_nothing():
    params = make_params("full", 320, 16, format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    cache, text = filled(params, 100)
    fields, state = native.LayerParams(**params), twin(cache)
    for slots, sentence in (([[[92]], [[0]]], "between -1 and 91"), ([[[0]], [[-2]]], "between -1 and 91"), ([[[0]]], "shape")):
        with pytest.raises(NativeError, match=sentence):
            native.attend(fields, text.q[100:101], text.k[100:101], text.v[100:101], 100, state, slots=np.array(slots, np.int32))
    dense = make_params()
    plain, other = native.LayerParams(**dense), Text(dense, 1)
    with pytest.raises(NativeError, match="this cache is dense"):
        native.attend(plain, other.q, other.k, other.v, 0, native.new_state(plain), slots=np.zeros((2, 1, 1), np.int32))
    with pytest.raises(NativeError, match="this cache is dense"):
        native.retrieve(plain, other.q, 0, native.new_state(plain))
    np.testing.assert_array_equal(state, cache.block)
