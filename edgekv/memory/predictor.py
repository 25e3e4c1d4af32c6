"""How long a step takes on a device, before anything has run there.

    t = t0 + (bytes from DRAM) / (efficiency x peak bandwidth)

t0 is what a step costs whatever its size (launches, sampling, host work); without it small models are predicted far too fast.
Both numbers belong to a class of runtimes and were fitted to published speeds (tools/predictor_table.py refits and prints them;
tests/memory/test_predictor.py holds them to the fit). A profile with a `calibration` section, as `edgekv devices detect` writes
it, replaces them by rates measured on the device with edgekv's own kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from edgekv.errors import UserError
from edgekv.memory.profiles import Profile


@dataclass(frozen=True)
class RateClass:
    """step_ms: t0 in milliseconds. efficiency: reached share of peak bandwidth. origin: what the two were fitted to."""

    name: str
    step_ms: float
    efficiency: float
    origin: str


CLASSES = {
    "gpu": RateClass("gpu", 2.15, 0.860, "compiled GPU runtimes (TensorRT Edge-LLM, MLC, vLLM) on Jetson Orin and Thor"),
    "gpu-generic": RateClass("gpu-generic", 11.15, 0.590, "llama.cpp on AGX Orin in early 2024"),
    "cpu": RateClass("cpu", 0.0, 0.669, "Ollama on Raspberry Pi 5 and Intel N150"),
}
NARROW_HIDDEN, WIDE_HIDDEN = 576, 2048  # widths at which calibrate times the weight rates
PREFILL_SHARE = 0.3  # share of the dense tensor rate that prefill reaches; an assumption, not a fit: always printed as such


@dataclass(frozen=True)
class StepTime:
    """Predicted time of one step, seconds, and where it goes."""

    overhead: float
    weights: float
    cache: float
    basis: str

    @property
    def total(self) -> float:
        return self.overhead + self.weights + self.cache

    @property
    def limit(self) -> str:
        """What most of the time goes to, in words."""
        parts = {
            "fixed cost per step": self.overhead,
            "reading the weights": self.weights,
            "reading the KV cache": self.cache,
        }
        return max(parts, key=parts.get)


@dataclass(frozen=True)
class Work:
    """What a decode step has to do: the bytes it reads, and what decides at which rate they come.

    weights: bytes by the format they have in memory (int4, int8, fp32, ...). hidden: width of the model. weight_hit and cache_hit:
    shares of the bytes that come from on-chip memory.
    """

    weights: Mapping[str, float]
    cache_bytes: float
    element: str = "fp16"  # of the cache
    layers: int = 0
    hidden: int = 4096
    weight_hit: float = 0.0
    cache_hit: float = 0.0

    @property
    def weight_bytes(self) -> float:
        """Bytes of weights from DRAM."""
        return sum(self.weights.values()) * (1.0 - self.weight_hit)


def _seconds(size: float, hit: float, dram_rate: float, chip_rate: float | None) -> float:
    """Time to read `size` bytes at rates in GB/s, the share `hit` of them at that of on-chip memory (as DRAM's where none was measured)."""
    return size * ((1.0 - hit) / dram_rate + hit / (chip_rate or dram_rate)) / 1e9


def rate_at(calibration: Mapping, weights: str, hidden: int) -> float | None:
    """Weight rate in GB/s for a model of this width: seconds per byte are linear in 1 / width between the two timed widths."""
    wide, narrow = (calibration[name].get(weights, {}).get("value") for name in ("weight_rate", "narrow_weight_rate"))
    if not wide or not narrow:
        return None
    share = (1 / min(max(hidden, NARROW_HIDDEN // 2), WIDE_HIDDEN) - 1 / WIDE_HIDDEN) / (1 / NARROW_HIDDEN - 1 / WIDE_HIDDEN)
    return 1 / (1 / wide + max(1 / narrow - 1 / wide, 0.0) * share)


def step_time(profile: Profile, work: Work, rates: str | None = None) -> StepTime:
    """Time of a decode step. `rates` names a class of runtimes; default by the device, or its calibration where it has one.

    UserError when the profile does not know the device's bandwidth.
    """
    measured = profile.data.get("calibration")
    if measured and rates is None:
        call, layer, cache_rate = measured["step_overhead"]["value"], measured["layer_overhead"]["value"], measured["kv_rate"][work.element]["value"]
        weight_rates = {name: rate_at(measured, name, work.hidden) for name in work.weights}
        if None not in (call, layer, cache_rate, *weight_rates.values()):
            told = ", ".join(f"{rate:.3g} GB/s {name} weights" for name, rate in weight_rates.items())
            basis = f"rates measured on this device: {told}, {cache_rate:g} GB/s {work.element} KV, {call:g} us per step and {layer:g} us per layer"
            overhead = (call + layer * work.layers) / 1e6
            chip = measured.get("on_chip")
            near = {name: chip["weight_rate"].get(name, {}).get("value") if chip else None for name in work.weights}
            reading = sum(_seconds(size, work.weight_hit, weight_rates[name], near[name]) for name, size in work.weights.items())
            near_cache = chip["kv_rate"][work.element]["value"] if chip else None
            return StepTime(overhead, reading, _seconds(work.cache_bytes, work.cache_hit, cache_rate, near_cache), basis)
    cls = CLASSES[rates or profile.data["decode_on"]]
    peak = profile.peak_gbps
    if peak is None:
        raise UserError(f"The memory bandwidth of {profile.name} is unknown; run `edgekv devices detect` on the device.")
    rate = cls.efficiency * peak * 1e9
    basis = f"t0 {cls.step_ms:g} ms, {cls.efficiency:.0%} of {peak:.4g} GB/s (fitted to {cls.origin})"
    return StepTime(cls.step_ms / 1e3, work.weight_bytes / rate, work.cache_bytes * (1.0 - work.cache_hit) / rate, basis)


@dataclass(frozen=True)
class PrefillTime:
    """Predicted seconds for a whole prompt; None when the device's arithmetic rate is unknown."""

    seconds: float | None
    basis: str


def prefill_time(profile: Profile, flops: float, chunks: int, chunk: Work, bits: int = 16) -> PrefillTime:
    """Prefill of a prompt in `chunks` steps, `flops` operations in all, each of which moves the bytes of `chunk`.

    The slower of arithmetic and memory decides per chunk. Measured rates are used when the profile has them.
    """
    measured = profile.data.get("calibration")
    memory = chunks * step_time(profile, chunk).total
    if measured and measured["prefill_rate"]["value"]:
        rate = measured["prefill_rate"]["value"] * 1e12
        return PrefillTime(max(flops / rate, memory), f"arithmetic rate measured on this device, {rate / 1e9:.0f} GFLOP/s")
    rate = profile.tflops(bits)
    if rate is None:
        return PrefillTime(None, "the arithmetic rate of this device is unknown")
    seconds = max(flops / (rate * 1e12 * PREFILL_SHARE), memory)
    return PrefillTime(seconds, f"assuming {PREFILL_SHARE:.0%} of {rate:g} dense TFLOP/s; treat as an order of magnitude")
