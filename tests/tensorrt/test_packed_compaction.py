"""The CUDA kernels that compact a compressed body, under emulation: the oracle's bytes, the CPU kernels' counters."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from emulated import EmulatedCache
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import compaction_params

from edgekv import layout
from edgekv.memory.traffic import compaction_traffic
from edgekv.reference.self_index import SelfIndexCache

WRITTEN = ("mean", "codebook", "code_seen", "sink_k", "sink_v", "tail_k", "tail_v", "index")


def positions(view: layout.StateView) -> list[list[int]]:
    return view.body_pos[:, : int(view.header["body_count"])].tolist()


def interval(cache: SelfIndexCache, ours: EmulatedCache, text: Text, position: int) -> None:
    """One interval on the oracle; the kernels compact a copy of the same bytes and must end with the same bytes."""
    p, rows = cache.params, cache.params["tail_slots"]
    part = slice(position, position + rows)
    cache.attend(text.q[part], text.k[part], text.v[part], position)
    ours.block[:] = cache.block
    got, want = ours.view, cache.state
    before, counted = positions(want), got.header["traffic"].copy()
    cache.compact(position + rows)
    ours.compact(position + rows)
    np.testing.assert_array_equal(ours.block[: layout.COMMITTED_HEADER_BYTES], cache.block[: layout.COMMITTED_HEADER_BYTES])
    assert positions(got) == positions(want)
    for name in WRITTEN:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    count = cache.count
    np.testing.assert_array_equal(got.payload[:, :count], want.payload[:, :count])
    for name in ("body_score", "body_seen"):
        np.testing.assert_allclose(getattr(got, name)[:, :count], getattr(want, name)[:, :count], atol=1e-4, err_msg=name)
    names = [layout.TRAFFIC.index(n) for n in ("compact_read", "compact_write")]
    moved = tuple((got.header["traffic"] - counted)[names].tolist())
    assert moved == compaction_traffic(p, before, positions(want), position + rows)


@given(compaction_params(), st.integers(1, 7), st.integers(0, 5), st.sampled_from([1.0, 1e-3, 300.0]), st.integers(0, 3))
@settings(max_examples=60)
def test_compaction_equals_the_oracle(library, params, boundaries, seed, size, order):
    library.order(order, seed)
    library.drop("")
    cache, ours = SelfIndexCache(params), EmulatedCache(library, params)
    text = Text(params, boundaries * params["tail_slots"], seed)
    text.k *= np.float32(size)
    for start in range(0, len(text.q), params["tail_slots"]):
        interval(cache, ours, text, start)


@pytest.mark.parametrize("score", ["attention", "keys"])
def test_long_bodies(emulated, score):
    """Several tiles and groups of moved tokens, real head sizes."""
    params = make_params(
        "heavy", 416, 64, "fp16", format=1, intervals=16, value_bits=2, sinks=20, window=128, q_heads=6, kv_heads=2, key_dim=80, value_dim=96, scale=0.1
    )
    params |= {"score": 1} if score == "keys" else {"observe": 40, "score_normalise": 1, "score_decay": 0.9}
    cache, ours = SelfIndexCache(params), EmulatedCache(emulated, params)
    text = Text(params, 64 * 9)
    for start in range(0, 64 * 9, 64):
        interval(cache, ours, text, start)
    assert int(cache.state.header["evicted"]) > 100


def test_groups_that_are_constant_or_not_finite(emulated):
    """Keys and values of zeros have scale 0; one that is no number must not reach another token."""
    params = make_params("full", 96, 32, format=1, intervals=8, key_dim=64, value_dim=64, value_bits=8, sinks=0)
    cache, ours, text = SelfIndexCache(params), EmulatedCache(emulated, params), Text(params, 64)
    text.k[:32], text.v[:32] = 0, 3
    interval(cache, ours, text, 0)
    interval(cache, ours, text, 32)
    assert (cache.state.code_seen.sum(-1) == 64).all()


def test_impossible_compactions_touch_nothing(emulated):
    params = make_params("full", 64, 32, format=1, intervals=3, key_dim=16, value_dim=16, sinks=4)
    cache, ours, text = SelfIndexCache(params), EmulatedCache(emulated, params), Text(params, 96)
    interval(cache, ours, text, 0)
    interval(cache, ours, text, 32)
    before = ours.block.copy()
    for position, sentence in ((96, "full"), (63, "boundaries")):
        with pytest.raises(RuntimeError, match=sentence):
            ours.compact(position)
    bounded = EmulatedCache(emulated, params | {"keep": 1})
    with pytest.raises(RuntimeError, match="boundary intervals"):
        bounded.compact(128)
    bounded.compact(96)  # a boundary, but not the next one: only the device can see that
    np.testing.assert_array_equal(ours.block, before)
    assert not bounded.view.header["body_count"]


def test_a_text_run_with_kernels_only_stays_with_the_oracle(emulated):
    """Prompt, retrieving steps of many sizes, rejected rows and compactions, all on the kernels' own state."""
    params = make_params("heavy", 96, 32, "fp16", format=1, intervals=64, value_bits=8, sinks=5, window=16, observe=16, key_dim=32, value_dim=32)
    text = Text(params, 420)
    cache, ours = SelfIndexCache(params), EmulatedCache(emulated, params)
    random, position = np.random.default_rng(1), 0
    while position < 390:
        room = 32 - position % 32
        rows = int(random.integers(1, min(room, 12) + 1))
        accepted, part = int(random.integers(1, rows + 1)), slice(position, position + rows)
        cache.retrieve = 20 if position > 150 else None
        ours.view.header["retrieve"] = cache.retrieve or 0
        slots = ours.retrieve(text.q[part], position)
        y = ours.attend(text.q[part], text.k[part], text.v[part], position, slots=slots)
        np.testing.assert_allclose(y, cache.attend(text.q[part], text.k[part], text.v[part], position), atol=1e-4)
        position += accepted
        if position % 32 == 0:
            cache.compact(position)
            ours.compact(position)
            assert positions(ours.view) == positions(cache.state)
            np.testing.assert_array_equal(ours.view.index, cache.state.index)
