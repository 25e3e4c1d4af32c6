"""Counted bytes == formula, to the byte: the kernels' counters against edgekv.memory.traffic, over policies, formats and kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout, native
from edgekv.memory.traffic import ROWS_PER_PASS, compaction_traffic, kept_positions, step_traffic

ISAS = native.SCHEMA["isa"]


@pytest.fixture(autouse=True)
def restore_isa():
    before = native.isa()
    yield
    native.set_isa(before)


def params_of(**fields):
    base = {"q_heads": 4, "kv_heads": 2, "key_dim": 8, "value_dim": 8, "body_slots": 64, "tail_slots": 32, "scale": 0.3}
    return layout.complete({**base, **fields})


class Fed:
    """A native state fed with random rows from the start of the text, compacting at boundaries."""

    def __init__(self, params, seed=0):
        self.params, self.position = params, 0
        self.struct = native.LayerParams(**params)
        self.state = native.new_state(self.struct)
        self.view = layout.StateView(params, self.state)
        self.random = np.random.default_rng(seed)
        self.inv_freq = np.float32(0.7) ** np.arange(params["rotary_dim"] // 2, dtype=np.float32)

    def step(self, rows, commit=True):
        p = self.params
        q, k, v = (
            self.random.standard_normal((rows, heads, dim), np.float32)
            for heads, dim in ((p["q_heads"], layout.given_dim(p)), (p["kv_heads"], layout.given_dim(p)), (p["kv_heads"], p["value_dim"]))
        )
        maps = {name: np.ones((heads, p["head_dim"], p["key_dim"]), np.float32) for name, heads in
                (("query_map", p["q_heads"]), ("key_map", p["kv_heads"])) if p["head_dim"]}  # fmt: skip
        if p["latent"]:
            maps = {"key_encode": np.ones((p["kv_heads"] * p["key_dim"], p["latent"]), np.float32),
                    "key_decode": np.ones((p["kv_heads"], p["latent"] + 1, p["key_dim"]), np.float32)}  # fmt: skip
        before = self.view.header["traffic"].copy()
        native.attend(self.struct, q, k, v, self.position, self.state, **maps)
        counted = dict(zip(layout.TRAFFIC, (self.view.header["traffic"] - before).tolist()[: len(layout.TRAFFIC)], strict=True))
        if commit:
            self.position += rows
        return counted

    def advance(self, to):
        """Feeds up to `to` tokens in blocks that end at boundaries."""
        tail = self.params["tail_slots"]
        while self.position < to:
            rows = min(tail - self.position % tail, to - self.position)
            self.step(rows)
            if self.position % tail == 0 and (self.params["keep"] or self.position <= self.params["body_slots"]):
                self.compact()

    def compact(self):
        """Compacts; returns (bytes read, bytes written) as counted and as the formula has them."""
        p, header = self.params, self.view.header
        before, names = self.kept(), [layout.TRAFFIC.index(n) for n in ("compact_read", "compact_write")]
        counted, old = header["traffic"][names].copy(), int(header["rank_base"]) - int(header["body_count"])
        rank_base = min(self.position, p["body_slots"]) if p["positions"] else self.position
        native.compact(self.struct, self.state, self.position, rank_base, self.inv_freq)
        turn = rank_base - int(header["body_count"]) - old
        formula = compaction_traffic(p, before, self.kept(), self.position, turn if p["positions"] else 0, native.isa())
        return tuple((header["traffic"][names] - counted).tolist()), formula

    def kept(self):
        count = int(self.view.header["body_count"])
        return [heads[:count].tolist() for heads in self.view.body_pos]


POLICIES = {
    "full": {"keep": 0, "body_slots": 320},
    "window": {"keep": 1, "sinks": 4},
    "thin-keys": {"keep": 1, "sinks": 4, "key_dim": 4, "head_dim": 8},
    "latent": {"keep": 1, "sinks": 4, "latent": 5},
    "latent-full": {"keep": 0, "body_slots": 320, "latent": 16, "sliding_window": 40},
    "latent-heavy": {"keep": 2, "sinks": 4, "window": 16, "score": 1, "latent": 7},
    "window-without-sinks": {"keep": 1},
    "heavy": {"keep": 2, "sinks": 4, "window": 16, "observe": 16},
    "heavy-unobserved": {"keep": 2, "sinks": 1, "window": 8},
    "heavy-by-keys": {"keep": 2, "sinks": 4, "window": 16, "score": 1},
    "sliding-window-layer": {"keep": 1, "body_slots": 48, "sliding_window": 48},
    "sliding-window-in-full": {"keep": 0, "body_slots": 320, "sliding_window": 40},
    "sliding-window-in-heavy": {"keep": 2, "sinks": 2, "window": 16, "observe": 16, "sliding_window": 70, "body_slots": 64},
}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("element", [0, 1])
@pytest.mark.parametrize("name", POLICIES)
def test_counted_bytes_equal_the_formula(name, element, isa):
    native.set_isa(isa)
    fed = Fed(params_of(**POLICIES[name], element=element))
    for depth, rows in ((0, 1), (5, 3), (31, 1), (32, 32), (100, 1), (130, 20), (250, 6), (287, 1), (300, 4)):
        fed.advance(depth)
        kept = fed.kept()
        assert fed.step(rows, commit=False) == step_traffic(fed.params, fed.position, rows, isa, kept), (depth, rows)
        known = kept_positions(fed.params, fed.position)
        if known is not None:
            assert all(head == known for head in kept)


@pytest.mark.parametrize("isa", ISAS)
def test_blocks_of_more_rows_than_one_pass(isa):
    """Rows beyond a pass load the cache again: 32 tokens x 8 query heads per kv head is several passes on every kernel."""
    native.set_isa(isa)
    fed = Fed(params_of(q_heads=16, kv_heads=2, keep=0, body_slots=320, sliding_window=90))
    fed.advance(256)
    counted = fed.step(32, commit=False)
    assert counted == step_traffic(fed.params, 256, 32, isa)
    assert 32 * 8 > ROWS_PER_PASS[isa]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("hidden", [(16, 160), (0, 128), (144, 224), (16, 16)])
@pytest.mark.parametrize("sliding", [0, 90])
def test_hidden_slots_are_not_read(hidden, sliding, isa):
    """Drafting with a part of the cache: slots hidden_from..hidden_to-1 of the body are left out."""
    native.set_isa(isa)
    fed = Fed(params_of(keep=0, body_slots=320, sliding_window=sliding))
    fed.advance(230)
    fed.view.header["hidden_from"], fed.view.header["hidden_to"] = hidden
    assert fed.step(2, commit=False) == step_traffic(fed.params, 230, 2, isa, hidden=hidden)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("element", [0, 1])
@pytest.mark.parametrize("positions", [0, 1])
@pytest.mark.parametrize("name", ["full", "window", "window-without-sinks", "heavy", "heavy-unobserved", "heavy-by-keys", "latent", "latent-heavy"])
def test_compaction_counts_equal_the_formula(name, positions, element, isa):
    native.set_isa(isa)
    turned = positions and name != "full" and "latent" not in name
    fed = Fed(params_of(**POLICIES[name], element=element, positions=int(turned), rotary_dim=0 if "latent" in name else 4))
    for _ in range(9):
        fed.step(32)
        counted, formula = fed.compact()
        assert counted == formula
    assert formula[1] > 0


@settings(max_examples=60, deadline=None)
@given(
    kv_heads=st.integers(1, 3), group=st.integers(1, 5), key_dim=st.integers(1, 40), value_dim=st.integers(1, 40),
    element=st.integers(0, 1), keep=st.integers(0, 2), body=st.integers(2, 20), tail=st.integers(1, 6), window=st.integers(0, 200),
    depth=st.integers(0, 300), rows=st.integers(1, 96),
)  # fmt: skip
def test_random_shapes(kv_heads, group, key_dim, value_dim, element, keep, body, tail, window, depth, rows):
    tail_slots = 16 * tail
    params = params_of(q_heads=kv_heads * group, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim, element=element, keep=keep,
                       body_slots=-(-300 // tail_slots) * tail_slots if keep == 0 else 16 * body, tail_slots=tail_slots,
                       sinks=2 if keep else 0, window=8 if keep == 2 else 0, observe=16 if keep == 2 else 0, sliding_window=window)  # fmt: skip
    fed = Fed(params)
    fed.advance(depth)
    rows = min(rows, tail_slots - depth % tail_slots)
    assert fed.step(rows, commit=False) == step_traffic(params, depth, rows, native.isa(), fed.kept())


def test_decode_step_of_a_full_cache_by_hand():
    """100 tokens, 2 kv heads, 8 numbers each in fp16: 96 in the body, then 4 and the new one in the tail (keys: blocks of 16)."""
    traffic = step_traffic(params_of(keep=0, body_slots=320), 100)
    assert traffic["read_body_keys"] == traffic["read_body_values"] == 2 * 96 * 8 * 2
    assert (traffic["read_tail_keys"], traffic["read_tail_values"]) == (2 * 16 * 8 * 2, 2 * 5 * 8 * 2)
    assert traffic["write_tail"] == 2 * 16 * 2
