"""Drafters propose tokens that the target model then verifies. One file each; all share the protocol below.

A drafter never changes what is emitted, only how fast (speculation_rule.py): a wrong one costs time, nothing else.
"""

from __future__ import annotations

from array import array
from typing import NamedTuple, Protocol

from edgekv.generation.sampling import Sampler
from edgekv.generation.speculation_rule import Law


class Draft(NamedTuple):
    """Proposed tokens, in order, [n]; for each what it was drawn from (None: it was certain) and its grade."""

    tokens: list[int]
    laws: list[Law | None]
    grades: list[int]


NOTHING = Draft([], [], [])  # nobody changes it


class Length(Protocol):
    """Says how long one draft gets. Asked in turn, place by place, until one answer is no.

    The answers may depend on everything known before a token is drawn and on nothing known after: a drafter must draft the token
    that wants_token agreed to, whatever it turns out to be (see the acceptance rule).
    """

    def wants_law(self, behind: int = 0) -> bool:
        """Whether the law of the next place is worth computing, for which the drafter has to read `behind` more tokens than usual."""
        ...

    def wants_token(self, grade: int) -> bool:
        """Whether, given the grade of that law, a token is worth drafting there."""
        ...


class Drafter(Protocol):
    """Proposes tokens behind a text.

    grades        number of grades: classes of certainty, told before a token is drawn, whose acceptance is then measured
    steps         steps of a model so far, each of which reads weight_bytes
    arena_bytes   of a cache of its own
    failure       why the drafter broke down, None while it works; it proposes nothing from then on, and the target goes on alone
    """

    name: str
    grades: int
    steps: int
    weight_bytes: int
    arena_bytes: int
    failure: str | None

    def prior(self, grade: int) -> float:
        """Acceptance to assume for a grade before any was measured, 0..1."""
        ...

    def follow(self, tokens: array, anew: bool = False) -> None:
        """Reads committed tokens ahead of time, as many as are worth it; called before every draft.

        anew  an answer begins: the text before it may be another one than last time
        """
        ...

    def draft(self, tokens: array, pending: int, length: Length, sampler: Sampler) -> Draft:
        """Drafts behind `tokens` (committed, int32) and `pending`, the one that follows them. Keeps no reference to `tokens`.

        Draws with `sampler`, by the same processing as the target. May stop earlier than `length` says.
        """
        ...

    def close(self) -> None: ...
