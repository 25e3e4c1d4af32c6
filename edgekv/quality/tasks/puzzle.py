"""What a retrieval task consists of, and the words and numbers it is made from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

WORDS = (
    "amber", "anchor", "badger", "barley", "beacon", "bramble", "bronze", "candle", "cedar", "cobalt", "copper", "coral", "cricket",
    "falcon", "feather", "fiddle", "garnet", "ginger", "granite", "harbour", "hazel", "heron", "indigo", "ivory", "jasmine", "juniper",
    "kestrel", "lantern", "lavender", "magnet", "maple", "marble", "meadow", "mustard", "nutmeg", "olive", "orchid", "otter", "pebble",
    "pepper", "pewter", "quartz", "raven", "saffron", "salmon", "sapphire", "silver", "sparrow", "thistle", "timber", "tulip", "velvet",
    "walnut", "willow", "winter", "zephyr",
)  # fmt: skip


@dataclass(frozen=True)
class Puzzle:
    """facts: sentences to hide, in order. target: index of the one that goes to the asked depth, the others being spread over the
    text; None spreads all of them. answers: strings that a right answer holds. lead_in: beginning of an answer, for models
    without a chat template."""

    facts: tuple[str, ...]
    target: int | None
    question: str
    answers: tuple[str, ...]
    lead_in: str


def words(rng: np.random.Generator, count: int) -> list[str]:
    """Different words."""
    return [WORDS[i] for i in rng.choice(len(WORDS), count, replace=False)]


def numbers(rng: np.random.Generator, count: int) -> list[str]:
    """Different numbers of five digits."""
    return [str(10_000 + i) for i in rng.choice(90_000, count, replace=False)]
