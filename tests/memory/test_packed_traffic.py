"""Counted bytes == formula, to the byte, for steps on a compressed body: dense, retrieving, ranked again, through a sliding window."""

import numpy as np
import pytest
from latent_cases import Latent

from edgekv import layout, native
from edgekv.memory.traffic import step_traffic
from edgekv.reference.self_index import SelfIndexCache

SHAPES = {
    "full": {"keep": 0, "body_slots": 512},
    "window": {"keep": 1, "body_slots": 192, "sinks": 20},
    "no-sinks": {"keep": 0, "body_slots": 512, "sinks": 0, "key_bits": 4, "value_bits": 2},
    "sliding": {"keep": 1, "body_slots": 224, "sinks": 0, "sliding_window": 210},
    "latent": {"keep": 1, "body_slots": 192, "sinks": 20, "latent": 41, "value_bits": 2},
    "latent-sliding": {"keep": 0, "body_slots": 512, "sinks": 0, "latent": 64, "sliding_window": 210},
    "odd-heads": {"keep": 0, "body_slots": 512, "key_dim": 44, "value_dim": 20, "key_bits": 4, "value_bits": 8, "q_heads": 7, "kv_heads": 1},
}
RETRIEVALS = ((0, 0, False), (24, 0, False), (24, 96, False), (24, 96, True), (24, 1536, True), (24, 31, True), (511, 2044, False), (511, 2044, True))


def params_of(**fields):
    base = {"q_heads": 6, "kv_heads": 2, "key_dim": 32, "value_dim": 32, "tail_slots": 32, "scale": 0.3, "sinks": 33, "format": 1}
    return layout.complete({**base, "value_bits": 4, "intervals": 64, **fields})


@pytest.fixture(params=native.SCHEMA["isa"])
def isa(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


def state_at(params, position):
    """The bytes of a cache that has read `position` random tokens."""
    random, cache = np.random.default_rng(position), Latent(params).packed_oracle() if params["latent"] else SelfIndexCache(params)
    tail = params["tail_slots"]
    for _ in range(position // tail):
        layout.write_keys(cache.state.tail_k, 0, random.standard_normal((params["kv_heads"], tail, params["key_dim"]), np.float32))
        cache.state.tail_v[:] = random.standard_normal(cache.state.tail_v.shape)
        cache.compact(cache.tail_base + tail)
    state = native.aligned_bytes(len(cache.block))
    state[:] = cache.block
    return state


def counted(params, state, position, rows, retrieve, candidates, scored):
    random, struct = np.random.default_rng(1), native.LayerParams(**params)
    view = layout.StateView(params, state)
    view.header["retrieve"], view.header["candidates"] = retrieve, candidates
    q, k, v = (
        random.standard_normal((rows, heads, dim), np.float32)
        for heads, dim in ((params["q_heads"], params["key_dim"]), (params["kv_heads"], params["key_dim"]), (params["kv_heads"], params["value_dim"]))
    )
    before = view.header["traffic"].copy()
    maps = Latent(params).inputs(position, rows) if params["latent"] else {}
    native.attend(struct, q, k, v, position, state, slots=native.retrieve(struct, q, position, state, scored=scored), **maps)
    return dict(zip(layout.TRAFFIC, (view.header["traffic"] - before).tolist(), strict=False))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("position", [7, 32, 100, 357])
def test_counted_bytes_are_the_formula(shape, position, isa):
    params = params_of(**SHAPES[shape])
    state = state_at(params, position)
    for rows in (1, 3, 16 if position % 32 <= 16 else 2):
        for retrieve, candidates, scored in RETRIEVALS[: 3 if params["latent"] else None]:  # latent keys are not ranked again
            want = step_traffic(params, position, rows, isa, retrieve=retrieve, candidates=candidates, scored=scored)
            found = counted(params, state, position, rows, retrieve, candidates, scored)
            assert found == want, (rows, retrieve, candidates, scored)
