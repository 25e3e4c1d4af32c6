"""A cache budget from a device's profile: KV resident on chip where that is possible, else as much as memory holds.

Whether the cache really stays on chip is said together with what that gains: against weights that stream through the same
memory at every step, next to nothing on most devices.
"""

from __future__ import annotations

from dataclasses import dataclass

from edgekv.budget import Budget, format_bytes
from edgekv.errors import UserError
from edgekv.memory import estimate, planner
from edgekv.memory.model import ModelShape
from edgekv.memory.profiles import Profile
from edgekv.memory.weights import FORMATS, WeightFormat, streams
from edgekv.policy import CachePolicy, Plan, plan

LEAST_TOKENS = 256  # a cache that keeps fewer is of little use, resident or not


@dataclass(frozen=True)
class Choice:
    """The budget to export with (None: the whole context) and what there is to say about it."""

    budget: Budget | None
    words: str


def on_chip_room(shape: ModelShape, weights: WeightFormat, profile: Profile) -> int:
    """Bytes of cache that can stay on chip from step to step: the set-aside, or what the weights leave of the last level."""
    if profile.persisting_bytes:
        return profile.persisting_bytes
    left = (profile.last_level_bytes or 0) - sum(streams(shape, weights, profile.data["decode_on"]).values())
    return max(left, 0)


def choose(shape: ModelShape, policy: CachePolicy, budget: Budget | None, weights: WeightFormat, profile: Profile, context: int) -> Choice:
    """Budget for an export to this device; a budget that was given is kept and judged. UserError when it cannot fit."""
    made = plan(policy, shape.layers, budget, context) if budget or policy.keep == "full" else None
    reason = ""
    if made is None:
        room = on_chip_room(shape, weights, profile)
        made = _plan(policy, shape, Budget(bytes=room), context) if room else None
        if made is not None and made.capacity >= LEAST_TOKENS:
            budget, reason = Budget(bytes=room), f"sized for the {format_bytes(room)} that stay on chip on {profile.name}"
        else:
            budget, made, reason = _as_much_as_fits(shape, policy, weights, profile, context)
    memory = planner.memory_plan(shape, weights, made, profile)
    planner.refuse_if_too_large(memory, shape, profile, weights, FORMATS)
    end = min(context, made.max_position or context) - 1
    step = estimate.decode(shape, weights, made, profile, end)
    sentence = step.residency.sentence
    words = f"KV cache of {format_bytes(made.arena_bytes)}" + (f", {reason}" if reason else f" on {profile.name}") + ". "
    words += f"In a full decode step, {sentence} Predicted {step.tokens_per_second:.1f} tokens/s ({step.time.limit} takes longest)."
    return Choice(budget, words)


def _as_much_as_fits(shape, policy, weights, profile, context) -> tuple[Budget, Plan, str]:
    """The largest budget in usable memory, at most the whole context."""
    whole = Budget(tokens=context // 16 * 16)
    made = plan(policy, shape.layers, whole, context)
    memory = planner.memory_plan(shape, weights, made, profile)
    if memory.fits is not False:
        return whole, made, "which holds the whole context: on chip it cannot stay"
    room = memory.usable - memory.needed + made.arena_bytes
    budget = Budget(bytes=max(room * 95 // 100, 1))
    fitting = _plan(policy, shape, budget, context)
    if fitting is None:
        planner.refuse_if_too_large(memory, shape, profile, weights, FORMATS)
        raise UserError(f"{profile.name} leaves no memory for a cache of {shape.name}; choose smaller --weights or a smaller model.")
    return budget, fitting, "the largest that its memory holds: on chip it cannot stay"


def _plan(policy: CachePolicy, shape: ModelShape, budget: Budget | None, context: int) -> Plan | None:
    try:
        return plan(policy, shape.layers, budget, context)
    except UserError:
        return None
