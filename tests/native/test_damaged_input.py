"""Nothing a caller hands in may crash the library: damaged states, random parameters, unusual numbers."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout, native
from edgekv.errors import CacheFullError, NativeError

SOME_INTS = st.sampled_from([0, 1, -1, 2, 3, 8, 15, 16, 17, 32, 64, 1024, 1025, 4096, 4097, 2**20, 2**27, 2**31 - 1, -(2**31)])
SOME_FLOATS = st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e38, float("inf"), float("nan")])


@given(st.fixed_dictionaries({a["name"]: SOME_INTS if a["type"] == "int" else SOME_FLOATS for a in native.SCHEMA["attributes"]}))
@settings(max_examples=400)
def test_any_parameters_get_a_sentence_or_a_layout(fields):
    params = native.LayerParams(**fields)
    sentence = native.check(params)
    if sentence is None:
        assert native.state_bytes(params) == layout.state_layout(fields).bytes
    else:
        for refuse in (native.state_bytes, native.layout):
            with pytest.raises(NativeError, match=sentence.replace("+", r"\+").replace("(", r"\(").replace(")", r"\)")):
                refuse(params)


def use(params: native.LayerParams, state: np.ndarray, position: int) -> None:
    """A step and a compaction; either may refuse."""
    text = Text({name: getattr(params, name) for name, _ in params._fields_}, 3)
    inv_freq = np.full(params.rotary_dim // 2, 0.1, np.float32)
    packed = params.format
    for call in (
        *([lambda: native.attend(params, text.q, text.k, text.v, position, state, slots=native.retrieve(params, text.q, position, state))] if packed else []),
        lambda: native.attend(params, text.q, text.k, text.v, position, state, threads=2),
        lambda: native.compact(params, state, position, int(state[:64].view(layout.HEADER["rank_base"])[4]), inv_freq),
        lambda: native.state_hash(params, state, position),
    ):
        try:
            call()
        except (NativeError, CacheFullError):
            pass


PARAMS = [
    make_params(body=48, tail=16), make_params("window", 32, 16, "fp16", "cache", sinks=5, rotary_dim=6),
    make_params("heavy", 48, 32, sinks=3, window=9, observe=11, score_normalise=1, sliding_window=20),
    make_params("full", 96, 16, "fp16", format=1, intervals=7, sinks=5, key_dim=32, value_dim=40, sliding_window=30),
    make_params("window", 32, 16, format=1, intervals=64, key_bits=4, value_bits=2, key_dim=12, softcap=3.0),
]  # fmt: skip


@given(st.sampled_from(PARAMS), st.data())
@settings(max_examples=150)
def test_a_random_block_never_crashes(fields, data):
    """Random planes behind a header that passes for a real one as often as not."""
    params = native.LayerParams(**fields)
    state = native.new_state(params)
    noise = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    state[layout.HEADER.itemsize :] = noise.integers(0, 256, state.nbytes - layout.HEADER.itemsize, np.uint8)
    header = state[: layout.HEADER.itemsize].view(layout.HEADER)[0]
    count = data.draw(st.integers(0, params.body_slots))
    base = count + data.draw(st.sampled_from([0, 1, 160, 2**30]))
    moved = 0
    if params.format:  # boundaries, sinks in planes of their own
        base = data.draw(st.integers(0, params.intervals)) * params.tail_slots
        moved = min(params.sinks, base)
        count = min(count, base - moved)
        header["retrieve"], header["candidates"] = data.draw(st.integers(0, 40)), data.draw(st.sampled_from([0, 1, 3, 2**31 - 1]))
    header["body_count"], header["tail_base"], header["evicted"] = count, base, base - count - moved
    header["rank_base"] = data.draw(st.integers(count, base)) if params.positions else base
    for name in data.draw(st.lists(st.sampled_from(["body_count", "tail_base", "rank_base", "evicted", "hidden_from", "hidden_to"]), max_size=1)):
        header[name] = data.draw(st.integers(-(2**31), 2**31 - 1))
    use(params, state, int(header["tail_base"]) + data.draw(st.sampled_from([0, 1, params.tail_slots - 3, params.tail_slots, -1])))


@pytest.mark.parametrize("field,value", [
    ("magic", 0), ("layout_version", layout.LAYOUT_VERSION + 1), ("params_hash", 1), ("tail_base", -1), ("tail_base", 5), ("tail_base", 1 << 40), ("rank_base", 7),
    ("evicted", 3), ("body_count", -16), ("body_count", 64), ("body_count", 17),
])  # fmt: skip
def test_every_damage_of_the_header_is_noticed(field, value):
    fields = make_params("window", 32, 16)
    params, text, state = native.LayerParams(**fields), Text(fields, 17), native.new_state(native.LayerParams(**fields))
    native.attend(params, text.q[:16], text.k[:16], text.v[:16], 0, state)
    native.compact(params, state, 16)
    state[: layout.HEADER.itemsize].view(layout.HEADER)[0][field] = value
    before = state.copy()
    with pytest.raises(NativeError):
        native.attend(params, text.q[16:], text.k[16:], text.v[16:], 16, state)
    np.testing.assert_array_equal(state, before)


def test_a_state_must_be_aligned_whole_and_writable():
    params = native.LayerParams(**make_params())
    state = native.new_state(params)
    moved = native.aligned_bytes(state.nbytes + 64)
    frozen = state.copy()
    frozen.flags.writeable = False
    for bad in (state[:-1], moved[1 : 1 + state.nbytes], frozen, state[::2], state.view(np.int32)):
        with pytest.raises(NativeError):
            native.state_init(params, bad)


def test_arrays_of_the_wrong_shape_are_refused_before_the_library_sees_them():
    params = native.LayerParams(**make_params())
    text, state = Text(make_params(), 4), native.new_state(params)
    for bad in ((text.q[:, :3], text.k, text.v), (text.q, text.k[:3], text.v), (text.q, text.k, text.v[..., :-1]), (text.q, text.k, text.q)):
        with pytest.raises(NativeError):
            native.attend(params, *bad, 0, state)
    with pytest.raises(NativeError):
        native.attend(params, text.q[:0], text.k[:0], text.v[:0], 0, state)


@pytest.mark.parametrize("isa", native.SCHEMA["isa"])
def test_what_a_later_token_stored_never_enters_an_earlier_row(isa):
    """Not even infinities and NaN, which survive a multiplication by zero."""
    fields = make_params(tail=32, element="fp32")
    params, text = native.LayerParams(**fields), Text(fields, 20)
    before = native.isa()
    native.set_isa(isa)
    try:
        want = native.attend(params, text.q, text.k, text.v, 0, native.new_state(params))
        for poison in (np.nan, np.inf):
            for x in (text.q, text.k, text.v):
                x[13:] = poison
            state = native.new_state(params)
            got = native.attend(params, text.q, text.k, text.v, 0, state)
            np.testing.assert_array_equal(got[:13], want[:13])
            assert not np.isfinite(got[13:]).any()
            again = native.attend(params, text.q[12:13], text.k[12:13], text.v[12:13], 12, state)
            np.testing.assert_array_equal(again[0], want[12])
    finally:
        native.set_isa(before)


def test_half_precision_overflow_is_stored_as_infinity_like_numpy_does():
    fields = make_params(element="fp16")
    params, text = native.LayerParams(**fields), Text(fields, 1)
    text.v[:] = [[70000.0, -70000.0, 65504.0, 65519.0, 65520.0, 6e-8]]
    with np.errstate(over="ignore"):
        want = text.v.astype(np.float16)
    for isa in native.SCHEMA["isa"]:
        before = native.isa()
        native.set_isa(isa)
        state = native.new_state(params)
        native.attend(params, text.q, text.k, text.v, 0, state)
        native.set_isa(before)
        np.testing.assert_array_equal(layout.StateView(fields, state).tail_v[:, 0], want[0])


def test_an_unknown_instruction_set_is_refused_by_name():
    with pytest.raises(NativeError, match="cannot run the instruction set 'vax'"):
        native.set_isa("vax")
