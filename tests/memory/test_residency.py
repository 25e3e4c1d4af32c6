"""The residency model: closed forms against the simulator, the simulator against small cases worked out by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv import layout
from edgekv.memory.access import decode_step
from edgekv.memory.residency import POLICIES, Access, Cache, dram_saving, hit_rate, simulate

CAPACITY = 1 << 18
WAYS = 16


def kv_hits(streamed, kept, steps=8, warm=4, weights="normal", cache_mode="normal", **options):
    """Simulated hit rate of the KV cache: `streamed` bytes of weights, then `kept` bytes of KV, step after step."""
    streamed, kept = int(streamed) // 64 * 64, int(kept) // 64 * 64
    step = [Access("weights", 0, streamed, weights), Access("kv", 1 << 30, kept, cache_mode)]
    return simulate(Cache(CAPACITY, WAYS, **options), [step] * steps, warm).hit_rate("kv")


@pytest.mark.parametrize("load", [0.5, 0.9, 0.97, 1.13, 1.5, 4.0])  # one way of 16 is the cliff's width
def test_lru_cliff_is_where_the_closed_form_says(load):
    streamed, kept = 0.7 * load * CAPACITY, 0.3 * load * CAPACITY
    assert kv_hits(streamed, kept) == hit_rate("lru", CAPACITY, streamed, kept) == (1.0 if load < 1 else 0.0)


@pytest.mark.parametrize("load", [0.5, 0.9, 1.1, 1.5, 2.0, 3.0])
def test_random_replacement_agrees_within_two_percent(load):
    streamed, kept = 0.5 * load * CAPACITY, 0.5 * load * CAPACITY
    simulated = kv_hits(streamed, kept, steps=40, warm=25, policy="random")
    assert simulated == pytest.approx(hit_rate("random", CAPACITY, streamed, kept), abs=0.02)


@pytest.mark.parametrize("ratio", [0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.4])
def test_evict_first_closed_form_lies_between_plain_and_hashed_sets(ratio):
    """Which index function a GPU's L2 uses is not public; the closed form must not leave what the two give."""
    kept = ratio * CAPACITY
    simulated = [kv_hits(4 * CAPACITY, kept, weights="streaming", hashed=hashed) for hashed in (False, True)]
    closed = hit_rate("evict_first", CAPACITY, 4 * CAPACITY, kept)
    assert min(simulated) - 0.05 <= closed <= max(simulated) + 0.01


@pytest.mark.parametrize("ratio", [0.5, 0.9, 1.0, 1.25, 1.5, 2.0, 3.0])
def test_persisting_window_agrees_when_hit_ratio_is_lowered(ratio):
    set_aside = 0.75 * CAPACITY
    kept = ratio * set_aside
    options = {"cache_mode": "persisting", "set_aside": int(set_aside)}
    lowered = kv_hits(4 * CAPACITY, kept, hit_ratio=min(1.0, 1 / ratio), **options)
    assert lowered == pytest.approx(hit_rate("persisting", CAPACITY, 4 * CAPACITY, kept, set_aside), abs=0.05)
    assert kv_hits(4 * CAPACITY, kept, **options) == hit_rate("persisting", CAPACITY, 0, kept, set_aside, lowered=ratio <= 1)


def test_persisting_cache_survives_weights_that_thrash_everything_else():
    assert kv_hits(4 * CAPACITY, CAPACITY // 2) == 0.0
    assert kv_hits(4 * CAPACITY, CAPACITY // 2, cache_mode="persisting", set_aside=CAPACITY * 3 // 4) == 1.0


def real_step(weight_mode="normal", cache_mode="normal"):
    """The access sequence of a decode step of a two-layer model with real state layouts; returns it with W and B."""
    params = layout.complete({"q_heads": 4, "kv_heads": 2, "key_dim": 32, "value_dim": 32, "body_slots": 512, "tail_slots": 64, "scale": 0.2})
    size, weights = layout.state_bytes(params), 96 << 10
    states = [1 << 30, (1 << 30) + size]
    step = decode_step([params] * 2, [(0, weights), (weights, weights)], states, 550, weight_mode, cache_mode)
    read = sum(a.bytes for a in step if a.tensor in ("kv_keys", "kv_values"))
    return step, 2 * weights, read


@pytest.mark.parametrize("load", [0.5, 0.85, 1.15, 2.0])
def test_closed_form_agrees_with_the_simulator_on_the_real_access_sequence(load):
    step, streamed, kept = real_step()
    counted = simulate(Cache(int((streamed + kept) / load), WAYS), [step] * 4, 2)
    hits = 1 - sum(counted.misses[t] for t in ("kv_keys", "kv_values")) / sum(counted.lines[t] for t in ("kv_keys", "kv_values"))
    assert hits == pytest.approx(hit_rate("lru", (streamed + kept) / load, streamed, kept), abs=0.02)


def test_persisting_window_agrees_on_the_real_access_sequence():
    step, streamed, kept = real_step(cache_mode="persisting")
    capacity = int(kept * 1.6)
    counted = simulate(Cache(capacity, WAYS, set_aside=capacity * 3 // 4), [step] * 4, 2)
    assert counted.misses["kv_keys"] == counted.misses["kv_values"] == 0 < counted.misses["weights"]
    assert hit_rate("persisting", capacity, streamed, kept, capacity * 0.75) == 1.0


def test_lru_by_hand():
    """Two ways, one set: A B A C A B -> only the second and third A hit; C evicts B."""
    cache = Cache(128, 2)
    assert [cache.touch(n) for n in (10, 20, 10, 30, 10, 20)] == [False, False, True, False, True, False]


def test_streaming_line_is_the_next_victim():
    cache = Cache(128, 2)
    cache.touch(1)
    cache.touch(2, "streaming")
    cache.touch(3)  # evicts 2 although 1 is older
    assert cache.touch(1) and cache.touch(3) and not cache.touch(2)


def test_counts_lines_that_an_access_straddles_and_cold_misses_only_when_asked():
    steps = [[Access("kv", 60, 10)]] * 3
    assert simulate(Cache(4096, 4), steps, warm_up=0).misses == {"kv": 2}
    assert simulate(Cache(4096, 4), steps, warm_up=1).misses == {"kv": 0}
    assert simulate(Cache(4096, 4), steps, warm_up=1).lines == {"kv": 4}


SIZES = st.floats(1.0, 1e9)


@given(policy=st.sampled_from(POLICIES), capacity=SIZES, streamed=SIZES, kept=SIZES, more=SIZES, set_aside=SIZES)
def test_hit_rates_are_shares_and_never_grow_with_the_working_set(policy, capacity, streamed, kept, more, set_aside):
    less = hit_rate(policy, capacity, streamed, kept, set_aside)
    assert 0.0 <= hit_rate(policy, capacity, streamed, kept + more, set_aside) <= less + 1e-9 and less <= 1.0
    assert 0.0 <= dram_saving(less, streamed, kept) <= kept / (streamed + kept) + 1e-9


def test_small_cache_against_large_weights_saves_almost_nothing():
    """1.5 MiB of KV against 700 MB of weights: 0.2 percent, even when every KV byte stays on chip."""
    assert dram_saving(1.0, 700e6, 1.5 * 2**20) == pytest.approx(0.0022, abs=0.0001)


@pytest.mark.parametrize("sizes", [(0, 16), (64, 0)])
def test_impossible_caches_are_refused(sizes):
    with pytest.raises(ValueError, match="at least one set"):
        Cache(*sizes)
