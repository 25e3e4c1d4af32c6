"""What a decode step moves and how long it takes, for a model, a cache plan and a device: the figures of `edgekv profile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from edgekv import layout
from edgekv.memory.model import ModelShape, rows_per_step_flops
from edgekv.memory.predictor import PrefillTime, StepTime, Work, prefill_time, step_time
from edgekv.memory.profiles import Profile
from edgekv.memory.residency import dram_saving, hit_rate
from edgekv.memory.traffic import committed, step_traffic
from edgekv.memory.weights import WeightFormat, streams
from edgekv.policy import Plan
from edgekv.retrieval import candidates_for, parse_retrieval

KV_READS = ("read_body_keys", "read_body_values", "read_tail_keys", "read_tail_values", "read_body_index", "read_body_meta")


@lru_cache(maxsize=4096)
def _layer_traffic(items: tuple, position: int, retrieve: int, candidates: int, scored: bool) -> dict[str, int]:
    return step_traffic(dict(items), position, retrieve=retrieve, candidates=candidates, scored=scored)


@dataclass(frozen=True)
class StepBytes:
    """Bytes of one decode step, modelled. index: KV bytes scanned to choose tokens; payload: keys and values attended."""

    weights: int
    kv_index: int
    kv_payload: int
    kv_write: int
    activations: int
    logits: int

    @property
    def kv_read(self) -> int:
        return self.kv_index + self.kv_payload

    @property
    def total(self) -> int:
        return self.weights + self.kv_read + self.kv_write + self.activations + self.logits


def step_bytes(shape: ModelShape, weights: Mapping[str, int], cache: Plan, position: int, decode_on: str = "gpu") -> StepBytes:
    """Bytes of the decode step that follows `position` tokens, from the static formulas. weights: as weights.streams gives them.
    decode_on: gpu or cpu, where the retrieval hands the scores of what it chose over and attention does not read those keys again."""
    reads = index = writes = 0
    policy = cache.policy
    for params in cache.layers:
        shared = {**params, "layer": 0, "sliding_window": _effective_window(params)}
        retrieve = parse_retrieval(policy.retrieve).resolve(committed(params, position)[1]) if layout.is_selfindex(params) else 0
        ranked = candidates_for(retrieve, policy.rerank)
        traffic = _layer_traffic(tuple(sorted(shared.items())), position, retrieve, ranked, decode_on == "cpu")
        index += traffic["read_body_index"]
        reads += sum(traffic[name] for name in KV_READS) - traffic["read_body_index"]
        writes += traffic["write_tail"]
    rows = 2 * shape.hidden + 3 * shape.intermediate + 4 * max(g.q_heads * g.given_dim for g in shape.layers)
    return StepBytes(sum(weights.values()), index, reads, writes, 2 * 4 * rows * len(shape.layers), 2 * 4 * shape.vocab)


def _effective_window(params: Mapping) -> int:
    """The model's sliding window; 0 for a heavy cache, where what it hides depends on the text: an upper bound of the bytes."""
    return 0 if params["keep"] == layout.KEEPS["heavy"] else params["sliding_window"]


@dataclass(frozen=True)
class Residency:
    """Modelled split of KV reads: `hit` of them from on-chip memory of `capacity` bytes, by the named replacement."""

    replacement: str
    capacity: int
    set_aside: int
    hit: float
    saving: float
    sentence: str


def residency(profile: Profile, moved: StepBytes, persisting: bool = True) -> Residency:
    """What stays on chip between steps, and the honest gain. persisting: whether an L2 set-aside may be used where there is one."""
    capacity, kept, streamed = profile.last_level_bytes, moved.kv_read, moved.weights
    name = "L2" if profile.data["decode_on"] == "gpu" else "last-level cache"
    if capacity is None:
        return Residency("unknown", 0, 0, 0.0, 0.0, f"The size of the {name} is unknown: nothing is counted as on chip.")
    size = f"{capacity / 2**20:g} MiB {name}"
    set_aside = profile.persisting_bytes if persisting else 0
    if set_aside:
        hit, replacement = hit_rate("persisting", capacity, streamed, kept, set_aside), "persisting"
        window = f"a persisting window of {set_aside / 2**20:g} MiB in the {size}"
        fate = "holds the whole KV cache" if kept <= set_aside else f"holds {hit:.0%} of the KV cache"
        words = f"{window} {fate}"
    else:
        replacement = "random" if profile.data["decode_on"] == "gpu" else "lru"
        hit = hit_rate(replacement, capacity, streamed, kept)
        if streamed + kept <= capacity:
            words = f"weights and KV cache together fit the {size}"
        else:
            over = (streamed + kept) / capacity
            words = f"a step touches {over:.3g} times the {size}, so {'next to nothing' if hit < 0.005 else format(hit, '.0%')} of the KV cache survives to the next step"
    saving = dram_saving(hit, streamed, kept)
    return Residency(replacement, capacity, set_aside, hit, saving, f"{words}; DRAM reads fall by {saving:.1%} (modelled).")


@dataclass(frozen=True)
class Decode:
    """A decode step at one depth: bytes, on-chip share and time; all modelled."""

    position: int
    bytes: StepBytes
    residency: Residency
    time: StepTime

    @property
    def tokens_per_second(self) -> float:
        return 1.0 / self.time.total

    @property
    def on_chip(self) -> float:
        """Bytes per token served on chip: KV hits, and activations and logits, which are written and read within the step."""
        return self.residency.hit * self.bytes.kv_read + self.bytes.activations + self.bytes.logits

    @property
    def dram(self) -> float:
        return self.bytes.total - self.on_chip


def decode(shape: ModelShape, weights: WeightFormat, cache: Plan, profile: Profile, position: int, persisting: bool = True) -> Decode:
    """The step after `position` tokens. UserError when the profile lacks the bandwidth."""
    streamed = streams(shape, weights, profile.data["decode_on"])
    moved = step_bytes(shape, streamed, cache, position, profile.data["decode_on"])
    stay = residency(profile, moved, persisting)
    weight_hit = 1.0 if stay.replacement == "lru" and moved.weights + moved.kv_read <= stay.capacity else 0.0
    if profile.data.get("calibration") and stay.replacement == "lru":
        # Rates were timed with nearly all bytes on chip and with nearly none. In between, real caches fade as random replacement does.
        weight_hit = hit_rate("random", stay.capacity, moved.weights, max(moved.kv_read, 1))
    cache_bytes = moved.kv_read + moved.kv_write
    hit = stay.hit * moved.kv_read / cache_bytes
    work = Work(streamed, cache_bytes, cache.policy.element, len(shape.layers), shape.hidden, weight_hit, hit)
    return Decode(position, moved, stay, step_time(profile, work))


def prefill(shape: ModelShape, weights: WeightFormat, cache: Plan, profile: Profile, tokens: int, chunk: int = 256) -> PrefillTime:
    """Time to read a prompt of `tokens`, block by block."""
    chunk = min(chunk, cache.boundary)
    starts = range(0, tokens, chunk)
    held = min(cache.capacity, tokens)
    flops = sum(rows_per_step_flops(shape, min(chunk, tokens - at), min(at + chunk, held)) for at in starts)
    streamed = streams(shape, weights, profile.data["decode_on"])
    moved = step_bytes(shape, streamed, cache, held // 2, profile.data["decode_on"])
    return prefill_time(profile, flops, len(starts), Work(streamed, moved.kv_read, cache.policy.element, len(shape.layers), shape.hidden))
