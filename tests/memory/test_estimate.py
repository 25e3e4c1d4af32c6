"""Predicted steps: bytes from the static formulas, on-chip shares, honest sentences; and the choice of a policy."""

from __future__ import annotations

import pytest

from edgekv.errors import UserError
from edgekv.memory import estimate, profiles
from edgekv.memory.fit import Constraints, fit, parse_constraints
from edgekv.memory.weights import FORMATS
from edgekv.policy import CachePolicy, parse_budget, plan
from memory_shapes import shape

NANO, AGX, THOR = profiles.load("orin-nano-8gb"), profiles.load("agx-orin-64gb"), profiles.load("agx-thor")
INT4 = FORMATS["int4"]


def cache_of(s, keep="full", budget=None, context=8192, **more):
    return plan(CachePolicy(keep=keep, **more), s.layers, parse_budget(budget) if budget else None, context)


def test_full_cache_reads_every_cached_token_once():
    s = shape("smollm2")
    moved = estimate.step_bytes(s, INT4.streams(s), cache_of(s), 2048)
    keys_of_partial_block = 15 * 30 * 3 * 64 * 2  # the new token's key block is read whole
    assert moved.kv_read == 23040 * 2049 + keys_of_partial_block
    assert moved.kv_write == 23040 and moved.weights == INT4.step_bytes(s)
    assert moved.kv_index == 0


def test_bounded_cache_reads_stop_growing():
    s = shape("smollm2")
    for keep in ("window", "heavy"):
        cache = cache_of(s, keep, "512tok")
        reads = [estimate.step_bytes(s, INT4.streams(s), cache, depth).kv_read for depth in (4095, 8191)]
        assert reads[0] == reads[1] <= 23040 * (512 + 16)


def test_weights_a_little_larger_than_a_calibrated_cache_come_in_part_from_it():
    def figure(value, unit):
        return {"value": value, "unit": unit, "source": "a number for this test", "confidence": "measured"}

    def seconds(kib):
        data = dict(profiles.load("n150").data)
        data["cpu"] = [{**data["cpu"][0], "l3": figure(kib, "KiB")}]
        dram, chip = ({name: figure(rate, "GB/s") for name in ("int4", "int8", "fp32")} for rate in (10, 30))
        kv = {"fp16": figure(20, "GB/s"), "fp32": figure(20, "GB/s")}
        data["calibration"] = {
            "step_overhead": figure(0, "us"), "layer_overhead": figure(0, "us"), "weight_rate": dram, "narrow_weight_rate": dram,
            "kv_rate": kv, "on_chip": {"weight_rate": chip, "kv_rate": kv}, "prefill_rate": figure(0.2, "TOP/s"),
        }  # fmt: skip
        return estimate.decode(s, INT4, cache_of(s, "window", "256tok"), profiles.Profile(data), 128).time.weights

    s = shape("smollm2")
    size = sum(INT4.streams(s).values())
    all_on_chip, none = size / 30e9, size / 10e9
    assert seconds(2 * size // 1024) == pytest.approx(all_on_chip)
    assert seconds(size // 20480) == pytest.approx(none, rel=0.01)
    assert 1.2 * all_on_chip < seconds(size * 2 // 3 // 1024) < 0.9 * none


def test_weights_from_dram_unless_everything_fits_on_chip():
    s = shape("smollm2")
    cache = cache_of(s, "window", "128tok")
    assert estimate.decode(s, INT4, cache, THOR, 100).dram >= INT4.step_bytes(s)  # 81 MB do not fit 32 MiB
    tiny = shape("smollm2")
    tiny = type(tiny)(**{**tiny.__dict__, "matrices": tuple(m for m in tiny.matrices if m.owner == "attention")[1:2]})
    step = estimate.decode(tiny, INT4, cache_of(tiny, "window", "64tok"), profiles.load("n150", 8 << 30), 40)
    assert step.residency.hit == 1.0 and step.time.weights == 0.0 and step.time.cache < 1e-4


def test_persisting_window_is_told_with_its_gain():
    s = shape("llama-3.2-1b")
    moved = estimate.step_bytes(s, INT4.streams(s), cache_of(s, "window", "2.5MiB", 8192), 8000)
    stay = estimate.residency(AGX, moved)
    assert stay.hit == 1.0 and "holds the whole KV cache" in stay.sentence and 0 < stay.saving < 0.01
    stay = estimate.residency(AGX, moved, persisting=False)
    assert stay.replacement == "random" and stay.hit < 0.01


def test_unknown_cache_size_counts_nothing_as_on_chip():
    s = shape("smollm2")
    stay = estimate.residency(profiles.load("thor-t4000"), estimate.step_bytes(s, INT4.streams(s), cache_of(s), 100))
    assert stay.hit == 0.0 and "unknown" in stay.sentence


def test_decode_slows_with_depth_and_in_lower_power_modes():
    s = shape("llama-3.2-3b")
    cache = cache_of(s)
    speeds = [estimate.decode(s, INT4, cache, NANO, depth).tokens_per_second for depth in (100, 1000, 8000)]
    assert speeds[0] > speeds[1] > speeds[2]
    assert estimate.decode(s, INT4, cache, profiles.load("orin-nano-8gb:15W"), 100).tokens_per_second < speeds[0]


def test_sliding_window_layers_read_their_window_alone():
    from edgekv.memory.model import shape_from_config

    config = {"model_type": "gemma3_text", "hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "vocab_size": 262144,
              "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 256, "sliding_window": 512, "max_position_embeddings": 32768,
              "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3}  # fmt: skip
    s = shape_from_config(config, "gemma-3-270m")
    for keep, budget in (("heavy", "256tok"), ("heavy", "4096tok"), ("window", "256tok")):
        assert estimate.step_bytes(s, INT4.streams(s), cache_of(s, keep, budget, context=32768), 32000).kv_read > 0
    cache = cache_of(s, context=32768)
    per_token = 2 * 256 * 2
    assert estimate.step_bytes(s, INT4.streams(s), cache, 32000).kv_read == pytest.approx(per_token * (3 * 32001 + 15 * 512), rel=0.01)


@pytest.mark.parametrize(("text", "wanted"), [
    ("context=32k", Constraints(context=32768)), ("context=1000", Constraints(context=1000)), ("speed=12.5", Constraints(speed=12.5)),
    ("context=4k,speed=10,memory=2GiB", Constraints(4096, 10.0, 2 << 30)),
])  # fmt: skip
def test_constraints_are_read(text, wanted):
    assert parse_constraints((text,)) == wanted
    assert parse_constraints(tuple(text.split(","))) == wanted


@pytest.mark.parametrize("text", ["", "context", "context=0", "context=1m", "speed=0", "speed=-1", "memory=25%", "memory=2", "latency=3"])
def test_constraints_that_make_no_sense_are_refused(text):
    with pytest.raises(UserError):
        parse_constraints((text,))


def test_fit_prefers_all_tokens_then_attended_tokens():
    s = shape("llama-3.2-3b")
    assert fit(s, NANO, CachePolicy(), INT4, Constraints(context=16384)).plan.policy.keep == "full"
    choice = fit(s, NANO, CachePolicy(), INT4, Constraints(context=131072))
    assert choice.plan.policy.keep == "heavy" and choice.memory.fits
    command = choice.command("llama", s)
    assert command.startswith("edgekv export llama -o llama-3.2-3b-heavy --weights int4 --keep heavy --kv-budget ")
    assert command.endswith("tok --context 131072")


def test_fit_meets_speed_and_memory():
    s = shape("llama-3.2-3b")
    wanted = Constraints(context=32768, speed=30, memory=4 << 30)
    choice = fit(s, NANO, CachePolicy(), INT4, wanted)
    assert choice.decode.tokens_per_second >= 30 and choice.memory.needed <= 4 << 30


def test_fit_takes_the_largest_weights_that_were_allowed_and_fit():
    s = shape("llama-3.2-1b")
    assert fit(s, NANO, CachePolicy(), FORMATS["fp16"], Constraints(context=4096)).weights.name == "fp16"
    assert fit(shape("llama-3.1-8b"), NANO, CachePolicy(), FORMATS["fp16"], Constraints(context=4096)).weights.name == "int4"


@pytest.mark.parametrize(("model", "wanted", "reason"), [
    ("llama-2-70b", Constraints(context=4096), "usable memory"), ("llama-3.1-8b", Constraints(context=4096, speed=100), "tokens/s of 100"),
    ("smollm2", Constraints(context=100000), "trained for"),
])  # fmt: skip
def test_fit_says_how_close_it_came(model, wanted, reason):
    with pytest.raises(UserError, match=reason):
        fit(shape(model), NANO, CachePolicy(), INT4, wanted)
