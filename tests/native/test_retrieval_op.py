"""The ONNX Runtime op that chooses slots, before the op that attends to them: one state between both, the bits of the library."""

import numpy as np
import pytest
from cache_cases import make_params
from one_node import attributes, finish, open_session, run
from onnx import helper
from test_ort_op import at, by_heads, by_rows
from packed_cases import filled, twin
from test_retrieval import native_step

from edgekv import layout, native

GIVEN = ("q", "k", "v", "position", "state", "cos", "sin")


def both_nodes(params: native.LayerParams, given, size: int, **changes):
    """Retrieval and attention with the same inputs, the slots going from one to the other."""
    fields = attributes(params) | changes
    shared = [name if name in given else "" for name in GIVEN]
    choose = helper.make_node("SignVQRetrieval", shared, ["slots"], domain="edgekv", **fields)
    attend = helper.make_node("BoundedCacheAttention", [*shared, "slots"], ["y", "state.out"], domain="edgekv", **fields)
    return finish([choose, attend], given, size)


def packed(**more) -> dict:
    shape = {"format": 1, "intervals": 64, "key_dim": 32, "value_dim": 32, "sinks": 4}
    return make_params("full", 320, 16, "fp16", **(shape | more))


@pytest.mark.parametrize("form", [by_rows, by_heads, "together"])
@pytest.mark.parametrize("retrieve", [0, 9, 10_000])
def test_both_ops_give_the_bits_of_the_library(form, retrieve):
    params = packed()
    cache, text = filled(params, 150)
    cache.state.header["retrieve"], cache.state.header["candidates"] = retrieve, 4 * retrieve
    fields, ours, theirs = native.LayerParams(**params), twin(cache), twin(cache)
    inputs = {name: (by_rows if form == "together" else form)(getattr(text, name)[150:154]) for name in "qkv"}
    if form == "together":
        inputs = {"q": np.concatenate([inputs["q"], inputs["k"], inputs["v"]], axis=2)}
    session = open_session(both_nodes(fields, (*inputs, "position", "state"), len(ours)))
    got = run(session, ours, position=at(150), **inputs)
    np.testing.assert_array_equal(got, by_rows(native_step(fields, text, 150, 4, theirs, scored=retrieve > 0)[1]))
    np.testing.assert_array_equal(ours, theirs)


def test_queries_are_rotated_before_the_search():
    params = packed(rotary_dim=6, fused_rotary=1)
    cache, text = filled(params, 100)
    cache.state.header["retrieve"] = 6
    fields, state, other = native.LayerParams(**params), twin(cache), twin(cache)
    angle = np.arange(100, 103)[:, None] * np.array([1.0, 0.3, 0.05])
    tables = {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
    slots, y = native_step(fields, text, 100, 3, state, **tables)
    inputs = {name: by_rows(getattr(text, name)[100:103]) for name in "qkv"} | {name: table[None] for name, table in tables.items()}
    session = open_session(both_nodes(fields, GIVEN, len(other)))
    np.testing.assert_array_equal(run(session, other, position=at(100), **inputs), by_rows(y))
    q = text.q[100:103].copy()
    a, b, c, s = q[..., :3].copy(), q[..., 3:6].copy(), tables["cos"][:, None], tables["sin"][:, None]
    q[..., :3], q[..., 3:6] = a * c - b * s, b * c + a * s
    plain = native.LayerParams(**(params | {"fused_rotary": 0}))
    cache.state.header["params_hash"] = native.params_hash(plain)
    np.testing.assert_array_equal(native.retrieve(plain, q, 100, twin(cache)), slots)


def test_a_dense_cache_is_refused():
    params = native.LayerParams(**make_params())
    with pytest.raises(Exception, match="SignVQRetrieval: only a compressed body can be searched"):
        open_session(both_nodes(params, GIVEN[:5], native.state_bytes(params)))


def test_a_damaged_state_is_refused():
    params = packed()
    cache, text = filled(params, 100)
    fields, state = native.LayerParams(**params), twin(cache)
    session = open_session(both_nodes(fields, GIVEN[:5], len(state)))
    state[:256].view(layout.HEADER)[0]["body_count"] = 300
    with pytest.raises(Exception, match="SignVQRetrieval: the state is damaged"):
        run(session, state, position=at(100), **{name: by_rows(getattr(text, name)[100:101]) for name in "qkv"})
