"""Compaction of a compressed body: the library against the oracle, bit for bit, and the bytes that it counts."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import compaction_params

from edgekv import layout, native
from edgekv.errors import CacheFullError, NativeError
from edgekv.memory.traffic import compaction_traffic
from edgekv.reference.self_index import SelfIndexCache

WRITTEN = ("mean", "codebook", "code_seen", "sink_k", "sink_v", "tail_k", "tail_v")


def positions(view: layout.StateView) -> list[list[int]]:
    return view.body_pos[:, : int(view.header["body_count"])].tolist()


def step_both(cache: SelfIndexCache, block: np.ndarray, text: Text, position: int) -> None:
    """One interval on the oracle; the library compacts a copy of the same bytes and must end with the same bytes."""
    p, rows = cache.params, cache.params["tail_slots"]
    part = slice(position, position + rows)
    cache.attend(text.q[part], text.k[part], text.v[part], position)
    block[:] = cache.block
    got, want = layout.StateView(p, block), cache.state
    before = positions(want)
    counted = got.header["traffic"].copy()
    cache.compact(position + rows)
    native.compact(native.LayerParams(**p), block, position + rows, threads=2)
    np.testing.assert_array_equal(block[: layout.COMMITTED_HEADER_BYTES], cache.block[: layout.COMMITTED_HEADER_BYTES])
    assert positions(got) == positions(want)
    count = cache.count
    for name in WRITTEN:
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
    np.testing.assert_array_equal(got.index, want.index)
    np.testing.assert_array_equal(got.payload[:, :count], want.payload[:, :count])
    for name in ("body_score", "body_seen"):
        np.testing.assert_allclose(getattr(got, name)[:, :count], getattr(want, name)[:, :count], atol=1e-4, err_msg=name)
    names = [layout.TRAFFIC.index(n) for n in ("compact_read", "compact_write")]
    moved = tuple((got.header["traffic"] - counted)[names].tolist())
    assert moved == compaction_traffic(p, before, positions(want), position + rows)


@given(compaction_params(), st.integers(1, 7), st.integers(0, 5), st.sampled_from([1.0, 1e-3, 300.0]))
@settings(max_examples=60, deadline=None)
def test_compaction_equals_the_oracle(params, boundaries, seed, size):
    cache = SelfIndexCache(params)
    block = native.new_state(native.LayerParams(**cache.params))
    text = Text(params, boundaries * params["tail_slots"], seed)
    text.k[:, :, ::3] += 2.0  # some numbers of a key are much larger than others
    text.k *= np.float32(size)
    text.v *= np.float32(size)
    text.q /= np.float32(size)
    text.v[::5] = 1.0  # constant groups
    for position in range(0, boundaries * params["tail_slots"], params["tail_slots"]):
        step_both(cache, block, text, position)


def test_a_full_body_refuses_and_stays_as_it_is():
    params = make_params("full", 32, 16, format=1, intervals=8, sinks=4)
    fields, text = native.LayerParams(**params), Text(params, 64)
    state = native.new_state(fields)
    for end in (16, 32, 48):
        part = slice(end - 16, end)
        native.attend(fields, text.q[part], text.k[part], text.v[part], end - 16, state)
        before = state.copy()
        if end < 48:
            native.compact(fields, state, end)
    with pytest.raises(CacheFullError):
        native.compact(fields, state, 48)
    np.testing.assert_array_equal(state, before)


def test_a_text_of_more_intervals_than_means_is_refused():
    params = make_params("window", 32, 16, format=1, intervals=2)
    fields, text = native.LayerParams(**params), Text(params, 48)
    state = native.new_state(fields)
    for end in (16, 32):
        native.attend(fields, text.q[end - 16 : end], text.k[end - 16 : end], text.v[end - 16 : end], end - 16, state)
        native.compact(fields, state, end)
    native.attend(fields, text.q[32:], text.k[32:], text.v[32:], 32, state)
    before = state.copy()
    with pytest.raises(NativeError, match="intervals"):
        native.compact(fields, state, 48)
    np.testing.assert_array_equal(state, before)


def test_the_hash_sees_every_compressed_plane():
    params = make_params("heavy", 32, 16, format=1, intervals=4, sinks=4, window=8, observe=8)
    fields, text = native.LayerParams(**params), Text(params, 64)
    state = native.new_state(fields)
    for end in (16, 32, 48):
        native.attend(fields, text.q[end - 16 : end], text.k[end - 16 : end], text.v[end - 16 : end], end - 16, state)
        native.compact(fields, state, end)
    view = layout.StateView(params, state)
    before = native.state_hash(fields, state, 48)
    for name in ("body_pos", "body_score", "body_seen", "index", "payload", "mean", "codebook", "code_seen", "sink_k", "sink_v"):
        plane = getattr(view, name).reshape(-1)
        for at in (0, plane.size // 2 if name not in ("sink_k", "sink_v") else 1):
            kept = plane[at].copy()
            plane[at] = kept + 1
            assert native.state_hash(fields, state, 48) != before, name
            plane[at] = kept
    assert native.state_hash(fields, state, 48) == before
