"""Small caches and random texts for the oracle's tests."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from edgekv.layout import ELEMENTS, KEEPS, POSITIONS, SCORES
from edgekv.reference import ReferenceCache


def make_params(keep="full", body=64, tail=16, element="fp32", positions="original", **more) -> dict:
    params = {
        "q_heads": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 6, "body_slots": body, "tail_slots": tail,
        "element": ELEMENTS[element], "keep": KEEPS[keep], "positions": POSITIONS[positions], "scale": 0.4,
    }  # fmt: skip
    return params | more


INV_FREQ = (1.0, 0.3, 0.05)  # for rotary_dim = 6 of key_dim = 8: partial rotary


@st.composite
def bounded_params(draw, positions=("original", "cache"), elements=("fp16", "fp32")):
    """Parameters of a window or heavy cache, with every option at work."""
    keep = draw(st.sampled_from(["window", "heavy"]))
    tail = draw(st.sampled_from([16, 32]))
    body = draw(st.sampled_from([16, 32, 48, 80]))
    sinks = draw(st.integers(0, 5))
    more = {"sinks": sinks, "sliding_window": draw(st.sampled_from([0, 0, 7, 40])), "softcap": draw(st.sampled_from([0.0, 2.0]))}
    if keep == "heavy":
        more["window"] = draw(st.integers(0, body - sinks))
        more["score"] = SCORES[draw(st.sampled_from(sorted(SCORES)))]
        if more["score"] == SCORES["attention"]:
            more["observe"] = draw(st.integers(0, tail))
            more["score_normalise"] = draw(st.integers(0, 1))
            more["score_decay"] = draw(st.sampled_from([1.0, 0.9]))
    where = draw(st.sampled_from(positions))
    more |= {"rotary_dim": 6, "rotary_interleaved": draw(st.integers(0, 1))} if where == "cache" else {}
    more["q_heads"], more["kv_heads"] = draw(st.sampled_from([(4, 2), (3, 1), (2, 2)]))
    return make_params(keep, body, tail, draw(st.sampled_from(elements)), where, **more)


class Text:
    """Random queries, keys and values of a text, as a layer would see them: float32 [n, heads, dim]."""

    def __init__(self, params: dict, n: int, seed: int = 0):
        random = np.random.default_rng(seed)
        self.q = random.standard_normal((n, params["q_heads"], params["key_dim"])).astype(np.float32)
        self.k = random.standard_normal((n, params["kv_heads"], params["key_dim"])).astype(np.float32)
        self.v = random.standard_normal((n, params["kv_heads"], params["value_dim"])).astype(np.float32)


class Runner:
    """Feeds a text to a cache as the runtime does: blocks end at boundaries, where the cache is compacted."""

    def __init__(self, params: dict):
        self.params = params
        self.cache = ReferenceCache(params, INV_FREQ if params.get("rotary_dim") else ())
        self.position = 0

    def feed(self, text: Text, n: int, block: int = 1 << 30) -> np.ndarray:
        """Commit the next n tokens in blocks of at most `block`: y float32 [n, q_heads, value_dim]."""
        out, end, interval = [], self.position + n, self.params["tail_slots"]
        while self.position < end:
            rows = min(block, end - self.position, interval - self.position % interval)
            out.append(self.speculate(text, rows))
            self.position += rows
            if self.position % interval == 0:
                self.compact()
        return np.concatenate(out)

    def speculate(self, text: Text, rows: int) -> np.ndarray:
        """Run the next rows without committing them."""
        part = slice(self.position, self.position + rows)
        return self.cache.attend(text.q[part], text.k[part], text.v[part], self.position)

    def compact(self) -> None:
        cache_positions = self.params["positions"] == POSITIONS["cache"]
        rank_base = min(self.position, self.params["body_slots"]) if cache_positions else self.position
        self.cache.compact(self.position, rank_base)


def dense_attention(params: dict, q, k, v, query_pos, key_pos) -> np.ndarray:
    """Softmax attention in float64 straight from the definition: q [rows, q_heads, dim], k and v [n, q_heads, dim]."""
    scores = params["scale"] * np.einsum("thd,nhd->htn", q.astype(np.float64), k)
    if params.get("softcap"):
        scores = params["softcap"] * np.tanh(scores / params["softcap"])
    seen = key_pos[None, :] <= query_pos[:, None]
    if params.get("sliding_window"):
        seen &= query_pos[:, None] - key_pos[None, :] < params["sliding_window"]
    weights = np.where(seen, np.exp(scores - scores.max()), 0)
    return np.einsum("htn,nhd->thd", weights / weights.sum(-1, keepdims=True), v.astype(np.float64))


def repeat_heads(params: dict, x: np.ndarray) -> np.ndarray:
    """Key or value heads repeated for the query heads that share them: [n, kv_heads, dim] -> [n, q_heads, dim]."""
    return np.repeat(x, params["q_heads"] // params["kv_heads"], axis=1)
