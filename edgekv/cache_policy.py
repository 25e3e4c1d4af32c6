"""CachePolicy: which tokens a cache keeps and how it stores them, with every default and what is refused.

"Held" tokens are those that a layer keeps beside its tail: the body, and with format = selfindex the sinks, which lie in
planes of their own.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from edgekv import layout
from edgekv.errors import UserError
from edgekv.fields import check_choice, check_count, is_number, known_fields
from edgekv.layout import INDEX_TOKENS, LANES
from edgekv.retrieval import MOST_RERANK, parse_retrieval

DEFAULT_SINKS = 4
DEFAULT_OBSERVE = 32
DEFAULT_SCORE = "attention"
# Share of the body that the newest tokens take (heavy), by what the others are ranked by.
DEFAULT_WINDOW = {"attention": 1 / 2, "keys": 1 / 4}
# Options of keep = heavy, with the values that ask for nothing; those of scores by attention, of which keys have no use.
ATTENTION_OPTIONS = {"observe": (None, 0), "score_normalise": (None, False), "score_decay": (None, 1.0)}
HEAVY_OPTIONS = {"window": (None, 0), "score": (None,)} | ATTENTION_OPTIONS
SELFINDEX_OPTIONS = ("key_bits", "value_bits", "retrieve", "rerank")
SELFINDEX_SINKS = 64  # when the budget allows: the first tokens are cheap to keep in full and most attended
DEFAULT_KEY_BITS, DEFAULT_VALUE_BITS, DEFAULT_RETRIEVE, DEFAULT_RERANK = 4, 4, "7.5%", 2  # docs/self_index.md has the figures behind them


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
    observe          queries at the end of each boundary interval that score tokens (attention; default 32, at most boundary)
    score_normalise  rank by mean attention per observing query instead of the sum (attention; default yes)
    score_decay      factor on all scores at each boundary, 0..1 (attention; default 1)
    element          fp16 or fp32: how keys and values are stored
    positions        original: keys keep the rotation of their place in the text; cache: of their rank in the cache
    boundary         E: tokens between two compactions, a multiple of 16
    format           dense: keys and values as they are; selfindex: compressed keys that are their own index
    key_bits         bits per magnitude of a compressed key, beside the sign: 2 or 4 (selfindex; default 4)
    value_bits       bits per number of a compressed value, 2, 4 or 8 (selfindex; default 4)
    retrieve         compressed tokens that a generated token attends to: "96", "7.5%" or "all" (selfindex; default 7.5%)
    rerank           candidates per retrieved token that are ranked again by their stored keys (selfindex; None: retrieval.candidates_for; of latent keys 1)
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
    key_bits: int | None = None
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
        for name, widths, words in (("key_bits", (2, 4), "2 or 4"), ("value_bits", (2, 4, 8), "2, 4 or 8")):
            bits = getattr(self, name)
            if bits is not None and (bits not in widths or isinstance(bits, bool)):
                raise UserError(f"{name.replace('_', ' ')} must be {words}, not {bits!r}.")
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
            defaults = {"key_bits": DEFAULT_KEY_BITS, "value_bits": DEFAULT_VALUE_BITS, "retrieve": DEFAULT_RETRIEVE}
            filled = {name: default for name, default in defaults.items() if getattr(self, name) is None}
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
        fields = known_fields(cls, obj, "cache policy")
        if fields.get("format") == "selfindex":
            fields.setdefault("key_bits", 2)  # what bundles hold that were made before there was a choice
        return cls(**fields)
