"""The ONNX Runtime op: the same bits as the library called directly, in place or not at all, and a sentence for every bad node."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from one_node import INPUTS, attributes, finish, make_model, open_session, run
from onnx import helper

from edgekv import native

REFUSED = pytest.raises(Exception, match="BoundedCacheAttention")


def by_rows(x: np.ndarray) -> np.ndarray:
    """[T, heads, dim] -> [1, T, heads * dim]"""
    return np.ascontiguousarray(x.reshape(1, len(x), -1))


def by_heads(x: np.ndarray) -> np.ndarray:
    """[T, heads, dim] -> [1, heads, T, dim]"""
    return np.ascontiguousarray(x.transpose(1, 0, 2)[None])


def at(position: int) -> np.ndarray:
    return np.array([position], np.int64)


def inputs(text: Text, rows: slice) -> dict:
    return {"q": by_rows(text.q[rows]), "k": by_rows(text.k[rows]), "v": by_rows(text.v[rows]), "position": at(rows.start)}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("forms", [(by_rows,) * 3, (by_heads,) * 3, (by_heads, by_rows, by_heads), (by_rows, by_heads, by_rows)])
def test_the_op_gives_the_bits_of_the_library(forms, threads):
    params = native.LayerParams(**make_params("window", 48, 32, "fp16", sinks=3))
    text = Text(attributes(params), 80)
    ours, theirs = native.new_state(params), native.new_state(params)
    session = open_session(make_model(params), threads)
    for start, end in ((0, 5), (5, 6), (6, 32), (32, 64), (64, 80)):
        part = slice(start, end)
        x = {name: form(array[part]) for name, form, array in zip("qkv", forms, (text.q, text.k, text.v))}
        got = run(session, ours, position=at(start), **x)
        want = native.attend(params, text.q[part], text.k[part], text.v[part], start, theirs)
        np.testing.assert_array_equal(got, by_rows(want))
        np.testing.assert_array_equal(ours, theirs)
        if end % 32 == 0:
            for state in (ours, theirs):
                native.compact(params, state, end)


def test_work_spread_over_the_sessions_threads_gives_the_same_bits():
    shape = {"q_heads": 6, "kv_heads": 2, "key_dim": 64, "value_dim": 64, "body_slots": 1536, "tail_slots": 256}
    params = native.LayerParams(scale=0.125, **shape)
    text = Text(shape, 1536 + 40)
    state = native.new_state(params)
    for start in range(0, 1536, 256):
        part = slice(start, start + 256)
        native.attend(params, text.q[part], text.k[part], text.v[part], start, state, threads=2)
        native.compact(params, state, start + 256)
    results = []
    for threads in (1, 2, 3):
        session, copy = open_session(make_model(params), threads), native.aligned_bytes(state.nbytes)
        copy[:] = state
        results.append([run(session, copy, **inputs(text, slice(1536, 1536 + n))) for n in (1, 2, 40)])
    for one, many in zip(results[0] * 2, results[1] + results[2]):
        np.testing.assert_array_equal(one, many)
    np.testing.assert_array_equal(results[0][2][:, :1], results[0][0])


@pytest.mark.parametrize("interleaved", [0, 1])
@pytest.mark.parametrize("whole_table", [False, True])
def test_the_op_rotates_queries_and_keys_itself(interleaved, whole_table):
    shape = make_params("heavy", 32, 16, sinks=2, window=8, observe=8) | {"rotary_dim": 6, "rotary_interleaved": interleaved}
    plain, fused = native.LayerParams(**shape), native.LayerParams(**shape, fused_rotary=1)
    text = Text(shape, 16)
    angle = np.arange(16)[:, None] * np.array([1.0, 0.3, 0.05])
    cos, sin = np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)

    def rotated(x):
        a, b = (slice(0, 6, 2), slice(1, 6, 2)) if interleaved else (slice(0, 3), slice(3, 6))
        y, c, s = x.copy(), cos[:, None], sin[:, None]
        y[..., a], y[..., b] = x[..., a] * c - x[..., b] * s, x[..., b] * c + x[..., a] * s
        return y

    want_state, got_state = native.new_state(plain), native.new_state(fused)
    want = native.attend(plain, rotated(text.q), rotated(text.k), text.v, 0, want_state)
    tables = {"cos": cos[None], "sin": sin[None]}
    if whole_table:
        tables = {name: np.concatenate([x, np.full_like(x, np.nan)], axis=2) for name, x in tables.items()}
    x = inputs(text, slice(0, 16))
    got = run(open_session(make_model(fused, INPUTS)), got_state, **x, **tables)
    np.testing.assert_array_equal(got, by_rows(want))
    planes = slice(256, None)
    np.testing.assert_array_equal(got_state[planes], want_state[planes])
    direct = native.attend(fused, text.q, text.k, text.v, 0, native.new_state(fused), cos=cos, sin=sin)
    np.testing.assert_array_equal(direct, want)


def test_queries_keys_and_values_may_come_in_one_tensor():
    params = native.LayerParams(**make_params())
    text = Text(attributes(params), 9)
    packed = np.concatenate([by_rows(x) for x in (text.q, text.k, text.v)], axis=2)
    want = native.attend(params, text.q, text.k, text.v, 0, native.new_state(params))
    got = run(open_session(make_model(params, ("q", "position", "state"))), native.new_state(params), q=packed, position=at(0))
    np.testing.assert_array_equal(got, by_rows(want))


def test_a_state_that_is_not_in_place_is_refused_and_left_alone():
    params = native.LayerParams(**make_params())
    text, state = Text(attributes(params), 4), native.new_state(params)
    session, before = open_session(make_model(params)), state.copy()
    with pytest.raises(Exception, match="bind the state input and the state output of layer 0 to one buffer"):
        session.run(None, inputs(text, slice(0, 4)) | {"state": state.view(np.int8)})
    other = native.new_state(params)
    binding = session.io_binding()
    for name, value in inputs(text, slice(0, 4)).items():
        binding.bind_cpu_input(name, value)
    binding.bind_input("state", "cpu", 0, np.int8, state.shape, state.ctypes.data)
    binding.bind_output("state.out", "cpu", 0, np.int8, other.shape, other.ctypes.data)
    binding.bind_output("y")
    with pytest.raises(Exception, match="one buffer"):
        session.run_with_iobinding(binding)
    np.testing.assert_array_equal(state, before)
    np.testing.assert_array_equal(other, before)


def test_a_chain_of_nodes_works_on_one_state():
    """The state between two nodes is the same memory too, because the op declares the alias."""
    params = native.LayerParams(**make_params())
    text, state, twin = Text(attributes(params), 8), native.new_state(params), native.new_state(params)
    names = [["q", "k", "v", "position", "state"], ["q", "k", "v", "second", "between"]]
    outputs = [["first_y", "between"], ["y", "state.out"]]
    nodes = [
        helper.make_node("BoundedCacheAttention", i, o, domain="edgekv", **attributes(params)) for i, o in zip(names, outputs)
    ]
    four = helper.make_tensor("four", 7, [1], [4])
    nodes[1:1] = [helper.make_node("Constant", [], ["four"], value=four), helper.make_node("Add", ["position", "four"], ["second"])]
    session = open_session(finish(nodes, INPUTS[:5], state.nbytes))
    got = run(session, state, **inputs(text, slice(0, 4)))
    for position in (0, 4):
        want = native.attend(params, text.q[:4], text.k[:4], text.v[:4], position, twin)
    np.testing.assert_array_equal(got, by_rows(want))
    np.testing.assert_array_equal(state, twin)


BAD_ATTRIBUTES = [
    ({"q_heads": 0}, "q_heads must be between"), ({"q_heads": None}, "q_heads must be between"), ({"kv_heads": 3}, "kv_heads must divide"),
    ({"q_heads": "four"}, "attribute q_heads must be an integer"), ({"q_heads": 4.0}, "attribute q_heads must be an integer"),
    ({"q_heads": [4, 4]}, "attribute q_heads must be an integer"), ({"q_heads": 1 << 40}, "attribute q_heads is out of range"),
    ({"key_dim": -8}, "key_dim must be"), ({"body_slots": 17}, "body_slots must be a multiple of 16"), ({"tail_slots": 0}, "tail_slots"),
    ({"element": 2}, "element must be"), ({"keep": 3}, "keep must be"), ({"scale": 1}, "scale must be a number with a decimal point"),
    ({"scale": float("nan")}, "attribute scale must be finite"), ({"softcap": -1.0}, "softcap must not be negative"),
    ({"score_decay": 1.5}, "score_decay must be"), ({"rotary_dim": 7}, "rotary_dim must be even"),
    ({"inv_freq": [1.0, 0.5]}, "inv_freq has 2 numbers and should have rotary_dim / 2 = 0"),
    ({"inv_freq": "none"}, "attribute inv_freq must be a list"), ({"rotary_dim": 2, "inv_freq": [float("inf")]}, "inv_freq must be finite"),
    ({"keep": 2, "sinks": 4, "window": 2**31 - 4}, r"sinks \+ window must fit the body"),
]  # fmt: skip


@pytest.mark.parametrize("change,sentence", BAD_ATTRIBUTES)
def test_malformed_attributes_are_refused_when_the_session_is_made(change, sentence):
    params = native.LayerParams(**make_params())
    with pytest.raises(Exception, match="BoundedCacheAttention: .*" + sentence):
        open_session(make_model(params, **change))


def bad_inputs():
    text = Text(make_params(), 20)
    good = inputs(text, slice(0, 4))
    yield "dimension", good | {"q": good["q"][:, :, :-1]}, "q must have the shape"
    yield "batch", good | {"k": np.repeat(good["k"], 2, 0)}, "k must have the shape"
    yield "rank", good | {"v": good["v"][0]}, "v must have the shape"
    yield "rows", good | {"v": good["v"][:, :3]}, "v has 3 rows but q has 4"
    yield "heads", good | {"q": by_heads(text.q[:4])[:, :3]}, "q must have the shape"
    yield "nothing", good | {"q": good["q"][:, :0]}, "q has no rows"
    yield "no position", good | {"position": at(0)[:0]}, "position must hold one number"
    yield "positions", good | {"position": np.array([0, 1])}, "position must hold one number"
    yield "negative", good | {"position": at(-1)}, "outside the tail"
    yield "beyond", good | {"position": at(17)}, "outside the tail"
    yield "too long", inputs(text, slice(0, 17)), "17 rows at position 0 do not fit the tail"
    yield "over the boundary", good | {"position": at(13)}, "4 rows at position 13 do not fit the tail"


@pytest.mark.parametrize("bad,sentence", [pytest.param(*case[1:], id=case[0]) for case in bad_inputs()])
def test_wrong_inputs_are_refused_and_change_nothing(bad, sentence):
    params = native.LayerParams(**make_params())
    session, state = open_session(make_model(params)), native.new_state(params)
    before = state.copy()
    with pytest.raises(Exception, match="BoundedCacheAttention: .*" + sentence):
        run(session, state, **bad)
    np.testing.assert_array_equal(state, before)
    run(session, state, **inputs(Text(make_params(), 4), slice(0, 4)))  # and the session goes on


def test_tables_are_checked():
    params = native.LayerParams(**make_params(), rotary_dim=6, fused_rotary=1)
    x = inputs(Text(make_params(), 4), slice(0, 4))
    table = np.ones((1, 4, 3), np.float32)
    session, state = open_session(make_model(params, INPUTS)), native.new_state(params)
    for cos, sin in ((table[:, :3], table), (table, table[:, :, :2]), (table[:, :, :2], table[:, :, :2]), (table[0], table)):
        with REFUSED:
            run(session, state, **x, cos=cos, sin=sin)
    with pytest.raises(Exception, match="fused_rotary needs cos and sin"):
        run(open_session(make_model(params)), state, **x)


@pytest.mark.parametrize("change", [-256, -1, 1, 256])
def test_a_state_of_the_wrong_size_is_refused(change):
    params = native.LayerParams(**make_params())
    size = native.state_bytes(params) + change
    session = open_session(make_model(params, state_size=size))
    with pytest.raises(Exception, match=f"the state has {size} bytes but these parameters need {size - change}"):
        run(session, native.aligned_bytes(size), **inputs(Text(make_params(), 4), slice(0, 4)))


def test_the_state_of_another_layer_is_refused():
    params, other = native.LayerParams(**make_params()), native.LayerParams(**make_params(scale=0.5))
    with pytest.raises(Exception, match="made for a layer with other parameters"):
        run(open_session(make_model(params)), native.new_state(other), **inputs(Text(make_params(), 4), slice(0, 4)))
    with pytest.raises(Exception, match="never initialised"):
        run(open_session(make_model(params)), native.aligned_bytes(native.state_bytes(params)), **inputs(Text(make_params(), 4), slice(0, 4)))
