"""Budgets from a device: on chip where that is possible, honest about the gain, never more than memory holds."""

from __future__ import annotations

import dataclasses

import pytest
from memory_shapes import shape

from edgekv.budget import Budget
from edgekv.errors import UserError
from edgekv.memory import planner, profiles
from edgekv.memory.on_device import LEAST_TOKENS, choose, on_chip_room
from edgekv.memory.weights import FORMATS
from edgekv.policy import CachePolicy, plan

INT4 = FORMATS["int4"]
WINDOW = CachePolicy(keep="window")


def test_cache_is_sized_for_the_persisting_window_when_enough_tokens_fit():
    s, device = shape("qwen2.5-3b"), profiles.load("agx-orin-64gb")  # 36,864 bytes per token: 3 MiB hold 85 tokens
    assert on_chip_room(s, INT4, device) == 3 << 20
    assert choose(s, WINDOW, None, INT4, device, 8192).budget != Budget(bytes=3 << 20)
    small = dataclasses.replace(s, layers=s.layers[:8])
    choice = choose(small, WINDOW, None, INT4, device, 8192)
    made = plan(WINDOW, small.layers, choice.budget, 8192)
    assert choice.budget == Budget(bytes=3 << 20) and made.arena_bytes <= 3 << 20 and made.capacity >= LEAST_TOKENS
    assert "stay on chip" in choice.words and "holds the whole KV cache" in choice.words and "DRAM reads fall by 0." in choice.words


def test_weights_that_stream_leave_nothing_on_chip_without_a_window():
    s, device = shape("llama-3.2-1b"), profiles.load("raspberry-pi-5", 8 << 30)
    assert on_chip_room(s, INT4, device) == 0
    choice = choose(s, WINDOW, None, INT4, device, 8192)
    assert choice.budget == Budget(tokens=8192) and "on chip it cannot stay" in choice.words and "next to nothing" in choice.words


def test_small_model_shares_the_last_level_with_its_cache():
    """A draft whose weights fit the cache: what they leave is the cache's, and everything hits."""
    s = shape("smollm2")
    tiny = dataclasses.replace(s, layers=s.layers[:2], matrices=tuple(dataclasses.replace(m, count=min(m.count, 2)) for m in s.matrices if m.owner != "head"))
    device = profiles.load("n150", 8 << 30)
    choice = choose(tiny, WINDOW, None, INT4, device, 2048)
    assert choice.budget.bytes == on_chip_room(tiny, INT4, device) > 0
    assert "together fit the 6 MiB" in choice.words


def test_budget_that_was_given_is_kept_and_judged():
    s, device = shape("llama-3.2-1b"), profiles.load("orin-nano-8gb")
    choice = choose(s, WINDOW, Budget(tokens=512), INT4, device, 8192)
    assert choice.budget == Budget(tokens=512) and "a persisting window of 1.5 MiB in the 2 MiB L2 holds" in choice.words


def test_full_cache_is_judged_and_refused_when_it_cannot_fit():
    device = profiles.load("orin-nano-8gb")
    choice = choose(shape("llama-3.2-1b"), CachePolicy(), None, INT4, device, 8192)
    assert choice.budget is None and "orin-nano-8gb" in choice.words
    with pytest.raises(UserError, match="usable"):
        choose(shape("llama-3.2-3b"), CachePolicy(), None, INT4, device, 131072)


def test_cache_is_cut_to_memory_when_the_context_is_too_long():
    s, device = shape("llama-3.2-3b"), profiles.load("orin-nano-8gb")
    choice = choose(s, CachePolicy(keep="heavy"), None, INT4, device, 131072)
    made = plan(CachePolicy(keep="heavy"), s.layers, choice.budget, 131072)
    assert planner.memory_plan(s, INT4, made, device).fits and "largest that its memory holds" in choice.words


def test_model_without_room_is_refused():
    with pytest.raises(UserError, match="orin-nano-8gb"):
        choose(shape("llama-2-70b"), WINDOW, None, INT4, profiles.load("orin-nano-8gb"), 4096)
