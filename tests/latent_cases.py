"""Latent caches for tests: parameters, maps and texts, and a runner that feeds the oracle."""

from __future__ import annotations

import numpy as np
from cache_cases import Runner, Text, make_params
from hypothesis import strategies as st

from edgekv.layout import SCORES, complete
from edgekv.reference.latent import LatentCache
from edgekv.reference.self_index import LatentIndexCache


@st.composite
def latent_params(draw):
    keep = draw(st.sampled_from(["full", "window", "heavy"]))
    dim = draw(st.sampled_from([8, 24, 64]))
    q_heads, kv_heads = draw(st.sampled_from([(4, 2), (3, 1), (2, 2), (9, 3)]))
    rotary = draw(st.sampled_from([0, 6, dim]))
    more = {
        "q_heads": q_heads, "kv_heads": kv_heads, "key_dim": dim, "value_dim": draw(st.sampled_from([6, 16, 40])), "sinks": 0 if keep == "full" else 3,
        "latent": draw(st.integers(1, kv_heads * dim)), "rotary_dim": rotary, "fused_rotary": int(rotary > 0), "rotary_interleaved": draw(st.integers(0, 1)),
        "sliding_window": draw(st.sampled_from([0, 0, 20])), "softcap": draw(st.sampled_from([0.0, 0.0, 5.0])),
    }  # fmt: skip
    if keep == "heavy":
        more |= {"window": 8, "score": SCORES["keys"], "latent": max(more["latent"], 4)}  # with fewer numbers, cosines tie
    return make_params(keep, 192 if keep == "full" else 48, 16, draw(st.sampled_from(["fp16", "fp32"])), **more)


@st.composite
def packed_latent_params(draw):
    """The same of compressed caches."""
    p = draw(latent_params())
    keep, dim = draw(st.sampled_from(["full", "window"])), draw(st.sampled_from([8, 20, 64, 80]))
    more = {
        "format": 1, "intervals": 64, "key_dim": dim, "latent": draw(st.integers(1, p["kv_heads"] * dim)), "rotary_dim": min(p["rotary_dim"], dim),
        "value_dim": draw(st.sampled_from([6, 32, 80])), "value_bits": draw(st.sampled_from([2, 4, 8])), "sinks": draw(st.sampled_from([0, 3, 16, 40])),
    }  # fmt: skip
    shape = make_params(keep, 256 if keep == "full" else 64, draw(st.sampled_from([16, 48])), draw(st.sampled_from(["fp16", "fp32"])))
    return {**p, "window": 0, "score": 0, **{name: shape[name] for name in ("keep", "body_slots", "tail_slots", "element")}, **more}


class Latent:
    """Random maps and frequencies for parameters with `latent`, and what steps of the library take of them."""

    def __init__(self, params: dict, seed: int = 0):
        random = np.random.default_rng(seed)
        p = self.params = complete(params)
        numbers = p["kv_heads"] * p["key_dim"]
        self.encoder = random.standard_normal((numbers, p["latent"])).astype(np.float32) * numbers**-0.5
        self.decoder = random.standard_normal((p["kv_heads"], p["latent"] + 1, p["key_dim"])).astype(np.float32) * p["latent"] ** -0.5
        pairs = p["rotary_dim"] // 2
        self.inv_freq = (1.0 / 50.0 ** (np.arange(pairs) / max(pairs, 1))).astype(np.float32)

    def packed_oracle(self, retrieve: int | None = None) -> LatentIndexCache:
        return LatentIndexCache(self.params, self.inv_freq, self.encoder, self.decoder, retrieve)

    def oracle(self, block: np.ndarray | None = None) -> LatentCache:
        return LatentCache(self.params, self.inv_freq, self.encoder, self.decoder, block)

    def inputs(self, position: int, rows: int) -> dict:
        """Maps, frequencies and rotation tables of the rows from `position` on."""
        given = {"key_encode": self.encoder, "key_decode": self.decoder, "inv_freq": self.inv_freq}
        if self.params["fused_rotary"]:
            angle = (position + np.arange(rows, dtype=np.float32))[:, None] * self.inv_freq
            given |= {"cos": np.cos(angle), "sin": np.sin(angle)}
        return given


class LatentRunner(Runner):
    """Runner with the oracle of a latent cache."""

    def __init__(self, params: dict, maps: Latent):
        self.params, self.maps, self.cache, self.position = params, maps, maps.oracle(), 0


__all__ = ["Latent", "LatentRunner", "Text", "latent_params", "packed_latent_params"]
