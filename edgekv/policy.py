"""What a cache keeps, and how many bytes that takes.

A CachePolicy says which tokens stay (docs/cache.md); a LayerGeometry says what one decoder layer stores per token. plan()
turns both and a budget into the parameters of every layer's state, such that the whole arena (all layers, with headers,
tails, scores, observed queries and alignment) stays within the budget.

"Held" tokens are those that a layer keeps beside its tail (edgekv/cache_policy.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from edgekv import layout
from edgekv.budget import Budget, format_bytes, parse_budget
from edgekv.cache_policy import DEFAULT_SINKS, CachePolicy, round_up
from edgekv.errors import UserError
from edgekv.geometry import LayerGeometry
from edgekv.layout import INDEX_TOKENS, LANES, state_bytes
from edgekv.retrieval import parse_retrieval

__all__ = [
    "Budget", "CachePolicy", "LayerGeometry", "Plan", "describe", "format_bytes", "layer_params", "max_position",
    "parse_budget", "plan", "round_up", "state_bytes",
]  # fmt: skip

BOUNDARIES = (256, 128, 64, 32, 16)  # choices for the boundary interval; a prefill block is never longer than the interval
DENSE_WINDOW = 1024  # a sliding window of a model's own up to this length stays dense: it is small, and much of it is attended


def stays_dense(policy: CachePolicy, geometry: LayerGeometry) -> bool:
    """Whether a layer keeps its keys and values as they are: in a dense cache, and where the model itself looks back only a little."""
    return not policy.compresses or 0 < geometry.sliding_window <= DENSE_WINDOW


def layer_body_slots(policy: CachePolicy, geometry: LayerGeometry, held: int) -> int:
    """Body slots of a layer when layers hold `held` tokens: a sliding-window layer never needs more than its window."""
    dense = stays_dense(policy, geometry)
    slots = held // LANES * LANES if dense else policy.body_slots(held)
    window = geometry.sliding_window
    return min(slots, round_up(window, LANES if dense else INDEX_TOKENS)) if window else slots


def layer_params(
    policy: CachePolicy, geometry: LayerGeometry, layer: int, body_slots: int, fused_rotary: bool = False, context: int = 0
) -> dict:
    """The fields of attributes.def for one layer. `policy` has no None left (CachePolicy.resolve, Plan.policy).

    A layer whose body holds all of the model's own sliding window keeps just that window: no other token can be seen, so
    neither sinks nor scores are worth a byte there. context: tokens that a text may have, of which compressed layers store the
    mean of every interval.
    """
    keep, sinks, observe = policy.keep, policy.sinks, policy.observe
    if geometry.sliding_window and body_slots >= geometry.sliding_window:
        keep, sinks, observe = "window", 0, 0
    heavy, dense = keep == "heavy", stays_dense(policy, geometry)
    if dense and policy.compresses:  # its sinks take slots of the body
        sinks = min(sinks, DEFAULT_SINKS) if keep != "full" else 0
    params = {
        "layer": layer,
        "q_heads": geometry.q_heads,
        "kv_heads": geometry.kv_heads,
        "key_dim": geometry.key_dim,
        "value_dim": geometry.value_dim,
        "body_slots": body_slots,
        "tail_slots": policy.boundary,
        "element": layout.ELEMENTS[policy.element],
        "keep": layout.KEEPS[keep],
        "sinks": sinks,
        "window": min(policy.window, body_slots - (sinks if dense else 0)) if heavy else 0,
        "observe": observe if heavy else 0,
        "score_normalise": int(heavy and policy.score_normalise),
        "score_decay": policy.score_decay if heavy else 1.0,
        "score": layout.SCORES[policy.score] if heavy else 0,
        "sliding_window": geometry.sliding_window,
        "scale": geometry.scale,
        "softcap": geometry.softcap,
        "positions": layout.POSITIONS[policy.positions],
        "rotary_dim": geometry.rotary_dim,
        "rotary_interleaved": int(geometry.rotary_interleaved),
        "fused_rotary": int(fused_rotary or (geometry.latent > 0 and geometry.rotary_dim > 0)),
        "head_dim": geometry.head_dim,
        "latent": geometry.latent,
    }
    if not dense:
        params |= {
            "format": layout.FORMATS["selfindex"],
            **({} if geometry.latent else {"key_bits": policy.key_bits}),
            "value_bits": policy.value_bits,
            "intervals": -(-max(context, 1) // policy.boundary),
        }
    sentence = layout.check_params(params)
    if sentence:
        raise UserError(f"The cache of layer {layer} cannot be built: {sentence}.")
    return params


def max_position(policy: CachePolicy, held: int, context: int) -> int | None:
    """Tokens a text may have under a resolved policy whose layers hold up to `held` tokens beside the tail; None: no limit.

    A full cache ends where its slots end: tokens beyond the last boundary stay in the tail, so the compaction at
    max_position itself is neither needed nor, with a token budget, possible. Positions `original` end at the model's context,
    beyond which no rotation was ever trained. Positions `cache` run without end.
    """
    if policy.keep == "full":
        return min(context, held // policy.boundary * policy.boundary + policy.boundary)
    return context if policy.positions == "original" else None


@dataclass(frozen=True)
class Plan:
    """A resolved policy and the state parameters of every layer; arena offsets follow from them."""

    policy: CachePolicy
    layers: tuple[dict, ...]
    context: int

    @property
    def body_slots(self) -> tuple[int, ...]:
        return tuple(p["body_slots"] for p in self.layers)

    @property
    def held(self) -> int:
        """Tokens the largest layer holds beside its tail."""
        return max(layout.held_tokens(p) for p in self.layers)

    @property
    def boundary(self) -> int:
        return self.policy.boundary

    @property
    def capacity(self) -> int:
        """Tokens the largest layer can come to hold: sinks, body and tail; a full body takes whole intervals only."""
        unit = self.boundary if self.policy.keep == "full" else 1
        return self.held // unit * unit + self.boundary

    @property
    def state_bytes(self) -> tuple[int, ...]:
        return tuple(state_bytes(p) for p in self.layers)

    @property
    def arena_bytes(self) -> int:
        """Bytes of all states together; every state is a multiple of 256 bytes, so they lie back to back."""
        return sum(self.state_bytes)

    @property
    def max_position(self) -> int | None:
        return max_position(self.policy, self.held, self.context)

    def describe(self) -> str:
        return describe(self.policy, self.held, self.context) + f" {format_bytes(self.arena_bytes)} in all."


def plan(
    policy: CachePolicy,
    geometries: Sequence[LayerGeometry],
    budget: Budget | None,
    context: int,
    fused_rotary: bool = False,
) -> Plan:
    """The largest cache within the budget, for a model with these layers and a context of `context` tokens.

    budget in bytes bounds the whole arena; in tokens (or percent of the context) it is sinks + body + tail. None is for
    keep = full alone and holds the whole context. UserError names the smallest budget that fits when this one does not.
    """
    if not geometries or context < 1:
        raise UserError("A cache needs at least one layer and a context of at least one token.")
    if policy.positions == "cache" and any(g.rotary_dim and not g.inv_freq for g in geometries):
        raise UserError(
            "positions 'cache' cannot be had with fewer rotary pairs: each head turns at frequencies of its own and is not turned again; use positions 'original'."
        )
    if policy.positions == "cache" and not all(g.rotary_dim and g.inv_freq for g in geometries):
        raise UserError("positions 'cache' needs rotary positions in every layer; this model has layers without them.")
    if policy.positions == "cache" and any(g.head_dim or g.latent for g in geometries):
        raise UserError("positions 'cache' cannot be had with projected or latent keys, which cannot be turned to another position; use positions 'original'.")
    latent = any(g.latent for g in geometries)
    if latent:
        policy = _check_latent(policy)
    for layer, g in enumerate(geometries):
        if not stays_dense(policy, g) and g.key_dim % 4:
            raise UserError(f"cache 'selfindex' needs keys whose size is a multiple of 4; those of layer {layer} have {g.key_dim} numbers.")
    if budget is None and policy.keep != "full":
        raise UserError(f"keep '{policy.keep}' needs a KV budget, for example 2MiB, 1024tok or 25%.")
    limit = budget.resolve(context) if budget else Budget()
    if limit.tokens is not None and limit.tokens > round_up(context, LANES):
        raise UserError(f"A KV budget of {budget} is more than the model's context of {context} tokens.")

    def build(held: int, boundary: int) -> Plan:
        resolved = policy.resolve(held, boundary)
        if latent:
            resolved = dataclasses.replace(resolved, key_bits=None)  # records hold no keys
        layers = tuple(
            layer_params(resolved, g, i, layer_body_slots(resolved, g, held), fused_rotary, context)
            for i, g in enumerate(geometries)
        )
        return Plan(resolved, layers, context)

    usual = tuple(e for e in BOUNDARIES if e >= INDEX_TOKENS) if policy.compresses else BOUNDARIES
    choices = (policy.boundary,) if policy.boundary else usual
    if policy.observe and not policy.boundary:
        choices = tuple(e for e in usual if e >= policy.observe) or (round_up(policy.observe, LANES),)
    fitting = {e: _most_held(policy, build, limit, context, e) for e in choices}
    fitting = {e: held for e, held in fitting.items() if held is not None}
    if not fitting:
        raise UserError(_too_small(policy, build, budget, limit, context, choices))
    boundary = _choose_boundary(policy, fitting, context)
    return build(fitting[boundary], boundary)


def _check_latent(policy: CachePolicy) -> CachePolicy:
    """The policy with what latent keys leave no choice about; UserError when it asks for something else."""
    if policy.keep == "heavy" and policy.score != "keys":
        raise UserError("latent keys are ranked by what is stored of them: keep 'heavy' needs the score 'keys' with them.")
    if not policy.compresses:
        return policy
    if policy.keep == "heavy":
        raise UserError("latent keys in a compressed cache cannot be ranked: use keep 'full' or 'window', or the cache 'dense'.")
    if policy.key_bits is not None:
        raise UserError("key bits are those of key magnitudes; latent keys in a compressed cache have none, and are stored in 4 bits.")
    if policy.rerank not in (None, 1):
        raise UserError("latent keys are chosen by their sign codes alone: rerank must be 1 with them.")
    return dataclasses.replace(policy, rerank=1)


def _bounds(policy: CachePolicy, tokens: int | None, context: int, boundary: int) -> tuple[int, int, int]:
    """Step, least and most of the tokens that layers can hold at this boundary interval, in a cache of at most so many tokens."""
    # a full body grows by whole intervals, any rest is never filled; what sinks leave of a compressed one is rounded by itself
    unit = boundary if policy.keep == "full" else 1 if policy.compresses else LANES
    least = policy.least_held(boundary)
    most = round_up(context, boundary) if policy.keep == "full" else max(round_up(context, boundary) - boundary, least)
    if policy.positions == "cache":  # the newest rotary position is body + tail - 1
        most = (context - boundary) // LANES * LANES
    if tokens is not None:
        most = min(most, (tokens - boundary) // unit * unit)
    return unit, least, most


def _ranges(build, unit: int, least: int, most: int, boundary: int) -> list[tuple[int, int]]:
    """First and last held tokens of the ranges in which more tokens never take fewer bytes. They end where layers come to hold their whole
    sliding window and give up sinks and scores (layer_params)."""
    firsts, small, large = {least}, build(least, boundary).layers, build(most, boundary).layers
    windows = {(p["sliding_window"], i) for i, p in enumerate(small) if p["body_slots"] < p["sliding_window"] <= large[i]["body_slots"]}
    for window, layer in {window: (window, i) for window, i in windows}.values():
        low, high = least // unit, most // unit  # its body is smaller at low and not at high
        while high - low > 1:
            middle = (low + high) // 2
            if build(middle * unit, boundary).layers[layer]["body_slots"] < window:
                low = middle
            else:
                high = middle
        firsts.add(high * unit)
    starts = sorted(firsts)
    return [(first, after - unit) for first, after in zip(starts, [*starts[1:], most + unit], strict=True)]


def _most_held(policy: CachePolicy, build, limit: Budget, context: int, boundary: int) -> int | None:
    """Held tokens of the largest cache within the limit at this boundary interval, None when nothing fits."""
    unit, least, most = _bounds(policy, limit.tokens, context, boundary)
    if most < least:
        return None
    if limit.bytes is None or build(most, boundary).arena_bytes <= limit.bytes:
        return most
    for first, last in reversed(_ranges(build, unit, least, most, boundary)):
        if build(first, boundary).arena_bytes > limit.bytes:
            continue
        low, high = first // unit, last // unit + 1  # low fits; high does not, or belongs to another range
        while high - low > 1:
            middle = (low + high) // 2
            if build(middle * unit, boundary).arena_bytes <= limit.bytes:
                low = middle
            else:
                high = middle
        return low * unit
    return None


def _choose_boundary(policy: CachePolicy, fitting: dict[int, int], context: int) -> int:
    """Longer intervals cost fewer compactions and allow longer prefill blocks; shorter ones waste less of a small budget.

    Compressed layers store a mean per interval of the whole text, so with them a short interval is no saving by itself.
    """
    held = {e: min(tokens + e, context) for e, tokens in fitting.items()}
    for e in fitting:
        if policy.keep == "full" or policy.compresses:
            if e <= held[e] // 2 and held[e] >= max(held.values()) * 15 // 16:
                return e
        elif e <= held[e] // 2 and e <= min(BOUNDARIES, key=lambda power: abs(power - held[e] / 8)):
            return e
    return min(fitting)


def _too_small(policy: CachePolicy, build, budget: Budget | None, limit: Budget, context: int, choices: Sequence[int]) -> str:
    boundary = choices[-1]
    least = policy.least_held(boundary)
    if policy.positions == "cache" and least + boundary > context:
        return (
            f"positions 'cache' with these options needs rotary positions up to {least + boundary}, "
            f"beyond the model's context of {context} tokens: use fewer sinks, a smaller window or a shorter boundary interval."
        )
    smallest = []
    for e in choices:
        unit, least, most = _bounds(policy, None, context, e)
        smallest += [build(first, e) for first, _ in _ranges(build, unit, least, max(most, least), e)]
    size, tokens = min(p.arena_bytes for p in smallest), min(p.capacity for p in smallest)
    meaning = f" ({limit.tokens} tokens)" if budget and budget.percent is not None else ""
    return (
        f"A KV budget of {budget}{meaning} is too small for this model with these options: the smallest that fits is "
        f"{size} bytes ({format_bytes(size)}) or {tokens}tok."
    )


def describe(policy: CachePolicy, held: int, context: int) -> str:
    """A resolved policy in words, for layers that hold up to `held` tokens beside the tail."""
    newest = f"the newest {held - policy.sinks}"
    sinks = f"the first {policy.sinks} tokens of the text, " if policy.sinks else ""
    if policy.keep == "full":
        text = f"Keeps every token, up to {max_position(policy, held, context)}"
    elif policy.keep == "window":
        text = f"Keeps {sinks}{newest}"
    else:
        by = "the highest mean attention per query" if policy.score_normalise else "the highest accumulated attention"
        if policy.score == "keys":
            by = "keys least like all"
        rest = held - policy.sinks - policy.window
        text = f"Keeps {sinks}the newest {policy.window} and, per kv head, the {rest} others with {by}"
    text += f", and beside them the tokens since the last boundary (one every {policy.boundary} tokens)."
    stored = {"fp16": "half", "fp32": "single"}[policy.element]
    where = {
        "original": f"Keys keep the position of the text, at most {context} tokens",
        "cache": "Positions count inside the cache, so the text may go on without end",
    }[policy.positions]
    if not policy.compresses:
        return f"{text} {where}. Numbers are stored in {stored} precision."
    first = f"The first {policy.sinks} tokens and those" if policy.sinks else "Tokens"
    keys = f"{policy.key_bits + 1}-bit keys that are their own index" if policy.key_bits else "latent keys in 4 bits and their sign codes"
    return (
        f"{text} {where}. {first} since the last boundary are stored in {stored} precision, all others compressed ({keys}, "
        f"{policy.value_bits}-bit values); beside the former a generated token attends to "
        f"{parse_retrieval(policy.retrieve).words}, found by their codes."
    )
