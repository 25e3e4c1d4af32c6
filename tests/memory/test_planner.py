"""Memory plans: owners sum to the whole, what fits is consistent, refusals say what would."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.errors import UserError
from edgekv.memory import planner, profiles
from edgekv.memory.weights import FORMATS
from edgekv.policy import CachePolicy, parse_budget, plan
from memory_shapes import shape

NANO = profiles.load("orin-nano-8gb")


def made(model, weights="int4", keep="full", budget=None, context=None, device=NANO, score=None):
    s = shape(model)
    cache = plan(CachePolicy(keep=keep, score=score), s.layers, parse_budget(budget) if budget else None, context or s.context)
    return s, FORMATS[weights], cache, planner.memory_plan(s, FORMATS[weights], cache, device)


@pytest.mark.parametrize(("keep", "budget"), [("full", None), ("window", "2MiB"), ("heavy by attention", "4MiB"), ("heavy by attention", "25%"), ("heavy by keys", "4MiB")])
def test_arena_owners_sum_to_the_arena_and_never_exceed_the_budget(keep, budget):
    keep, _, score = keep.partition(" by ")
    _, _, cache, memory = made("smollm2", keep=keep, score=score or None, budget=budget, context=8192)
    owners = planner.arena_by_owner(cache.layers)
    assert sum(owners.values()) == cache.arena_bytes == sum(line.bytes for line in memory.lines if line.owner.startswith("KV "))
    assert ("KV scores" in owners) == ("KV observed queries" in owners) == (score == "attention")
    if budget and budget.endswith("MiB"):
        assert cache.arena_bytes <= int(budget[0]) << 20


def test_half_precision_is_widened_on_the_cpu_and_not_on_the_gpu():
    cpu, s = profiles.load("raspberry-pi-5", 8 << 30), shape("smollm2")
    on_cpu = made("smollm2", "fp16", device=cpu)[3].bytes_of("weights", "weights, packed copies")
    assert on_cpu == pytest.approx(4 * s.parameters + 2 * s.vocab * s.hidden, rel=0.001)  # and the table stays as it is stored
    assert made("smollm2", "fp16")[3].bytes_of("weights", "weights, packed copies") == pytest.approx(2 * s.parameters, rel=0.001)


def test_unknown_idle_use_is_an_assumption_and_unknown_memory_no_verdict():
    memory = made("smollm2", device=profiles.load("agx-orin-64gb"))[3]
    assert memory.system.basis.startswith("assumed") and memory.fits
    assert made("smollm2", device=profiles.load("raspberry-pi-5"))[3].fits is None
    assert made("smollm2", device=profiles.load("raspberry-pi-5", 2 << 30))[3].fits
    assert made("smollm2", device=profiles.load("orin-nano-8gb", 64 << 30))[3].total == 7620 << 20  # the profile knows better


def test_largest_allocation_is_the_arena_when_the_cache_outgrows_the_weights():
    assert made("llama-3.2-1b", context=65536)[3].largest.owner == "KV arena"
    assert made("llama-3.2-1b", context=4096)[3].largest.owner == "weights"


def refused(*args, **kwargs) -> str:
    s, weights, _, memory = made(*args, **kwargs)
    with pytest.raises(UserError) as error:
        planner.refuse_if_too_large(memory, s, kwargs.get("device", NANO), weights, FORMATS)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_cache_that_is_too_large_is_told_the_budget_that_fits():
    sentence = refused("llama-3.2-3b", context=131072)
    size = parse_budget(re.search(r"KV budget of up to (\d+MiB) fits", sentence).group(1))
    s = shape("llama-3.2-3b")
    for keep in ("window", "heavy"):
        cache = plan(CachePolicy(keep=keep), s.layers, size, s.context)
        assert planner.memory_plan(s, FORMATS["int4"], cache, NANO).fits


def test_weights_that_are_too_large_are_told_the_format_that_fits():
    assert "int8 weights fit; use --weights int8" in refused("llama-3.2-3b", "fp16", "window", "64MiB")
    assert made("llama-3.2-3b", "int8", "window", "64MiB")[3].fits
    sentence = refused("llama-3.2-3b", "fp16", "window", "4GiB", 131072)
    budget = re.search(r"int8 weights with a KV budget of up to (\d+MiB) fit; use", sentence).group(1)
    assert made("llama-3.2-3b", "int8", "window", budget, 131072)[3].fits


def test_model_that_is_too_large_in_every_format_is_told_the_device_that_fits():
    sentence = refused("llama-2-70b", "int4", "window", "64MiB")
    assert re.search(r"a device with at least [\d.]+ GiB", sentence)


@settings(max_examples=25, deadline=None)
@given(keep=st.sampled_from(["full", "window", "heavy"]), room=st.integers(1 << 20, 1 << 31))
def test_longest_context_fits_and_one_more_interval_would_not(keep, room):
    s = shape("smollm2")
    context, cache = planner.longest_context(CachePolicy(keep=keep), s, room)
    assert (context == 0) == (cache is None)
    if cache is None:
        return
    assert cache.arena_bytes <= room
    if keep == "full" and context < s.context:
        assert plan(CachePolicy(keep="full"), s.layers, None, context + 1).arena_bytes > room
    if keep != "full":
        assert context == s.context


