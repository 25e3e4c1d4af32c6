"""The CUDA compaction kernels under emulation, against the oracle: which tokens stay, where they go, how keys are turned."""

import numpy as np
import pytest
from cache_cases import INV_FREQ, Runner, Text, bounded_params, make_params
from emulated import EmulatedCache
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout


def both(library, params, committed: int, seed: int = 0) -> tuple[Runner, EmulatedCache]:
    """An oracle one token before the compaction at `committed`, with the tail full, and a copy of its state for the kernels."""
    runner = Runner(params)
    text = Text(params, committed, seed)
    rows = params["tail_slots"]
    if committed > rows:
        runner.feed(text, committed - rows)
    runner.speculate(text, rows)
    runner.position = committed
    return runner, EmulatedCache(library, params, INV_FREQ if params.get("rotary_dim") else (), runner.cache.state.block)


def compact_both(runner: Runner, cache: EmulatedCache) -> None:
    runner.compact()
    cache.compact(runner.position, int(runner.cache.state.header["rank_base"]))


def assert_same_state(got: layout.StateView, want: layout.StateView, exact: bool) -> None:
    for name in ("tail_base", "rank_base", "evicted", "body_count"):
        assert got.header[name] == want.header[name], name
    count = int(want.header["body_count"])
    np.testing.assert_array_equal(got.body_pos[:, :count], want.body_pos[:, :count])
    scored = count if layout.keeps_scores(want.params) else 0
    np.testing.assert_allclose(got.body_score[:, :scored], want.body_score[:, :scored], atol=1e-5)
    np.testing.assert_allclose(got.body_seen[:, :scored], want.body_seen[:, :scored], rtol=1e-6)
    np.testing.assert_array_equal(got.body_v[:, :count], want.body_v[:, :count])
    keys, expected = (layout.read_keys(v.body_k, 0, count) for v in (got, want))
    if exact:
        np.testing.assert_array_equal(keys, expected)
    else:  # the last bit of a turned key may round the other way
        half = want.params["element"] == layout.ELEMENTS["fp16"]
        np.testing.assert_allclose(keys, expected, rtol=2e-3 if half else 1e-5, atol=2e-3 if half else 1e-5)


@given(bounded_params(), st.integers(1, 7), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=60)
def test_compaction_equals_the_oracle(library, params, boundaries, order, seed):
    library.order(order, seed)
    library.drop("")
    runner, cache = both(library, params, boundaries * params["tail_slots"], seed)
    compact_both(runner, cache)
    assert_same_state(cache.view, runner.cache.state, params["positions"] == layout.POSITIONS["original"])


@pytest.mark.parametrize("keep", ["window", "heavy", "heavy-by-keys"])
def test_long_bodies(emulated, keep):
    """Several tiles and several groups of moved tokens, real head sizes, many ties among the ranked."""
    params = make_params(
        keep.partition("-")[0], 416, 64, "fp16", "cache", sinks=4, q_heads=6, kv_heads=2, key_dim=72, value_dim=80, rotary_dim=6, scale=0.1
    )
    if keep == "heavy-by-keys":
        params |= {"window": 128, "score": 1}
    if keep == "heavy":
        params |= {"window": 128, "observe": 40, "score_normalise": 1, "score_decay": 0.9}
    runner, cache = both(emulated, params, 64 * 9)
    if keep == "heavy":  # queries of zeros see all tokens alike: equal scores, ties go to the lowest position
        for state in (runner.cache.state, cache.view):
            state.tail_q[:] = 0
            state.body_score[:, 100:300] = 0.25
            state.body_seen[:, 100:300] = 1
    compact_both(runner, cache)
    assert_same_state(cache.view, runner.cache.state, exact=False)


def test_full_keeps_everything_and_refuses_when_full(emulated):
    params = make_params("full", 64, 16)
    runner, cache = both(emulated, params, 64)
    compact_both(runner, cache)
    assert_same_state(cache.view, runner.cache.state, exact=True)
    before = cache.block.copy()
    with pytest.raises(RuntimeError, match="full"):
        cache.compact(80)
    np.testing.assert_array_equal(cache.block, before)


def test_impossible_compactions_touch_nothing(emulated):
    params = make_params("window", 32, 16, sinks=4)
    runner, cache = both(emulated, params, 64)
    before = cache.block.copy()
    for position, rank_base, sentence in ((63, 63, "boundaries"), (64, 20, "rank_base"), (64, 63, "rank_base")):
        with pytest.raises(RuntimeError, match=sentence):
            cache.compact(position, rank_base)
    cache.compact(96)  # a boundary, but not the next one: only the device can see that
    np.testing.assert_array_equal(cache.block, before)


def test_a_text_run_with_kernels_only_stays_with_the_oracle(emulated):
    """Steps of many sizes, rejected rows and compactions, all on the kernels' own state."""
    params = make_params("heavy", 48, 16, "fp32", "cache", sinks=2, window=16, observe=16, rotary_dim=6)
    text = Text(params, 400)
    want, got = Runner(params), EmulatedCache(emulated, params, INV_FREQ)
    random = np.random.default_rng(1)
    while want.position < 380:
        room = 16 - want.position % 16
        rows = int(random.integers(1, room + 1))
        accepted = int(random.integers(1, rows + 1))
        part = slice(want.position, want.position + rows)
        y = got.attend(text.q[part], text.k[part], text.v[part], want.position)
        np.testing.assert_allclose(y, want.speculate(text, rows), atol=5e-5)
        want.position += accepted
        if want.position % 16 == 0:
            compact_both(want, got)
            assert_same_state(got.view, want.cache.state, exact=False)
