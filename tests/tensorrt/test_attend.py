"""The CUDA attention kernels under emulation: against the oracle, and against themselves with other rows beside a row."""

import ctypes

import numpy as np
import pytest
from cache_cases import INV_FREQ, Runner, Text, bounded_params, make_params
from emulated import EmulatedCache
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout, native
from edgekv.reference import ReferenceCache
from edgekv.reference.rotary import rotate


def prepared(emulated, params, committed: int, seed: int = 0) -> tuple[Runner, EmulatedCache, Text]:
    """An oracle that has committed a text, a copy of its state for the kernels, and the text with a tail's worth more."""
    text = Text(params, committed + params["tail_slots"], seed)
    runner = Runner(params)
    runner.feed(text, committed) if committed else None
    cache = EmulatedCache(emulated, params, INV_FREQ if params.get("rotary_dim") else (), runner.cache.state.block)
    return runner, cache, text


def attend(cache, text, position, rows, **how):
    part = slice(position, position + rows)
    return cache.attend(text.q[part], text.k[part], text.v[part], position, **how)


def planes_equal(a: layout.StateView, b: layout.StateView) -> bool:
    """Every byte but the traffic counters."""
    start = layout.HEADER.itemsize
    return bool((a.block[: layout.COMMITTED_HEADER_BYTES] == b.block[: layout.COMMITTED_HEADER_BYTES]).all() and (a.block[start:] == b.block[start:]).all())


@given(bounded_params(), st.integers(0, 150), st.integers(1, 32), st.booleans(), st.integers(0, 3))
@settings(max_examples=40)
def test_a_step_equals_the_oracle(library, params, committed, rows, heads_first, order):
    library.order(order, committed)
    library.drop("")
    runner, cache, text = prepared(library, params, committed)
    rows = min(rows, params["tail_slots"] - runner.position % params["tail_slots"])
    y = attend(cache, text, committed, rows, heads_first=heads_first)
    want = runner.speculate(text, rows)
    np.testing.assert_allclose(y, want, atol=2e-5)
    assert planes_equal(cache.view, runner.cache.state)


GEOMETRIES = [
    # q_heads, kv_heads, key_dim, value_dim, element: the shapes of real models, and odd ones
    (9, 3, 64, 64, "fp16"),  # SmolLM2
    (8, 2, 128, 128, "fp16"),  # Llama, Qwen
    (4, 1, 256, 256, "fp16"),  # Gemma
    (2, 2, 80, 80, "fp32"),  # Phi
    (5, 1, 96, 33, "fp16"),  # a value that is no multiple of 16 bytes
    (1, 1, 1, 1, "fp32"),
    (3, 3, 17, 320, "fp16"),  # values wider than a block's share
    (2, 1, 576, 512, "fp32"),
]


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 30])
def test_geometries(emulated, geometry, rows):
    names = ("q_heads", "kv_heads", "key_dim", "value_dim")
    params = make_params("window", 288, 32, geometry[4], sinks=4, **dict(zip(names, geometry)))
    params["scale"] = geometry[2] ** -0.5
    runner, cache, text = prepared(emulated, params, 32 * 11 + 2)
    y = attend(cache, text, runner.position, rows)
    np.testing.assert_allclose(y, runner.speculate(text, rows), atol=1e-5)
    assert planes_equal(cache.view, runner.cache.state)


@pytest.mark.parametrize("element", ["fp16", "fp32"])
@pytest.mark.parametrize("body", [16, 512])
def test_a_row_has_the_same_bits_alone_in_a_block_and_in_a_chunk(emulated, element, body):
    """17 rows walk through the splits in one block, 5 and 1 rows take the splits side by side: three launches, one result."""
    params = make_params("window", body, 32, element, sinks=4, q_heads=6, kv_heads=2, key_dim=72, value_dim=72, softcap=3.0)
    runner, cache, text = prepared(emulated, params, 32 * 18)
    start = runner.position
    chunk = attend(cache, text, start, 17)
    for first, rows in ((0, 1), (0, 5), (5, 12), (16, 1)):
        block = attend(cache, text, start + first, rows)
        np.testing.assert_array_equal(block, chunk[first : first + rows])


@pytest.mark.parametrize("hidden", [(16, 32), (16, 272), (128, 256), (112, 144), (144, 160), (0, 288), (272, 288)])
def test_hidden_slots_are_not_attended_to(emulated, hidden):
    """Drafting with a part of the cache: at the ends of a split, inside one, over several, all of the body."""
    params = make_params("window", 288, 32, "fp16", sinks=4)
    runner, cache, text = prepared(emulated, params, 32 * 10 + 5)
    for view in (cache.view, runner.cache.state):
        view.header["hidden_from"], view.header["hidden_to"] = hidden
    chunk = attend(cache, text, runner.position, 20)
    np.testing.assert_allclose(chunk, runner.speculate(text, 20), atol=1e-5)
    np.testing.assert_array_equal(attend(cache, text, runner.position, 3), chunk[:3])
    for wrong in ((8, 32), (32, 16), (0, 304)):
        cache.view.header["hidden_from"], cache.view.header["hidden_to"] = wrong
        assert np.isnan(attend(cache, text, runner.position, 1)).all()


def test_fused_rotation_equals_rotating_before(emulated):
    for interleaved in (0, 1):
        params = make_params("full", 64, 16, "fp32", rotary_dim=6, rotary_interleaved=interleaved)
        text, where = Text(params, 16), np.arange(9)
        angle = where[:, None] * np.asarray(INV_FREQ, np.float32)
        q, k = (rotate(x[:9].transpose(1, 0, 2), where, np.asarray(INV_FREQ), 6, bool(interleaved)).transpose(1, 0, 2) for x in (text.q, text.k))
        want = ReferenceCache(params).attend(q, k, text.v[:9], 0)
        for columns in (3, 6):  # half a table, and one repeated to the full width
            cos, sin = (np.tile(f(angle), columns // 3).astype(np.float32) for f in (np.cos, np.sin))
            cache = EmulatedCache(emulated, params | {"fused_rotary": 1})
            y = cache.attend(text.q[:9], text.k[:9], text.v[:9], 0, cos=cos, sin=sin)
            np.testing.assert_allclose(y, want, atol=2e-6)
            np.testing.assert_allclose(layout.read_keys(cache.view.tail_k, 0, 9), k.transpose(1, 0, 2), atol=1e-6)
            y = cache.attend(text.q[:9], text.k[:9], text.v[:9], 0, cos=cos, sin=sin, half_table=True)
            np.testing.assert_allclose(y, want, atol=5e-3)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_every_kv_head_may_turn_at_frequencies_of_its_own(emulated, interleaved):
    params = make_params("full", 64, 16, "fp32", rotary_dim=6, rotary_interleaved=interleaved)
    text, where, random = Text(params, 16), np.arange(9), np.random.default_rng(0)
    inv_freq = random.uniform(0.1, 1.0, (2, 3)).astype(np.float32)
    angle = (where[:, None, None] * inv_freq).reshape(9, 6)

    def turned(x):
        parts = np.split(x[:9].transpose(1, 0, 2), 2)  # query heads of each kv head
        return np.concatenate([rotate(part, where, inv_freq[h], 6, bool(interleaved)) for h, part in enumerate(parts)]).transpose(1, 0, 2)

    want = ReferenceCache(params).attend(turned(text.q), turned(text.k), text.v[:9], 0)
    cache = EmulatedCache(emulated, params | {"fused_rotary": layout.BY_HEAD})
    cos, sin = (f(angle).astype(np.float32) for f in (np.cos, np.sin))
    np.testing.assert_allclose(cache.attend(text.q[:9], text.k[:9], text.v[:9], 0, cos=cos, sin=sin), want, atol=2e-6)
    np.testing.assert_allclose(layout.read_keys(cache.view.tail_k, 0, 9), turned(text.k).transpose(1, 0, 2), atol=1e-6)
    with pytest.raises(Exception, match="rotary_dim / 2 columns for every kv head"):
        cache.attend(text.q[:9], text.k[:9], text.v[:9], 0, cos=cos[:, :3], sin=sin[:, :3])


def test_float16_activations(emulated):
    params = make_params("window", 64, 32, "fp16", sinks=4)
    runner, cache, text = prepared(emulated, params, 100)
    for name in ("q", "k", "v"):
        setattr(text, name, getattr(text, name).astype(np.float16).astype(np.float32))
    y = attend(cache, text, 100, 5, half=True)
    np.testing.assert_allclose(y.astype(np.float32), runner.speculate(text, 5), atol=2e-3)


def test_what_lies_beyond_the_committed_rows_never_matters(emulated):
    """Slots that a rejected draft or fresh memory filled with NaN, and a NaN in a later row of the same block."""
    params = make_params("window", 64, 32, "fp16", sinks=4)
    runner, cache, text = prepared(emulated, params, 70)
    clean = attend(cache, text, 70, 2)
    view = cache.view
    view.tail_v[:, 8:] = np.nan
    view.tail_k[:, :, :, 8:] = np.nan
    np.testing.assert_array_equal(attend(cache, text, 70, 2), clean)
    text.q[71:], text.k[71:], text.v[71:] = np.nan, np.nan, np.nan
    np.testing.assert_array_equal(attend(cache, text, 70, 2)[0], clean[0])


def test_a_step_that_cannot_be_right_answers_nan_and_touches_nothing(emulated):
    params = make_params("window", 64, 32, "fp16", sinks=4)
    for damage in ("overrun", "magic", "params", "count", "behind"):
        runner, cache, text = prepared(emulated, params, 90)
        rows, position = 3, 90
        if damage == "overrun":
            rows = 7  # 26 committed tail rows + 7 > 32
        elif damage == "behind":
            position = 63
        else:
            cache.view.header[{"magic": "magic", "params": "params_hash", "count": "body_count"}[damage]] = 12345
        before = cache.block.copy()
        part = slice(90, 90 + rows)
        assert np.isnan(cache.attend(text.q[part], text.k[part], text.v[part], position)).all(), damage
        np.testing.assert_array_equal(cache.block, before)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"kv_heads": 3}, "kv_heads must divide q_heads"),
        ({"tail_slots": 17}, "tail_slots must be a positive multiple of 16"),
        ({"fused_rotary": 1, "rotary_dim": 4}, "cos and sin"),
    ],
)
def test_bad_parameters_are_refused_with_a_sentence(emulated, change, sentence):
    params = make_params("window", 64, 32, "fp16", sinks=4)
    text, cache = Text(params, 4), EmulatedCache(emulated, params)
    cache.packed = ctypes.create_string_buffer(layout.pack_params(params | change))
    with pytest.raises(RuntimeError, match=sentence):
        attend(cache, text, 0, 2)


def test_traffic_counts_what_a_step_reads_and_writes(emulated):
    params = make_params("heavy", 64, 32, "fp16", sinks=4, observe=27)
    _, cache, text = prepared(emulated, params, 100)
    for rows, passes in ((3, 1), (20, 3)):  # 6 and 40 query rows per kv head, in tiles of 8 and 16
        cache.view.header["traffic"][:] = 0
        attend(cache, text, 100, rows)
        traffic = dict(zip(layout.TRAFFIC, cache.view.header["traffic"].tolist()))
        newest, observed = 4 + rows, rows - 1  # 4 committed tail rows; queries are kept from tail slot 5 on
        assert traffic["read_body_keys"] == passes * 2 * 64 * 8 * 2 and traffic["read_body_values"] == passes * 2 * 64 * 6 * 2
        assert traffic["read_tail_keys"] == passes * 2 * -(-newest // 16) * 16 * 8 * 2
        assert traffic["read_tail_values"] == passes * 2 * newest * 6 * 2
        assert traffic["write_tail"] == (2 * rows * (8 + 6) + observed * 4 * 8) * 2 and traffic["steps"] == 1


def test_the_cpu_kernels_agree(emulated):
    """The plugin and the ONNX Runtime op are two implementations of one op: same state, same answers."""
    params = make_params("heavy", 64, 32, "fp16", "cache", sinks=4, window=16, observe=27, rotary_dim=6, fused_rotary=1)
    text, cpu = Text(params, 200), native.LayerParams(**params)
    state, cache = native.new_state(cpu), EmulatedCache(emulated, params, INV_FREQ)
    np.testing.assert_array_equal(cache.block, state)
    for start in range(0, 192, 8):
        part, where = slice(start, start + 8), np.arange(start, start + 8)
        angle = (where[:, None] * np.asarray(INV_FREQ)).astype(np.float32)
        tables = {"cos": np.cos(angle), "sin": np.sin(angle)}
        want = native.attend(cpu, text.q[part], text.k[part], text.v[part], start, state, **tables)
        np.testing.assert_allclose(cache.attend(text.q[part], text.k[part], text.v[part], start, **tables), want, atol=2e-3)
        if (start + 8) % 32 == 0:
            rank = min(start + 8, 64)
            native.compact(cpu, state, start + 8, rank, np.asarray(INV_FREQ, np.float32))
            cache.compact(start + 8, rank)
            view = layout.StateView(params, state)
            np.testing.assert_array_equal(cache.view.body_pos, view.body_pos)
            np.testing.assert_allclose(cache.view.body_score, view.body_score, atol=2e-3)
            assert bytes(cache.block[: layout.COMMITTED_HEADER_BYTES]) == bytes(state[: layout.COMMITTED_HEADER_BYTES])
