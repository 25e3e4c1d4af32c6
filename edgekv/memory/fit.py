"""The best policy under constraints: which export to make so that a context, a speed and a memory limit are met."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from edgekv.budget import Budget, format_bytes, parse_budget
from edgekv.errors import UserError
from edgekv.memory import estimate, planner
from edgekv.memory.model import ModelShape
from edgekv.memory.profiles import Profile
from edgekv.memory.weights import BITS, FORMATS, WeightFormat
from edgekv.policy import CachePolicy, Plan, plan

SHARES = (50.0, 25.0, 12.5, 6.25, 3.125)  # percent of the context that bounded caches are tried with


@dataclass(frozen=True)
class Constraints:
    """context in tokens; speed in tokens per second at its end; memory in bytes for everything of ours."""

    context: int | None = None
    speed: float | None = None
    memory: int | None = None


def parse_constraints(texts: tuple[str, ...]) -> Constraints:
    """'context=32k', 'speed=20', 'memory=4GiB', also several with commas; UserError names what is accepted."""
    found: dict[str, float] = {}
    for text in (part for given in texts for part in given.split(",")):
        name, _, value = text.partition("=")
        name, value = name.strip(), value.strip()
        if name == "context" and (match := re.fullmatch(r"(\d{1,9})(k?)", value, re.ASCII)) and int(match[1]):
            found[name] = int(match[1]) * (1024 if match[2] else 1)
        elif name == "speed" and re.fullmatch(r"\d{1,6}(\.\d{1,4})?", value, re.ASCII) and float(value) > 0:
            found[name] = float(value)
        elif name == "memory" and (size := parse_budget(value).bytes):
            found[name] = size
        else:
            raise UserError(f"The constraint {text!r} is not understood: write context=32k (tokens), speed=20 (tokens/s) or memory=4GiB.")
    return Constraints(**found)


@dataclass(frozen=True)
class Choice:
    """A cache and weights that meet the constraints."""

    weights: WeightFormat
    plan: Plan
    budget: Budget | None
    memory: planner.MemoryPlan
    decode: estimate.Decode

    def command(self, model: str, shape: ModelShape) -> str:
        """The export that makes it, ready to paste."""
        parts = ["edgekv export", _quoted(model), "-o", _quoted(f"{shape.name}-{self.plan.policy.keep}"), "--weights", self.weights.name]
        parts += ["--keep", self.plan.policy.keep]
        if self.budget:
            parts += ["--kv-budget", str(self.budget).replace(" ", "")]
        if self.plan.policy.compresses:
            bits = self.plan.policy.key_bits, self.plan.policy.value_bits
            parts += ["--cache", "selfindex", "--key-bits", str(bits[0]), "--value-bits", str(bits[1])]
        if self.plan.policy.element != "fp16":
            parts += ["--kv-type", self.plan.policy.element]
        return " ".join([*parts, "--context", str(self.plan.context)])


def _quoted(text: str) -> str:
    import shlex

    return shlex.quote(text)


def candidates(policy: CachePolicy, context: int, formats: list[WeightFormat]) -> Iterator[tuple[WeightFormat, CachePolicy, Budget | None]]:
    """What is tried, best first: all tokens, then all of them compressed, before chosen tokens before newest tokens; then larger
    weights, then larger caches."""
    element = policy.element
    for weights in formats:
        yield weights, CachePolicy(keep="full", element=element), None
    for key_bits, value_bits in ((4, 4), (2, 4), (2, 2)):
        for weights in formats:
            yield weights, CachePolicy(keep="full", element=element, format="selfindex", key_bits=key_bits, value_bits=value_bits), None
    for keep in ("heavy", "window"):
        for share in SHARES:
            tokens = int(context * share / 100) // 16 * 16
            if tokens >= 64:
                for weights in formats:
                    yield weights, CachePolicy(keep=keep, element=element), Budget(tokens=tokens)


def fit(shape: ModelShape, profile: Profile, policy: CachePolicy, weights: WeightFormat, wanted: Constraints) -> Choice:
    """The first candidate that meets every constraint; UserError says how close the nearest came.

    weights: the largest format to try; smaller ones are tried when it does not fit.
    """
    context = wanted.context or shape.context
    if context > shape.context:
        raise UserError(f"context={context} is beyond the {shape.context} tokens that {shape.name} was trained for; ask for at most that.")
    formats = sorted((f for f in FORMATS.values() if BITS[f.name] <= BITS[weights.name]), key=lambda f: -f.bits)
    nearest: tuple[float, str] | None = None
    for chosen, rules, budget in candidates(policy, context, formats):
        if rules.compresses and not planner.compresses(profile):
            continue
        try:
            made = plan(rules, shape.layers, budget, context)
        except UserError:
            continue
        memory = planner.memory_plan(shape, chosen, made, profile)
        step = estimate.decode(shape, chosen, made, profile, context - 1)
        misses = list(_misses(wanted, memory, step))
        if not misses:
            return Choice(chosen, made, budget, memory, step)
        worst = max(misses)
        if nearest is None or worst < nearest:
            nearest = worst
    reason = nearest[1] if nearest else "no cache of this model is that small"
    raise UserError(f"Nothing meets these constraints for {shape.name} on {profile.name}: {reason}; relax a constraint or choose a smaller model.")


def _misses(wanted: Constraints, memory: planner.MemoryPlan, step: estimate.Decode) -> Iterator[tuple[float, str]]:
    """(factor by which a constraint is missed, in words) for each that is."""
    limits = [("usable memory", memory.usable), ("memory asked for", wanted.memory)]
    for name, limit in limits:
        if limit is not None and memory.needed > limit:
            yield memory.needed / max(limit, 1), f"the nearest needs {format_bytes(memory.needed)} and the {name} is {format_bytes(limit)}"
    if wanted.speed and step.tokens_per_second < wanted.speed:
        yield wanted.speed / step.tokens_per_second, f"the nearest reaches {step.tokens_per_second:.1f} tokens/s of {wanted.speed:g}"
