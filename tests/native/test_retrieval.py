"""Steps on a compressed body against the NumPy oracle, which fills the states: the same slots, the same outputs within rounding."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout, native
from edgekv.errors import NativeError
from edgekv.reference.attention import softmax_row, visible
from edgekv.reference.self_index import SelfIndexCache, signs
from edgekv.reference.self_index.transform import hadamard

INSTRUCTION_SETS = native.SCHEMA["isa"]


@pytest.fixture(params=INSTRUCTION_SETS, scope="module", autouse=True)
def instruction_set(request):
    before = native.isa()
    native.set_isa(request.param)
    yield request.param
    native.set_isa(before)


@st.composite
def packed_params(draw):
    keep = draw(st.sampled_from(["full", "full", "window", "heavy"]))
    heads = draw(st.sampled_from([(4, 2), (3, 1), (2, 2), (14, 1)]))
    more = {
        "format": 1, "intervals": 64, "q_heads": heads[0], "kv_heads": heads[1], "scale": 0.3,
        "key_dim": draw(st.sampled_from([4, 32, 64, 80, 96, 128])), "value_dim": draw(st.sampled_from([6, 32, 64, 80, 128])),
        "value_bits": draw(st.sampled_from([2, 4, 8])), "sinks": draw(st.sampled_from([0, 3, 16, 40])),
        "sliding_window": draw(st.sampled_from([0, 0, 9, 60])), "softcap": draw(st.sampled_from([0.0, 2.0])),
    }  # fmt: skip
    if keep == "heavy":
        more |= {"observe": 8, "window": draw(st.integers(0, 64)), "score_normalise": 1}
    tail = draw(st.sampled_from([16, 48]))
    return make_params(keep, 320 if keep == "full" else 64, tail, draw(st.sampled_from(["fp16", "fp32"])), **more)


def filled(params: dict, n: int, seed: int = 0) -> tuple[SelfIndexCache, Text]:
    """The oracle after n tokens of a text of n + 48. Only what is stored matters, so nothing is attended to on the way; keys share
    an offset, so that mean keys matter."""
    cache, text = SelfIndexCache(params), Text(params, n + 48, seed)
    text.k += np.random.default_rng(seed).standard_normal((1, params["kv_heads"], params["key_dim"])).astype(np.float32)
    for start in range(0, n, params["tail_slots"]):
        rows = min(params["tail_slots"], n - start)
        store(cache, text, start, rows)
        if rows == params["tail_slots"]:
            cache.compact(start + rows)
    return cache, text


def store(cache: SelfIndexCache, text: Text, start: int, rows: int) -> None:
    """What attend() stores of these rows."""
    p, s, first = cache.params, cache.state, start - cache.tail_base
    layout.write_keys(s.tail_k, first, text.k[start : start + rows].transpose(1, 0, 2))
    s.tail_v[:, first : first + rows] = text.v[start : start + rows].transpose(1, 0, 2)
    for row in range(rows):
        observed = first + row - (p["tail_slots"] - p["observe"])
        if layout.keeps_scores(p) and observed >= 0:
            s.tail_q[:, observed] = text.q[start + row]


def twin(cache: SelfIndexCache) -> np.ndarray:
    state = native.aligned_bytes(len(cache.block))
    state[:] = cache.block
    return state


def scan_scores(cache: SelfIndexCache, head: int, query: np.ndarray) -> np.ndarray:
    """Table score of every body slot for a row's query heads [group, key_dim], token by token from the definition: int [count]."""
    p = cache.params
    together = np.float32(p["scale"]) * query.sum(0, dtype=np.float32)
    table, step = signs.score_table(hadamard(together), cache.state.codebook[head])
    means = cache.state.mean[head].astype(np.float32)
    bias = signs.interval_bias(together, means, cache.tail_base // p["tail_slots"] - 1, step)
    codes, where = cache.codes()[head], cache.state.body_pos[head]
    return np.array([sum(int(table[g, c]) for g, c in enumerate(codes[i])) + bias[where[i] // p["tail_slots"]] for i in range(cache.count)])


def expect_slots(cache: SelfIndexCache, text: Text, position: int, rows: int, got: np.ndarray, retrieve: int, rerank: int) -> None:
    """Every row's slots are those of the oracle. Ranked again, slots whose weights differ by rounding may have changed places."""
    p = cache.params
    assert got.shape == (p["kv_heads"], rows, min(retrieve, cache.count)) and got.dtype == np.int32
    keys, _ = cache.body()
    cache.retrieve, cache.rerank = retrieve, max(rerank, 1)
    for row in range(rows):
        seen = visible(cache.state.body_pos[:, : cache.count], position + row, p["sliding_window"])
        query = text.q[position + row].reshape(p["kv_heads"], -1, p["key_dim"])
        for head, want in enumerate(cache.retrieved_slots(query, seen, keys)):
            slots = got[head, row]
            assert (slots[len(want) :] == -1).all()
            slots = slots[: len(want)]
            assert (np.diff(slots) > 0).all()
            extra, missing = np.setdiff1d(slots, want), np.setdiff1d(want, slots)
            if not len(extra):
                continue
            assert rerank > 1, (extra, missing)
            score, allowed, among = scan_scores(cache, head, query[head]), np.flatnonzero(seen[head]), np.zeros((1, cache.count), bool)
            among[0, allowed[signs.best(score[allowed], len(want) * rerank)]] = True
            assert among[0, extra].all()
            weight = softmax_row(query[head : head + 1], keys[head : head + 1], among, p["scale"], p["softcap"])[0].sum(0)
            np.testing.assert_allclose(np.sort(weight[extra]), np.sort(weight[missing]), rtol=1e-4)


def oracle_step(cache: SelfIndexCache, text: Text, position: int, rows: int, slots: np.ndarray | None) -> np.ndarray:
    """The oracle's step, made to attend to the given slots."""
    chosen = iter([] if slots is None else slots.transpose(1, 0, 2))
    cache.retrieve = None if slots is None else slots.shape[-1]
    cache.retrieved_slots = lambda query, seen, keys: [head[head >= 0] for head in next(chosen)]
    part = slice(position, position + rows)
    y = cache.attend(text.q[part], text.k[part], text.v[part], position)
    del cache.retrieved_slots
    return y


def native_step(fields, text: Text, position: int, rows: int, state: np.ndarray, **more) -> tuple[np.ndarray, np.ndarray]:
    """Retrieval and attention: (slots, y)."""
    part = slice(position, position + rows)
    slots = native.retrieve(fields, text.q[part], position, state, **more)
    return slots, native.attend(fields, text.q[part], text.k[part], text.v[part], position, state, slots=slots, **more)


@given(packed_params(), st.integers(0, 300), st.integers(1, 16), st.integers(0, 70), st.sampled_from([0, 1, 2, 4]), st.integers(1, 3), st.integers(0, 9))
@settings(max_examples=25)
def test_slots_and_outputs_equal_the_oracle(params, n, rows, retrieve, rerank, threads, seed):
    cache, text = filled(params, n, seed)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    cache.state.header["retrieve"], cache.state.header["rerank"] = retrieve, rerank
    fields, state = native.LayerParams(**params), twin(cache)
    slots, y = native_step(fields, text, n, rows, state, threads=threads)
    if retrieve:
        expect_slots(cache, text, n, rows, slots, retrieve, rerank)
    else:
        assert slots.shape == (params["kv_heads"], rows, 0)
    want = oracle_step(cache, text, n, rows, slots if slots.size else None)
    np.testing.assert_allclose(y, want, atol=1e-4)
    np.testing.assert_array_equal(state[256:], cache.block[256:])
    assert native.state_hash(fields, state, n) == native.state_hash(fields, twin(cache), n)


@given(packed_params(), st.integers(100, 300), st.sampled_from([0, 5, 40]), st.sampled_from([1, 3]), st.integers(2, 16))
@settings(max_examples=15)
def test_a_row_of_a_block_has_the_slots_and_the_bits_it_has_alone(params, n, retrieve, rerank, rows):
    cache, text = filled(params, n)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    cache.state.header["retrieve"], cache.state.header["rerank"] = retrieve, rerank
    fields, block, single = native.LayerParams(**params), twin(cache), twin(cache)
    slots, y = native_step(fields, text, n, rows, block, threads=2)
    for row in range(rows):
        alone, z = native_step(fields, text, n + row, 1, single)
        np.testing.assert_array_equal(alone[:, 0], slots[:, row])
        np.testing.assert_array_equal(z[0], y[row])
    assert native.state_hash(fields, block, n + rows) == native.state_hash(fields, single, n + rows)


def test_the_best_table_scores_by_brute_force_over_many_blocks():
    params = make_params("full", 4096, 256, format=1, intervals=16, key_dim=64, value_dim=64, sinks=20, q_heads=4, kv_heads=2)
    cache, text = filled(params, 2048 + 7)
    fields, state = native.LayerParams(**params), twin(cache)
    header = state[:256].view(layout.HEADER)[0]
    query = text.q[2055].reshape(2, 2, 64)
    scores = [scan_scores(cache, head, query[head]) for head in range(2)]
    for retrieve in (1, 31, 500, 2000, 2027, 2028, 5000):
        header["retrieve"] = retrieve
        slots = native.retrieve(fields, text.q[2055:2056], 2055, state)
        for head in range(2):
            np.testing.assert_array_equal(slots[head, 0], np.sort(np.lexsort((np.arange(2028), -scores[head]))[:retrieve]))


@pytest.mark.parametrize("sliding", [0, 90])
def test_retrieving_everything_is_attending_to_everything(sliding):
    params = make_params("full", 320, 16, format=1, intervals=64, key_dim=64, value_dim=32, sinks=4, sliding_window=sliding)
    cache, text = filled(params, 300)
    fields, y = native.LayerParams(**params), []
    for retrieve in (0, 292, 10_000):
        cache.state.header["retrieve"] = retrieve
        y.append(native_step(fields, text, 300, 4, twin(cache))[1])
    np.testing.assert_array_equal(y[1], y[2])
    np.testing.assert_allclose(y[0], y[1], atol=1e-5)


@given(packed_params(), st.integers(60, 250), st.integers(1, 16))
@settings(max_examples=10)
def test_rejected_rows_leave_no_trace(params, n, rows):
    cache, text = filled(params, n)
    rows = min(rows, params["tail_slots"] - n % params["tail_slots"])
    cache.state.header["retrieve"], cache.state.header["rerank"] = 9, 2
    fields, state = native.LayerParams(**params), twin(cache)
    before = native.state_hash(fields, state, n)
    wrong = Text(params, n + 48, 77)
    native_step(fields, wrong, n, rows, state)
    assert native.state_hash(fields, state, n) == before
    for got, want in zip(native_step(fields, text, n, 1, state), native_step(fields, text, n, 1, twin(cache))):
        np.testing.assert_array_equal(got, want)


def test_wrong_slots_are_refused_and_change_nothing():
    params = make_params("full", 320, 16, format=1, intervals=64, key_dim=32, value_dim=32, sinks=4)
    cache, text = filled(params, 100)
    fields, state = native.LayerParams(**params), twin(cache)
    for slots, sentence in (([[[92]], [[0]]], "between -1 and 91"), ([[[0]], [[-2]]], "between -1 and 91"), ([[[0]]], "shape")):
        with pytest.raises(NativeError, match=sentence):
            native.attend(fields, text.q[100:101], text.k[100:101], text.v[100:101], 100, state, slots=np.array(slots, np.int32))
    dense = make_params()
    plain, other = native.LayerParams(**dense), Text(dense, 1)
    with pytest.raises(NativeError, match="this cache is dense"):
        native.attend(plain, other.q, other.k, other.v, 0, native.new_state(plain), slots=np.zeros((2, 1, 1), np.int32))
    with pytest.raises(NativeError, match="this cache is dense"):
        native.retrieve(plain, other.q, 0, native.new_state(plain))
    np.testing.assert_array_equal(state, cache.block)
