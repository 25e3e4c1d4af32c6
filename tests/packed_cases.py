"""Compressed caches for tests: parameters, states that the oracle has filled, and what the oracle chooses and answers on them."""

from __future__ import annotations

import numpy as np
from cache_cases import Text, make_params
from hypothesis import strategies as st

from edgekv import layout, native
from edgekv.reference.attention import visible
from edgekv.reference.self_index import SelfIndexCache, signs
from edgekv.reference.self_index.transform import hadamard


@st.composite
def packed_params(draw):
    keep = draw(st.sampled_from(["full", "full", "window", "heavy"]))
    heads = draw(st.sampled_from([(4, 2), (3, 1), (2, 2), (14, 1)]))
    more = {
        "format": 1, "intervals": 64, "q_heads": heads[0], "kv_heads": heads[1], "scale": 0.3,
        "key_dim": draw(st.sampled_from([4, 32, 64, 80, 96, 128])), "value_dim": draw(st.sampled_from([6, 32, 64, 80, 128])),
        "key_bits": draw(st.sampled_from([2, 4])), "value_bits": draw(st.sampled_from([2, 4, 8])), "sinks": draw(st.sampled_from([0, 3, 16, 40])),
        "sliding_window": draw(st.sampled_from([0, 0, 9, 60])), "softcap": draw(st.sampled_from([0.0, 2.0])),
    }  # fmt: skip
    if keep == "heavy":
        more |= {"observe": 8, "window": draw(st.integers(0, 64)), "score_normalise": 1}
    tail = draw(st.sampled_from([16, 48]))
    return make_params(keep, 320 if keep == "full" else 64, tail, draw(st.sampled_from(["fp16", "fp32"])), **more)


@st.composite
def compaction_params(draw):
    """Compressed layers that fill and evict within a few short intervals."""
    keep = draw(st.sampled_from(["full", "window", "heavy"]))
    more = {"format": 1, "intervals": 24, "key_bits": draw(st.sampled_from([2, 4])), "value_bits": draw(st.sampled_from([2, 4, 8])), "sinks": draw(st.integers(0, 40))}
    more |= {"key_dim": draw(st.sampled_from([8, 20, 64])), "value_dim": draw(st.sampled_from([6, 33, 64])), "softcap": draw(st.sampled_from([0.0, 2.0]))}
    body, tail = draw(st.sampled_from([32, 64, 96])) if keep != "full" else 384, draw(st.sampled_from([16, 48]))
    if keep == "heavy":
        more |= {"score": draw(st.integers(0, 1)), "window": draw(st.integers(0, body)), "sliding_window": draw(st.sampled_from([0, 50]))}
        if more["score"] == layout.SCORES["attention"]:
            more |= {"observe": draw(st.integers(0, tail)), "score_normalise": draw(st.integers(0, 1)), "score_decay": 0.9}
    return make_params(keep, body, tail, draw(st.sampled_from(["fp16", "fp32"])), **more)


def filled(params: dict, n: int, seed: int = 0, more: int = 48) -> tuple[SelfIndexCache, Text]:
    """The oracle after n tokens of a text of n + more. Only what is stored matters, so nothing is attended to on the way; keys share
    an offset, so that mean keys matter."""
    cache, text = SelfIndexCache(params), Text(params, n + more, seed)
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


def expect_slots(cache: SelfIndexCache, text: Text, position: int, rows: int, got: np.ndarray, retrieve: int, candidates: int) -> None:
    """Every row's slots are those of the oracle."""
    p = cache.params
    assert got.shape == (p["kv_heads"], rows, min(retrieve, cache.count)) and got.dtype == np.int32
    cache.retrieve, cache.candidates = retrieve, candidates
    for row in range(rows):
        seen = visible(cache.state.body_pos[:, : cache.count], position + row, p["sliding_window"])
        query = text.q[position + row].reshape(p["kv_heads"], -1, p["key_dim"])
        for head, want in enumerate(cache.retrieved_slots(query, seen)):
            np.testing.assert_array_equal(got[head, row, : len(want)], want)
            assert (got[head, row, len(want) :] == -1).all()


def oracle_step(cache: SelfIndexCache, text: Text, position: int, rows: int, slots: np.ndarray | None) -> np.ndarray:
    """The oracle's step, made to attend to the given slots as to retrieved ones."""
    chosen = iter([] if slots is None else slots.transpose(1, 0, 2))
    cache.retrieve = None if slots is None else slots.shape[-1]
    cache.retrieved_slots = lambda query, seen: [head[head >= 0] for head in next(chosen)]
    part = slice(position, position + rows)
    y = cache.attend(text.q[part], text.k[part], text.v[part], position)
    del cache.retrieved_slots
    return y
