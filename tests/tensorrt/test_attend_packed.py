"""CUDA attention to a compressed body under emulation: to all of it and to chosen slots, against the oracle, and rows against themselves."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from emulated import EmulatedCache, slots_of
from hypothesis import given, settings
from hypothesis import strategies as st
from packed_cases import filled, oracle_step, packed_params

from edgekv import layout, native


def prepared(library, params, n, seed=0, retrieve=0, candidates=0):
    cache, text = filled(params, n, seed)
    cache.state.header["retrieve"], cache.state.header["candidates"] = retrieve, candidates
    return cache, text, EmulatedCache(library, params, (), cache.block)


def step(ours, text, position, rows, **how):
    part = slice(position, position + rows)
    slots = ours.retrieve(text.q[part], position) if ours.view.header["retrieve"] else None
    return ours.attend(text.q[part], text.k[part], text.v[part], position, slots=slots, **how), slots


def lists(bits, count):
    """As oracle_step takes slots: int32 [kv_heads, T, count], -1 for none."""
    found = [np.pad(slots, (0, count - len(slots)), constant_values=-1) for slots in slots_of(bits)]
    return np.array(found, np.int32).reshape(*bits.shape[:2], count)


@given(packed_params(), st.integers(0, 300), st.integers(1, 40), st.integers(0, 70), st.integers(0, 300), st.integers(0, 3), st.integers(0, 9))
@settings(max_examples=40)
def test_a_step_equals_the_oracle(library, params, n, rows, retrieve, candidates, order, seed):
    library.order(order, seed)
    library.drop("")
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    retrieve = retrieve if rows <= 16 else 0
    cache, text, ours = prepared(library, params, n, seed, retrieve, candidates)
    y, slots = step(ours, text, n, rows, heads_first=bool(seed % 2))
    chosen = None if slots is None or cache.count == 0 else lists(slots, min(retrieve, cache.count))
    np.testing.assert_allclose(y, oracle_step(cache, text, n, rows, chosen), atol=1e-4)
    start = layout.HEADER.itemsize
    np.testing.assert_array_equal(ours.block[start:], cache.block[start:])
    np.testing.assert_array_equal(ours.block[: layout.COMMITTED_HEADER_BYTES], cache.block[: layout.COMMITTED_HEADER_BYTES])


GEOMETRIES = [
    # q_heads, kv_heads, key_dim, value_dim, key_bits, value_bits
    (9, 3, 64, 64, 4, 2),  # SmolLM2
    (8, 2, 128, 128, 2, 4),  # Llama, Qwen
    (4, 1, 256, 256, 2, 8),  # Gemma
    (20, 1, 96, 33, 4, 4),
    (2, 2, 20, 320, 4, 2),
    (2, 1, 576, 512, 2, 4),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize(("rows", "retrieve"), [(1, 0), (1, 37), (5, 37), (30, 0)])
def test_geometries(emulated, geometry, rows, retrieve):
    names = ("q_heads", "kv_heads", "key_dim", "value_dim", "key_bits", "value_bits")
    params = make_params("full", 384, 32, "fp16", format=1, intervals=16, sinks=20, **dict(zip(names, geometry)))
    params["scale"] = geometry[2] ** -0.5
    cache, text, ours = prepared(emulated, params, 32 * 11 + 2, retrieve=retrieve, candidates=2 * retrieve)
    y, slots = step(ours, text, 354, rows)
    np.testing.assert_allclose(y, oracle_step(cache, text, 354, rows, None if slots is None else lists(slots, retrieve)), atol=2e-5)


@pytest.mark.parametrize("sinks", [0, 20])
def test_a_row_has_the_same_bits_alone_in_a_block_and_in_a_chunk(emulated, sinks):
    """All of the body: 17 rows walk through the splits in one block, 5 and 1 rows take them side by side."""
    params = make_params("full", 512, 32, format=1, intervals=32, sinks=sinks, q_heads=6, kv_heads=2, key_dim=72, value_dim=72, softcap=3.0)
    _, text, ours = prepared(emulated, params, 32 * 14)
    chunk, _ = step(ours, text, 448, 17)
    for first, rows in ((0, 1), (0, 5), (5, 12), (16, 1)):
        np.testing.assert_array_equal(step(ours, text, 448 + first, rows)[0], chunk[first : first + rows])


@pytest.mark.parametrize("candidates", [0, 150])
def test_a_row_that_retrieves_has_the_same_bits_alone_and_in_a_block(emulated, candidates):
    params = make_params("full", 512, 32, format=1, intervals=32, sinks=20, q_heads=6, kv_heads=2, key_dim=72, value_dim=72, softcap=3.0)
    _, text, ours = prepared(emulated, params, 32 * 14, retrieve=50, candidates=candidates)
    block, _ = step(ours, text, 448, 12)
    for row in range(12):
        np.testing.assert_array_equal(step(ours, text, 448 + row, 1)[0][0], block[row])


def test_retrieving_everything_is_attending_to_everything(emulated):
    params = make_params("full", 320, 16, format=1, intervals=64, key_dim=64, value_dim=32, sinks=4, sliding_window=90)
    _, text, ours = prepared(emulated, params, 300)
    y = []
    for retrieve in (0, 292, 10_000):
        ours.view.header["retrieve"] = retrieve
        y.append(step(ours, text, 300, 3)[0])
    np.testing.assert_array_equal(y[1], y[2])
    np.testing.assert_allclose(y[0], y[1], atol=0.15)  # scores from whole numbers
    assert np.abs(y[0] - y[1]).mean() < 0.03


def hide(where: np.ndarray, cache, hidden) -> np.ndarray:
    """Positions [kv_heads, n] of sinks, body and tail, with -1 for the body slots that are hidden."""
    where = where.copy()
    where[:, cache.sink_count + hidden[0] : cache.sink_count + hidden[1]] = -1
    return where


@pytest.mark.parametrize("hidden", [(16, 32), (16, 272), (128, 256), (0, 272)])
def test_hidden_slots_are_not_attended_to(emulated, hidden):
    params = make_params("full", 320, 32, format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    cache, text, ours = prepared(emulated, params, 32 * 9 + 5)
    ours.view.header["hidden_from"], ours.view.header["hidden_to"] = hidden
    y, _ = step(ours, text, 293, 3)
    everything = cache.everything
    cache.everything = lambda rows: (everything(rows)[0], everything(rows)[1], hide(everything(rows)[2], cache, hidden))
    np.testing.assert_allclose(y, oracle_step(cache, text, 293, 3, None), atol=2e-5)
    np.testing.assert_array_equal(step(ours, text, 293, 20)[0][:3], y)


def test_a_step_that_cannot_be_right_answers_nan_and_touches_nothing(emulated):
    params = make_params("full", 320, 32, format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    for damage in ("magic", "body_count", "retrieve", "hidden", "tail_base", "rows"):
        _, text, ours = prepared(emulated, params, 96, retrieve=20)
        rows = 17 if damage == "rows" else 3  # so many rows are a prompt's, which attend to everything
        if damage == "hidden":
            ours.view.header["hidden_to"] = 32
        elif damage != "rows":
            ours.view.header[damage] = 5 if damage == "magic" else -32
        before = ours.block.copy()
        part, slots = slice(96, 96 + rows), np.zeros((2, rows, 10), np.uint32)
        assert np.isnan(ours.attend(text.q[part], text.k[part], text.v[part], 96, slots=slots)).all(), damage
        np.testing.assert_array_equal(ours.block, before)


def test_slots_that_do_not_exist_do_no_harm(emulated):
    """Bits beyond the filled slots, which a broken caller might set."""
    params = make_params("full", 320, 32, format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    _, text, ours = prepared(emulated, params, 96, retrieve=20)
    part = slice(96, 98)
    slots = ours.retrieve(text.q[part], 96)
    want = ours.attend(text.q[part], text.k[part], text.v[part], 96, slots=slots)
    slots[..., 3:] = 0xFFFFFFFF
    np.testing.assert_array_equal(ours.attend(text.q[part], text.k[part], text.v[part], 96, slots=slots), want)


def test_what_lies_beyond_the_committed_rows_never_matters(emulated):
    params = make_params("full", 320, 32, "fp16", format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    _, text, ours = prepared(emulated, params, 102, retrieve=20, candidates=40)
    clean, _ = step(ours, text, 102, 2)
    ours.view.tail_v[:, 8:], ours.view.tail_k[:, :, :, 8:] = np.nan, np.nan
    np.testing.assert_array_equal(step(ours, text, 102, 2)[0], clean)
    text.q[103:], text.k[103:], text.v[103:] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(step(ours, text, 102, 2)[0][0], clean[0])


@pytest.mark.parametrize(("rows", "retrieve"), [(1, 0), (3, 0), (20, 0), (1, 40), (3, 40)])
def test_the_cpu_kernels_agree(emulated, rows, retrieve):
    """The same answers, and the same bytes of records where each is read once. float16 activations lose what they must."""
    params = make_params("full", 320, 32, "fp16", format=1, intervals=64, key_dim=64, value_dim=64, key_bits=4, value_bits=2, sinks=4, q_heads=3, kv_heads=1)
    cache, text, ours = prepared(emulated, params, 32 * 9, retrieve=retrieve, candidates=4 * retrieve)
    cpu, state = native.LayerParams(**params), native.aligned_bytes(len(cache.block))
    state[:] = cache.block
    part = slice(288, 288 + rows)
    slots = native.retrieve(cpu, text.q[part], 288, state)
    want = native.attend(cpu, text.q[part], text.k[part], text.v[part], 288, state, slots=slots if slots.size else None)
    y, _ = step(ours, text, 288, rows)
    np.testing.assert_allclose(y, want, atol=2e-5)
    near = 2e-2 if retrieve else 3e-3  # a query in half precision may have another level
    np.testing.assert_allclose(step(ours, text, 288, rows, half=True)[0].astype(np.float32), want, atol=near)
    if rows == 1:
        ours.view.header["traffic"][:] = 0
        step(ours, text, 288, 1)
        got, counted = (dict(zip(layout.TRAFFIC, v.header["traffic"].tolist())) for v in (ours.view, layout.StateView(params, state)))
        for name in ("read_body_keys", "read_body_values", "read_body_index", "read_body_meta", "write_tail", "steps"):
            assert got[name] == counted[name] or (name == "read_body_meta" and not retrieve), name  # means are read otherwise for all
