"""What a cache keeps, and how many bytes that takes.

A CachePolicy says which tokens stay (docs/cache.md); a LayerGeometry says what one decoder layer stores per token. plan()
turns both and a budget into the parameters of every layer's state, such that the whole arena (all layers, with headers,
tails, scores, observed queries and alignment) stays within the budget.

"Held" tokens are those that a layer keeps beside its tail: the body, and with format = selfindex the sinks, which lie in
planes of their own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from edgekv import layout
from edgekv.budget import Budget, format_bytes, parse_budget
from edgekv.errors import UserError
from edgekv.fields import check_choice, check_count, is_number, known_fields
from edgekv.geometry import LayerGeometry
from edgekv.layout import INDEX_TOKENS, LANES, state_bytes
from edgekv.retrieval import MOST_RERANK, parse_retrieval

__all__ = [
    "Budget", "CachePolicy", "LayerGeometry", "Plan", "describe", "format_bytes", "layer_params", "max_position",
    "parse_budget", "plan", "state_bytes",
]  # fmt: skip

BOUNDARIES = (256, 128, 64, 32, 16)  # choices for the boundary interval; a prefill block is never longer than the interval
DEFAULT_SINKS = 4
DEFAULT_OBSERVE = 16
DEFAULT_SCORE = "attention"
# Share of the body that the newest tokens take (heavy), by what the others are ranked by.
DEFAULT_WINDOW = {"attention": 1 / 2, "keys": 1 / 4}
# Options of keep = heavy, with the values that ask for nothing; those of scores by attention, of which keys have no use.
ATTENTION_OPTIONS = {"observe": (None, 0), "score_normalise": (None, False), "score_decay": (None, 1.0)}
HEAVY_OPTIONS = {"window": (None, 0), "score": (None,)} | ATTENTION_OPTIONS
SELFINDEX_OPTIONS = ("value_bits", "retrieve", "rerank")
SELFINDEX_SINKS = 64  # when the budget allows: the first tokens are cheap to keep in full and most attended
DEFAULT_VALUE_BITS, DEFAULT_RETRIEVE, DEFAULT_RERANK = 4, "7.5%", 4  # docs/self_index.md has the figures behind them
DENSE_WINDOW = 1024  # a sliding window of a model's own up to this length stays dense: it is small, and much of it is attended


def round_up(count: int, to: int) -> int:
    return (count + to - 1) // to * to


@dataclass(frozen=True)
class CachePolicy:
    """Which tokens a cache keeps and how it stores them. None means: chosen by plan().

    keep             full: all; window: sinks + newest; heavy: sinks + newest `window` + highest ranked
    sinks            first tokens of the text that are never evicted (window and heavy; default 4); with format = selfindex
                     the tokens that are stored in full (all keep rules; default 64, fewer when the cache is small)
    window           newest tokens that are never evicted (heavy; default DEFAULT_WINDOW of the body)
    score            what the others are ranked by: the attention they received, or how little their keys are like all (heavy; default attention)
    observe          queries at the end of each boundary interval that score tokens (attention; default 16, at most boundary)
    score_normalise  rank by mean attention per observing query instead of the sum (attention; default yes)
    score_decay      factor on all scores at each boundary, 0..1 (attention; default 1)
    element          fp16 or fp32: how keys and values are stored
    positions        original: keys keep the rotation of their place in the text; cache: of their rank in the cache
    boundary         E: tokens between two compactions, a multiple of 16
    format           dense: keys and values as they are; selfindex: compressed keys that are their own index
    value_bits       bits per number of a compressed value, 2, 4 or 8 (selfindex; default 4)
    retrieve         compressed tokens that a generated token attends to: "96", "7.5%" or "all" (selfindex; default 7.5%)
    rerank           candidates per retrieved token that are ranked again by their stored keys (selfindex; default 4)
    """

    keep: str = "full"
    sinks: int | None = None
    window: int | None = None
    score: str | None = None
    observe: int | None = None
    score_normalise: bool | None = None
    score_decay: float | None = None
    element: str = "fp16"
    positions: str = "original"
    boundary: int | None = None
    format: str = "dense"
    value_bits: int | None = None
    retrieve: str | None = None
    rerank: int | None = None

    def __post_init__(self):
        check_choice("keep", self.keep, layout.KEEPS)
        if self.score is not None:
            check_choice("score", self.score, layout.SCORES)
        check_choice("element", self.element, layout.ELEMENTS)
        check_choice("positions", self.positions, layout.POSITIONS)
        check_choice("cache", self.format, layout.FORMATS)
        for name, least in (("sinks", 0), ("window", 0), ("observe", 0), ("boundary", LANES)):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), least)
        if self.boundary is not None and (self.boundary % LANES or self.boundary > 1 << 20):
            raise UserError(f"boundary must be a multiple of {LANES} up to {1 << 20}, not {self.boundary}.")
        if self.compresses and self.boundary == LANES:
            raise UserError(f"cache 'selfindex' needs a boundary of at least {INDEX_TOKENS}: every interval has a mean key of its own.")
        decay = self.score_decay
        if decay is not None and not (is_number(decay) and 0.0 <= decay <= 1.0):
            raise UserError(f"score decay must be a number between 0 and 1, not {decay!r}.")
        if self.score_normalise is not None and not isinstance(self.score_normalise, bool):
            raise UserError(f"score normalise must be true or false, not {self.score_normalise!r}.")
        if self.value_bits is not None and (self.value_bits not in (2, 4, 8) or isinstance(self.value_bits, bool)):
            raise UserError(f"value bits must be 2, 4 or 8, not {self.value_bits!r}.")
        if self.rerank is not None:
            check_count("rerank", self.rerank, 1)
            if self.rerank > MOST_RERANK:
                raise UserError(f"rerank must be at most {MOST_RERANK}, not {self.rerank}.")
        if self.retrieve is not None:
            parse_retrieval(self.retrieve)
        self._refuse_options_without_meaning()

    @property
    def compresses(self) -> bool:
        return self.format == "selfindex"

    def _refuse_options_without_meaning(self) -> None:
        for name in SELFINDEX_OPTIONS:
            if getattr(self, name) is not None and not self.compresses:
                raise UserError(f"{name.replace('_', ' ')} belongs to cache 'selfindex'; a dense cache stores numbers as they are.")
        if self.compresses and self.positions == "cache":
            raise UserError("cache 'selfindex' needs positions 'original': compressed keys cannot be turned to another position.")
        if self.keep == "full":
            if self.positions == "cache":
                raise UserError("positions 'cache' needs a bounded cache: use it with keep 'window' or 'heavy'.")
            if self.sinks and not self.compresses:
                raise UserError("sinks belong to keep 'window' or 'heavy'; keep 'full' evicts nothing.")
        if self.keep != "heavy":
            for name, neutral in HEAVY_OPTIONS.items():
                if getattr(self, name) not in neutral:
                    hint = "; the size of a window cache is its budget" if name == "window" else ""
                    raise UserError(f"{name.replace('_', ' ')} belongs to keep 'heavy', not to keep '{self.keep}'{hint}.")
        elif (self.score or DEFAULT_SCORE) != "attention":
            for name, neutral in ATTENTION_OPTIONS.items():
                if getattr(self, name) not in neutral:
                    raise UserError(f"{name.replace('_', ' ')} belongs to score 'attention'; keys need no query to be ranked.")
        if self.observe is not None and self.boundary is not None and self.observe > self.boundary:
            raise UserError(f"observe ({self.observe}) must not exceed the boundary interval ({self.boundary}).")

    def resolve(self, held: int, boundary: int) -> CachePolicy:
        """The same policy with every default filled in for layers that hold `held` tokens beside their tail."""
        heavy = self.keep == "heavy"
        score = (self.score or DEFAULT_SCORE) if heavy else None
        attention = score == "attention"
        sinks = self._sinks(held)
        room = max(held - sinks, 0)
        if self.compresses:
            room = dataclasses.replace(self, sinks=sinks, boundary=boundary).body_slots(held)
        window = self.window
        if heavy and window is None:
            share = int((room if self.compresses else held) * DEFAULT_WINDOW[score])
            window = min((share + LANES // 2) // LANES * LANES, room)
        filled = {}
        if self.compresses:
            defaults = zip(SELFINDEX_OPTIONS, (DEFAULT_VALUE_BITS, DEFAULT_RETRIEVE, DEFAULT_RERANK), strict=True)
            filled = {name: default for name, default in defaults if getattr(self, name) is None}
        return dataclasses.replace(
            self,
            sinks=sinks,
            window=window if heavy else 0,
            score=score,
            observe=(min(DEFAULT_OBSERVE, boundary) if self.observe is None else self.observe) if attention else 0,
            score_normalise=attention and self.score_normalise is not False,
            score_decay=1.0 if self.score_decay is None else float(self.score_decay),
            boundary=boundary,
            **filled,
        )

    def _sinks(self, held: int) -> int:
        if not self.compresses:
            return 0 if self.keep == "full" else DEFAULT_SINKS if self.sinks is None else self.sinks
        if self.sinks is not None:
            return self.sinks
        return max(0, min(SELFINDEX_SINKS, held // 4, held - round_up(self.window or 0, INDEX_TOKENS))) // LANES * LANES

    def body_slots(self, held: int) -> int:
        """Body slots of layers that hold `held` tokens, of a resolved policy: all, or in whole blocks of 32 what sinks leave."""
        if not self.compresses:
            return held
        rest = max(held - self.sinks, INDEX_TOKENS)
        return round_up(rest, INDEX_TOKENS) if self.keep == "full" else rest // INDEX_TOKENS * INDEX_TOKENS

    def least_held(self, boundary: int) -> int:
        """Fewest held tokens that are of use: all sinks and the window, with at least one slot for another token."""
        if self.keep == "full":
            return round_up(INDEX_TOKENS + (self.sinks or 0), boundary) if self.compresses else boundary
        if self.compresses:
            return (self.sinks or 0) + round_up(max(self.window or 0, 1), INDEX_TOKENS)
        sinks = DEFAULT_SINKS if self.sinks is None else self.sinks
        return round_up(sinks + max(self.window or 0, 1), LANES)

    def to_json(self) -> dict:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, obj: object) -> CachePolicy:
        """Inverse of to_json on untrusted input; UserError when a field is unknown, ill-typed or makes no sense."""
        return cls(**known_fields(cls, obj, "cache policy"))


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
        "fused_rotary": int(fused_rotary),
    }
    if not dense:
        params |= {
            "format": layout.FORMATS["selfindex"],
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
    if policy.positions == "cache" and not all(g.rotary_dim and g.inv_freq for g in geometries):
        raise UserError("positions 'cache' needs rotary positions in every layer; this model has layers without them.")
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


def _most_held(policy: CachePolicy, build, limit: Budget, context: int, boundary: int) -> int | None:
    """Held tokens of the largest cache within the limit at this boundary interval, None when nothing fits."""
    # a full body grows by whole intervals, any rest is never filled; what sinks leave of a compressed one is rounded by itself
    unit = boundary if policy.keep == "full" else 1 if policy.compresses else LANES
    least = policy.least_held(boundary)
    most = round_up(context, boundary) if policy.keep == "full" else max(round_up(context, boundary) - boundary, least)
    if policy.positions == "cache":  # the newest rotary position is body + tail - 1
        most = (context - boundary) // LANES * LANES
    if limit.tokens is not None:
        most = min(most, (limit.tokens - boundary) // unit * unit)
    if most < least:
        return None
    if limit.bytes is None or build(most, boundary).arena_bytes <= limit.bytes:
        return most
    if build(least, boundary).arena_bytes > limit.bytes:
        return None
    low, high = least // unit, most // unit  # low fits, high does not
    while high - low > 1:
        middle = (low + high) // 2
        if build(middle * unit, boundary).arena_bytes <= limit.bytes:
            low = middle
        else:
            high = middle
    return low * unit


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
    smallest = [build(policy.least_held(e), e) for e in choices]
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
    return (
        f"{text} {where}. {first} since the last boundary are stored in {stored} precision, all others compressed (3-bit keys "
        f"that are their own index, {policy.value_bits}-bit values); beside the former a generated token attends to "
        f"{parse_retrieval(policy.retrieve).words}, found by their codes."
    )
