"""Properties of the oracle itself, over random policies, blocks and rollbacks."""

import numpy as np
import pytest
from cache_cases import INV_FREQ, Runner, Text, bounded_params, dense_attention, make_params, repeat_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.errors import CacheFullError, UserError
from edgekv.layout import KEEPS, read_keys
from edgekv.reference import ReferenceCache
from edgekv.reference.rotary import rotate



@given(st.integers(0, 9), st.integers(1, 20), st.sampled_from([0, 9]), st.sampled_from([0.0, 3.0]))
@settings(max_examples=30)
def test_full_cache_is_plain_softmax_attention(seed, block, sliding_window, softcap):
    params = make_params(body=96, sliding_window=sliding_window, softcap=softcap)
    text = Text(params, 90, seed)
    y = Runner(params).feed(text, 90, block)
    where = np.arange(90)
    want = dense_attention(params, text.q, repeat_heads(params, text.k), repeat_heads(params, text.v), where, where)
    np.testing.assert_allclose(y, want, atol=2e-6)


@given(bounded_params(), st.integers(0, 3), st.integers(1, 40), st.integers(1, 40))
def test_blocks_do_not_matter(params, seed, first, second):
    text = Text(params, 150, seed)
    one, other = Runner(params), Runner(params)
    np.testing.assert_array_equal(one.feed(text, 150, first), other.feed(text, 150, second))
    assert one.cache.committed_hash(150) == other.cache.committed_hash(150)


@given(bounded_params(), st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12))
def test_rejected_rows_leave_no_trace(params, rounds):
    text, wrong = Text(params, 400, 0), Text(params, 400, 1)
    plain, speculating = Runner(params), Runner(params)
    for committed, rejected in rounds:
        room = params["tail_slots"] - speculating.position % params["tail_slots"]
        if rejected and room > 0:
            before = speculating.cache.committed_hash(speculating.position)
            speculating.speculate(wrong, min(rejected, room))
            assert speculating.cache.committed_hash(speculating.position) == before
        np.testing.assert_array_equal(speculating.feed(text, committed), plain.feed(text, committed))
        assert speculating.cache.committed_hash(plain.position) == plain.cache.committed_hash(plain.position)


@given(bounded_params(), st.integers(1, 200))
def test_slots_are_sorted_counted_and_empty_ones_carry_minus_one(params, n):
    runner = Runner(params)
    runner.feed(Text(params, n), n)
    cache, boundary = runner.cache, n // params["tail_slots"] * params["tail_slots"]
    kept = min(boundary, params["body_slots"])
    assert cache.count == kept
    assert cache.state.header["evicted"] == boundary - kept
    assert (np.diff(cache.state.body_pos[:, :kept], axis=1) > 0).all()
    assert (cache.state.body_pos[:, kept:] == -1).all()
    assert cache.tail_base == boundary
    sinks = min(params["sinks"], boundary)
    assert (cache.state.body_pos[:, :sinks] == np.arange(sinks)).all()


@given(bounded_params(), st.integers(1, 150))
def test_output_depends_on_nothing_but_visible_kept_tokens(params, n):
    """Attention equals dense attention over exactly the positions the state lists, whatever empty slots hold."""
    params = params | {"positions": 0, "element": 0}
    text = Text(params, n + 1)
    runner = Runner(params)
    runner.feed(text, n)
    cache = runner.cache
    cache.state.body_k[...] = np.where(np.arange(params["body_slots"]).reshape(-1, 1, 16) < cache.count, cache.state.body_k, 1e3)
    where = cache.positions(n - cache.tail_base)
    y = runner.speculate(text, 1)[0]
    group = params["q_heads"] // params["kv_heads"]
    for head in range(params["q_heads"]):
        kept = np.append(where[head // group], n)
        one = dense_attention(
            params, text.q[n:, head, None], text.k[kept, head // group, None], text.v[kept, head // group, None],
            np.array([n]), kept,
        )  # fmt: skip
        np.testing.assert_allclose(y[head], one[0, 0], atol=2e-6)


@given(bounded_params(positions=["original"]))
def test_shared_kv_heads_equal_repeated_ones(params):
    """Grouped queries: the same as every query head with a kv head of its own, when nothing is chosen by score."""
    params = params | {"keep": KEEPS["window"]}
    text = Text(params, 100)
    alone = params | {"kv_heads": params["q_heads"]}
    other = Text(alone, 100)
    other.q, other.k, other.v = text.q, repeat_heads(params, text.k), repeat_heads(params, text.v)
    np.testing.assert_allclose(Runner(params).feed(text, 100), Runner(alone).feed(other, 100), atol=2e-6)


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize(("element", "tolerance"), [("fp32", 2e-5), ("fp16", 2e-2)])
@pytest.mark.parametrize("keep", ["window", "heavy"])
def test_cache_positions_equal_rotation_from_scratch(keep, element, tolerance, interleaved):
    more = {"sinks": 4, "rotary_dim": 6, "rotary_interleaved": interleaved}
    more |= {"window": 16, "observe": 16} if keep == "heavy" else {}
    params = make_params(keep, 48, 16, element, "cache", **more)
    text = Text(params, 400)
    runner, raw = Runner(params), text.k.copy()
    inv_freq = np.array(INV_FREQ, np.float32)
    for start in range(0, 400, 16):
        ranks = int(runner.cache.state.header["rank_base"]) + np.arange(16)
        turned = rotate(raw[start : start + 16].transpose(1, 0, 2), ranks, inv_freq, 6, bool(interleaved))
        text.k[start : start + 16] = turned.transpose(1, 0, 2)
        runner.feed(text, 16)
        cache, count = runner.cache, runner.cache.count
        assert cache.state.header["rank_base"] == min(start + 16, 48)
        ranks = int(cache.state.header["rank_base"]) - count + np.arange(count)
        for head in range(2):
            kept = cache.state.body_pos[head, :count]
            want = rotate(raw[kept, head], ranks, inv_freq, 6, bool(interleaved))
            np.testing.assert_allclose(read_keys(cache.state.body_k, 0, count)[head], want, atol=tolerance)


@pytest.mark.parametrize("element", ["fp16", "fp32"])
def test_storage_rounds_to_the_element(element):
    params = make_params(element=element)
    text = Text(params, 16)
    runner = Runner(params)
    runner.feed(text, 16)
    dtype = np.float16 if element == "fp16" else np.float32
    np.testing.assert_array_equal(read_keys(runner.cache.state.body_k, 0, 16), text.k.transpose(1, 0, 2).astype(dtype))
    np.testing.assert_array_equal(runner.cache.state.body_v[:, :16], text.v.transpose(1, 0, 2).astype(dtype))


def test_a_full_cache_refuses_to_lose_a_token():
    params = make_params(body=32)
    runner, text = Runner(params), Text(params, 48)
    runner.feed(text, 47)
    before = runner.cache.committed_hash(47)
    with pytest.raises(CacheFullError, match="48 tokens do not fit 32 slots"):
        runner.feed(text, 1)
    assert runner.cache.committed_hash(47) == before


def test_misuse_is_refused():
    params = make_params("window", 32, sinks=4)
    text = Text(params, 64)
    cache = ReferenceCache(params)
    with pytest.raises(UserError, match="blocks end at boundaries"):
        cache.attend(text.q[:17], text.k[:17], text.v[:17], 0)
    with pytest.raises(UserError, match="does not lie in the boundary interval"):
        cache.attend(text.q[:1], text.k[:1], text.v[:1], 17)
    with pytest.raises(UserError, match="shapes"):
        cache.attend(text.q[:1, :1], text.k[:1], text.v[:1], 0)
    with pytest.raises(UserError, match="compaction is for boundaries"):
        cache.compact(5)
    with pytest.raises(UserError, match="other parameters"):
        ReferenceCache(params | {"sinks": 3}, block=cache.state.block).attend(text.q[:1], text.k[:1], text.v[:1], 0)
    with pytest.raises(UserError, match="one block of"):
        ReferenceCache(params, block=np.zeros(256, np.uint8))
