"""The CUDA retrieval kernels under emulation: the oracle's slots, and for a row of a block the slots it has alone."""

import numpy as np
import pytest
from cache_cases import INV_FREQ, Text, make_params
from emulated import EmulatedCache, bits_of, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import expect_slots, filled, packed_params, scan_scores

from edgekv import layout, native


def as_lists(bits: np.ndarray, retrieve: int) -> np.ndarray:
    """Bits of slots as the CPU kernels hand slots over: int32 [kv_heads, T, retrieve], -1 behind the last."""
    found = slots_of(bits)
    assert max(map(len, found)) <= retrieve
    rows = [np.pad(slots, (0, retrieve - len(slots)), constant_values=-1) for slots in found]
    return np.array(rows, np.int32).reshape(*bits.shape[:2], retrieve)


def prepared(library, params, n, seed=0, retrieve=0, candidates=0):
    cache, text = filled(params, n, seed)
    cache.state.header["retrieve"], cache.state.header["candidates"] = retrieve, candidates
    return cache, text, EmulatedCache(library, params, (), cache.block)


@given(packed_params(), st.integers(0, 300), st.integers(1, 16), st.integers(0, 70), st.integers(0, 300), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=40)
def test_slots_equal_the_oracle(library, params, n, rows, retrieve, candidates, order, seed):
    library.order(order, seed)
    library.drop("")
    cache, text, ours = prepared(library, params, n, seed, retrieve, candidates)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    bits = ours.retrieve(text.q[n : n + rows], n, heads_first=bool(seed % 2))
    if retrieve == 0 or cache.count == 0:
        assert not bits.any()
        return
    expect_slots(cache, text, n, rows, as_lists(bits, min(retrieve, cache.count)), retrieve, candidates)
    start = layout.HEADER.itemsize
    np.testing.assert_array_equal(ours.block[start:], cache.block[start:])


@pytest.mark.parametrize("candidates", [0, 84])
def test_a_row_of_a_block_has_the_slots_it_has_alone(emulated, candidates):
    params = make_params("full", 320, 48, format=1, intervals=64, key_dim=80, value_dim=64, sinks=3, q_heads=6, kv_heads=2, sliding_window=150)
    cache, text, ours = prepared(emulated, params, 290, retrieve=21, candidates=candidates)
    block = ours.retrieve(text.q[290:304], 290)
    assert len({tuple(x) for x in slots_of(block)}) > 20
    for row in range(14):
        np.testing.assert_array_equal(ours.retrieve(text.q[290 + row : 291 + row], 290 + row)[:, 0], block[:, row])


def test_the_best_table_scores_by_brute_force_over_many_blocks(emulated):
    params = make_params("full", 4096, 256, format=1, intervals=16, key_dim=64, value_dim=64, sinks=20, q_heads=4, kv_heads=2)
    cache, text, ours = prepared(emulated, params, 2048 + 7)
    query = text.q[2055].reshape(2, 2, 64)
    scores = [scan_scores(cache, head, query[head]) for head in range(2)]
    for retrieve in (1, 31, 500, 2000, 2027, 2028, 5000):
        ours.view.header["retrieve"] = retrieve
        bits = ours.retrieve(text.q[2055:2056], 2055)
        for head in range(2):
            np.testing.assert_array_equal(slots_of(bits)[head], np.sort(np.lexsort((np.arange(2028), -scores[head]))[:retrieve]))


def test_ties_go_to_the_lowest_slots(emulated):
    """A query of zeros scores all tokens alike, by their codes and by their keys."""
    params = make_params("full", 4096, 256, format=1, intervals=16, key_dim=64, value_dim=64, sinks=20, q_heads=4, kv_heads=2)
    for candidates in (0, 1200):
        _, text, ours = prepared(emulated, params, 1024 + 7, retrieve=300, candidates=candidates)
        bits = ours.retrieve(np.zeros_like(text.q[1031:1033]), 1031)
        for slots in slots_of(bits):
            np.testing.assert_array_equal(slots, np.arange(300))


@pytest.mark.parametrize(("retrieve", "candidates", "sliding"), [(40, 160, 0), (40, 0, 120), (200, 400, 0), (1000, 4000, 0), (60, 71, 70)])
def test_slots_and_counted_bytes_are_those_of_the_cpu_kernels(emulated, retrieve, candidates, sliding):
    """With the rotation in the op, from float32 tables, against the ONNX Runtime op's kernels."""
    params = make_params(
        "heavy", 288, 48, "fp16", format=1, intervals=64, key_dim=64, value_dim=64, sinks=3, q_heads=6, kv_heads=2, window=100, observe=8,
        sliding_window=sliding, rotary_dim=6, fused_rotary=1,
    )  # fmt: skip
    cache, text, ours = prepared(emulated, params, 510, 0, retrieve, candidates)
    state = native.aligned_bytes(len(cache.block))
    state[:] = cache.block
    angle = (np.arange(510, 517)[:, None] * np.asarray(INV_FREQ)).astype(np.float32)
    tables = {"cos": np.cos(angle), "sin": np.sin(angle)}
    want = native.retrieve(native.LayerParams(**params), text.q[510:517], 510, state, **tables)
    bits = ours.retrieve(text.q[510:517], 510, **tables)
    np.testing.assert_array_equal(bits, bits_of(want, 288))
    np.testing.assert_array_equal(ours.view.header["traffic"], layout.StateView(params, state).header["traffic"])


def test_what_cannot_be_searched(emulated):
    dense = make_params()
    text = Text(dense, 2)
    with pytest.raises(RuntimeError, match="this cache is dense"):
        EmulatedCache(emulated, dense).retrieve(text.q, 0)
    params = make_params("full", 320, 32, format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    for damage in ("magic", "body_count", "retrieve", "hidden", "tail_base"):
        _, text, ours = prepared(emulated, params, 100, retrieve=20)
        if damage == "hidden":
            ours.view.header["hidden_to"] = 32
        else:
            ours.view.header[damage] = 5 if damage == "magic" else -5
        before = ours.block.copy()
        assert not ours.retrieve(text.q[100:103], 100).any(), damage
        np.testing.assert_array_equal(ours.block, before)
    _, text, ours = prepared(emulated, params, 96, retrieve=20)
    assert (ours.retrieve(text.q[96:113], 96) == 0xA5A5A5A5).all()  # a block of a prompt
