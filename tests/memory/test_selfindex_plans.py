"""What profile and fit say of compressed caches: bytes by owner, bytes per step, and where there are kernels for them."""

import pytest
from memory_shapes import shape

from edgekv import layout
from edgekv.memory import estimate, planner, profiles
from edgekv.memory.fit import Constraints, fit
from edgekv.memory.weights import FORMATS
from edgekv.policy import CachePolicy, plan

PI, NANO = profiles.load("raspberry-pi-5", 8 << 30), profiles.load("orin-nano-8gb")
CONTEXT = 8192


def planned(**fields):
    return plan(CachePolicy(**fields), shape("smollm2").layers, None, CONTEXT)


def test_the_arena_by_owner_is_the_arena():
    made = planned(format="selfindex", key_bits=2, value_bits=2)
    owners = planner.arena_by_owner(made.layers)
    assert sum(owners.values()) == made.arena_bytes and "KV body" not in owners
    body = sum(made.body_slots) * 3
    assert owners["KV index"] == body * 8 and owners["KV compressed records"] == body * 48  # 56 bytes per token and kv head
    assert made.arena_bytes < 0.27 * planned().arena_bytes


def test_a_step_reads_codes_of_all_and_records_of_few():
    s, int4 = shape("smollm2"), FORMATS["int4"]

    def moved(position=CONTEXT - 1, **fields):
        return estimate.decode(s, int4, planned(**fields), PI, position).bytes

    dense, few, all_of_them = moved(), moved(format="selfindex"), moved(format="selfindex", retrieve="all")
    p = planned(format="selfindex").layers[0]
    scanned = p["kv_heads"] * (7936 - 64) * 8 * 30
    assert few.kv_index == pytest.approx(scanned, rel=0.4) and few.kv_index >= scanned and dense.kv_index == 0
    assert few.kv_read < 0.25 * dense.kv_read and few.kv_read < 0.5 * all_of_them.kv_read < 0.4 * dense.kv_read
    assert few.kv_write == dense.kv_write
    early = moved(100, format="selfindex")  # nothing is compressed yet
    assert early.kv_read == moved(100).kv_read


def test_keys_that_are_ranked_are_read_once_on_a_cpu_and_twice_by_a_gpu():
    s, int4, made = shape("smollm2"), FORMATS["int4"], planned(format="selfindex")
    on = {name: estimate.step_bytes(s, int4.streams(s), made, CONTEXT - 1, name).kv_read for name in ("cpu", "gpu")}
    assert estimate.decode(s, int4, made, PI, CONTEXT - 1).bytes.kv_read == on["cpu"]
    assert estimate.decode(s, int4, made, NANO, CONTEXT - 1).bytes.kv_read == on["gpu"]
    chosen = int(0.075 * (7936 - 64)) * (8 + 40 + 4)  # their codes, magnitudes with 4 bits, positions
    assert on["gpu"] - on["cpu"] == pytest.approx(30 * 3 * (chosen + 3 * 31 * 2 * 64), rel=0.01)  # and the mean keys, for three heads


def test_fit_compresses_all_before_it_drops_any():
    s, int4 = shape("smollm2"), FORMATS["int4"]
    needed = planner.memory_plan(s, int4, planned(), PI).needed
    assert fit(s, PI, CachePolicy(), int4, Constraints(CONTEXT, memory=needed)).plan.policy.format == "dense"
    choice = fit(s, PI, CachePolicy(), int4, Constraints(CONTEXT, memory=needed - (100 << 20)))
    assert (choice.plan.policy.keep, choice.plan.policy.format, choice.plan.policy.key_bits) == ("full", "selfindex", 4)
    assert "--cache selfindex --key-bits 4 --value-bits 4" in choice.command("model", s)
    smaller = fit(s, PI, CachePolicy(), int4, Constraints(CONTEXT, memory=needed - (132 << 20)))
    assert (smaller.plan.policy.key_bits, smaller.plan.policy.value_bits) == (2, 2) and smaller.plan.arena_bytes < choice.plan.arena_bytes


def test_no_compressed_cache_where_there_are_no_kernels_for_it():
    s, int4 = shape("smollm2"), FORMATS["int4"]
    needed = planner.memory_plan(s, int4, planned(), NANO).needed
    choice = fit(s, NANO, CachePolicy(), int4, Constraints(CONTEXT, memory=needed - (100 << 20)))
    assert choice.plan.policy.keep != "full" and choice.plan.policy.format == "dense"
    assert planner.SELFINDEX in dict(planner.policies(PI)) and planner.SELFINDEX not in dict(planner.policies(NANO))


def test_longest_context_of_a_compressed_cache():
    s = shape("smollm2")
    room = 40 << 20
    dense, _ = planner.longest_context(CachePolicy(), s, room)
    packed, made = planner.longest_context(CachePolicy(format="selfindex"), s, room)
    assert packed > 2 * dense and made.arena_bytes <= room
    assert layout.token_bytes(made.layers[0]) == 88
