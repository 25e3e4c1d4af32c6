"""Everything `edgekv profile` says of one model on one device, as plain data: what tables, charts and --json are made of.

All figures are modelled or read from the profile; nothing here has run on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from edgekv import layout
from edgekv.budget import Budget
from edgekv.bundle import cache_policy
from edgekv.errors import UserError
from edgekv.memory import estimate, planner
from edgekv.memory.model import ModelShape, rows_per_step_flops
from edgekv.memory.profiles import Profile
from edgekv.memory.weights import FORMATS, WeightFormat
from edgekv.policy import CachePolicy, Plan, plan

DEPTHS = (128, 512, 2048, 8192, 32768, 131072)


@dataclass(frozen=True)
class Question:
    """What was asked: the model, its weights, a cache policy and budget, the context, and the prefill block."""

    shape: ModelShape
    weights: WeightFormat
    policy: CachePolicy
    budget: Budget | None
    context: int
    chunk: int | None = None

    def cache(self) -> Plan:
        return plan(self.policy, self.shape.layers, self.budget, self.context)


def shortened(question: Question, profiles: list[Profile]) -> Question:
    """The same question with a context that fits all these devices whole, when the asked one does not and a shorter one does."""
    cache, context = question.cache(), question.context
    for profile in profiles:
        memory = planner.memory_plan(question.shape, question.weights, cache, profile, question.chunk or cache.boundary)
        if memory.fits is False:
            room = memory.usable - memory.needed + cache.arena_bytes
            fitting = planner.longest_context(question.policy, question.shape, room, question.context)[0]
            context = min(context, fitting // 512 * 512 or context)
    return replace(question, context=context)


def bundle_plan(shape: ModelShape) -> Plan:
    """The plan that a bundle was exported with, from its manifest."""
    rules = cache_policy(shape.bundle.manifest)
    params = tuple({**_defaults(), **layer["params"]} for layer in shape.bundle.layers)
    held = max(layout.held_tokens(p) for p in params)
    return Plan(rules.resolve(held, shape.bundle.boundary), params, shape.context)


def _defaults() -> dict:
    return layout.complete({})


def depths(cache: Plan, context: int) -> list[int]:
    """Cached depths worth showing: powers of four and the end of the context."""
    end = min(context, cache.max_position or context) - 1
    return [d for d in DEPTHS if d < end] + [end]


def speed(question: Question, cache: Plan, profile: Profile) -> list[dict[str, Any]]:
    """Decode steps over depth."""
    rows = []
    for depth in depths(cache, question.context):
        step = estimate.decode(question.shape, question.weights, cache, profile, depth)
        rows.append(
            {
                "depth": depth,
                "tokens_per_second": step.tokens_per_second,
                "milliseconds": step.time.total * 1e3,
                "weight_bytes": step.bytes.weights,
                "kv_read_bytes": step.bytes.kv_read,
                "kv_write_bytes": step.bytes.kv_write,
                "on_chip_bytes": step.on_chip,
                "dram_bytes": step.dram,
                "kv_hit_rate": step.residency.hit,
                "limit": step.time.limit,
            }
        )
    return rows


def device_report(question: Question, profile: Profile) -> dict[str, Any]:
    """One device's part of the report. UserError when the model does not fit or the device's bandwidth is unknown."""
    shape, weights = question.shape, question.weights
    cache = bundle_plan(shape) if shape.bundle else question.cache()
    memory = planner.memory_plan(shape, weights, cache, profile, question.chunk or cache.boundary)
    planner.refuse_if_too_large(memory, shape, profile, weights, FORMATS)
    steps = speed(question, cache, profile)
    last = estimate.decode(shape, weights, cache, profile, steps[-1]["depth"])
    prompt = min(question.context, 2048)
    reading = estimate.prefill(shape, weights, cache, profile, prompt, question.chunk or cache.boundary)
    return {
        "device": {
            "name": profile.name,
            "title": profile.title,
            "peak_gbps": profile.peak_gbps,
            "last_level_bytes": profile.last_level_bytes,
            "persisting_bytes": profile.persisting_bytes,
            "tflops": profile.tflops() if profile.data["gpu"] else None,
        },
        "memory": {
            "lines": [{"owner": line.owner, "bytes": line.bytes, "basis": line.basis} for line in memory.lines],
            "needed": memory.needed,
            "expected_resident": memory.resident,
            "system": {"bytes": memory.system.bytes, "basis": memory.system.basis},
            "total": memory.total,
            "usable": memory.usable,
            "fits": memory.fits,
            "largest_allocation": {"owner": memory.largest.owner, "bytes": memory.largest.bytes},
            "engine_build": memory.build if profile.data["decode_on"] == "gpu" else None,
        },
        "cache": {"words": cache.describe(), "arena_bytes": cache.arena_bytes, "capacity": cache.capacity, "max_position": cache.max_position},
        "longest_context": _contexts(question, memory, cache, profile),
        "speed": steps,
        "prefill": {"tokens": prompt, "seconds": reading.seconds, "tokens_per_second": reading.seconds and prompt / reading.seconds, "basis": reading.basis},
        "basis": last.time.basis,
        "residency": last.residency.sentence,
        "roofline": _points(question, cache, profile, steps),
    }


def _contexts(question: Question, memory: planner.MemoryPlan, cache: Plan, profile: Profile) -> list[dict[str, Any]]:
    """Longest context per keep rule in the memory that everything else leaves, up to the model's own context."""
    if memory.usable is None:
        return []
    room = memory.usable - memory.needed + cache.arena_bytes
    rows = []
    for keep, policy in planner.policies(profile, question.policy.element):
        context, made = planner.longest_context(policy, question.shape, room)
        rows.append({"keep": keep, "context": context, "arena_bytes": made.arena_bytes if made else 0, "kept_tokens": made.capacity if made else 0})
    return rows


def _points(question: Question, cache: Plan, profile: Profile, steps: list[dict]) -> list[dict[str, Any]]:
    """The model's points on the roofline: decode steps, and one prefill block."""
    shape, points = question.shape, []
    for step in (steps[0], steps[-1]):
        flops = rows_per_step_flops(shape, 1, min(step["depth"], cache.capacity))
        points.append({"name": f"decode at {step['depth']}", "intensity": flops / step["dram_bytes"], "tflops": flops / step["milliseconds"] / 1e9})
    rows = min(question.chunk or cache.boundary, cache.boundary)
    reading = estimate.prefill(shape, question.weights, cache, profile, rows, rows)
    if reading.seconds:
        flops = rows_per_step_flops(shape, rows, rows)
        points.append({"name": f"prefill of {rows}", "intensity": flops / steps[0]["dram_bytes"], "tflops": flops / reading.seconds / 1e12})
    return points


def policy_bars(question: Question, profile: Profile) -> list[dict[str, Any]]:
    """Memory by owner per keep rule at the asked context: full holds all of it, the others a quarter and the asked budget."""
    bars = []
    tokens = max(question.context // 4, 512)
    for keep, policy in planner.policies(profile, question.policy.element):
        budget = None if policy.keep == "full" else question.budget or Budget(tokens=min(tokens, question.context))
        try:
            cache = plan(policy, question.shape.layers, budget, question.context)
        except UserError:
            continue
        memory = planner.memory_plan(question.shape, question.weights, cache, profile)
        parts = {"weights": memory.bytes_of("weights", "weights, packed copies", "embedding table"), "KV cache": cache.arena_bytes}
        parts |= {"workspace, logits": memory.bytes_of("workspace", "logits"), "runtime": memory.bytes_of("runtime", "tokenizer"), "system": memory.system.bytes}
        bars.append({"name": keep if budget is None else f"{keep} {budget}", "parts": parts})
    return bars
