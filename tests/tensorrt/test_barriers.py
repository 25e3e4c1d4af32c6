"""Every barrier of the CUDA kernels is needed, and its loss is noticed: each is taken away in turn, and the kernels are run in
the emulation's orders until one gives another result. A barrier that nobody misses would either be a waste of time on the
device or a gap in the tests."""

import numpy as np
import pytest
from cache_cases import INV_FREQ, Runner, Text, make_params
from emulated import EmulatedCache
from packed_cases import filled, store

ORDERS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), *[(3, seed) for seed in range(4)]]


def attend_work(library):
    """Rows side by side and walking, several splits, several tiles each; stages per tile that do and do not divide the ring."""
    results = []
    for value_dim in (72, 40):
        params = make_params("window", 272, 32, "fp16", sinks=4, q_heads=3, kv_heads=1, key_dim=72, value_dim=value_dim)
        text = Text(params, 352)
        runner = Runner(params)
        runner.feed(text, 320)
        for rows in (2, 20):
            cache = EmulatedCache(library, params, (), runner.cache.state.block)
            part = slice(320, 320 + rows)
            results += [cache.attend(text.q[part], text.k[part], text.v[part], 320), cache.block]
    return results


def compact_work(library, **score):
    """Heavy-hitter compactions with turned keys and several groups of moved tokens; in the second, many tokens tie."""
    params = make_params(
        "heavy", 288, 32, "fp16", "cache", sinks=4, window=16, key_dim=72, value_dim=40, rotary_dim=6, q_heads=2, kv_heads=1,
        **(score or {"observe": 20}),
    )  # fmt: skip
    results = []
    for ties in (False, True):
        text = Text(params, 384)
        runner = Runner(params)
        runner.feed(text, 352)
        runner.speculate(text, 32)
        state = runner.cache.state
        if ties and state.tail_q.size:
            state.tail_q[:] = 0
            state.body_score[:] = np.random.default_rng(2).choice([0.0, 2.0, 50.0], state.body_score.shape, p=[0.4, 0.3, 0.3])
        cache = EmulatedCache(library, params, INV_FREQ, state.block)
        cache.compact(384, 288)
        results.append(cache.block)
    return results


def compact_by_keys_work(library):
    return compact_work(library, score=1)


def retrieve_work(library):
    """Both rankings of a compressed body of several splits, two rows; in the second, all tokens tie."""
    params = make_params("full", 1088, 32, format=1, intervals=64, key_dim=72, value_dim=8, sinks=4, q_heads=3, kv_heads=1)
    cache, text = filled(params, 1056)
    results = []
    for candidates, size in ((0, 1), (360, 1), (0, 0), (360, 0)):
        cache.state.header["retrieve"], cache.state.header["candidates"] = 120, candidates
        ours = EmulatedCache(library, params, (), cache.block)
        results.append(ours.retrieve(text.q[1056:1058] * size, 1056))
    return results


def attend_packed_work(library):
    """A compressed body of several splits and tiles, attended to as a whole, side by side and walking, and where rows choose."""
    params = make_params("full", 1088, 32, format=1, intervals=64, key_dim=72, value_dim=72, sinks=20, q_heads=3, kv_heads=1)
    cache, text = filled(params, 1056)
    results = []
    for rows, retrieve in ((2, 0), (20, 0), (2, 200)):
        cache.state.header["retrieve"], part = retrieve, slice(1056, 1056 + rows)
        ours = EmulatedCache(library, params, (), cache.block)
        slots = ours.retrieve(text.q[part], 1056) if retrieve else None
        results += [ours.attend(text.q[part], text.k[part], text.v[part], 1056, slots=slots), ours.block]
    return results


def compact_packed_work(library):
    """A full tail packed into a body of several groups, of which heavy hitters stay."""
    params = make_params(
        "heavy", 224, 64, "fp16", format=1, intervals=64, value_bits=2, sinks=4, window=16, observe=20, key_dim=72, value_dim=40, q_heads=2, kv_heads=1
    )
    cache, text = filled(params, 256, more=64)
    store(cache, text, 256, 64)
    ours = EmulatedCache(library, params, (), cache.block)
    ours.compact(320)
    return [ours.block]


WORK = {
    "unpack_candidates.cuh": compact_packed_work, "pack_tokens.cuh": compact_packed_work, "move_packed.cuh": compact_packed_work,
    "attend_packed.cuh": attend_packed_work, "combine_packed.cuh": attend_packed_work,
    "hadamard.cuh": retrieve_work, "turn_queries.cuh": retrieve_work, "retrieve.cuh": retrieve_work,
    "rank_candidates.cuh": retrieve_work,
    "select.cuh": retrieve_work, "attend.cuh": attend_work, "observe.cuh": compact_work, "rank_keys.cuh": compact_by_keys_work, "move.cuh": compact_work,
}  # fmt: skip


def differs(library, work, good) -> bool:
    try:
        return any(not np.array_equal(a, b, equal_nan=True) for a, b in zip(work(library), good))
    except RuntimeError:
        return True


@pytest.mark.parametrize("file", WORK)
def test_each_barrier_is_needed(emulated, file):
    work = WORK[file]
    good = work(emulated)
    places = [p for p in emulated.sites() if p.startswith(file)]
    assert places, "the kernels wait nowhere: the test looks at the wrong file"
    for order in ORDERS:
        emulated.order(*order)
        assert not differs(emulated, work, good), f"the result depends on the order {order}"
    missed = []
    for place in places:
        emulated.drop(place)
        caught = False
        for order in ORDERS:
            emulated.order(*order)
            if differs(emulated, work, good):
                caught = True
                break
        if not caught:
            missed.append(place)
    emulated.drop("")
    assert not missed, f"nobody misses these barriers: {missed}"
