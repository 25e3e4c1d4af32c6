"""The acceptance rule of speculative decoding (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

A token x drawn from the draft's law q is accepted with probability min(1, p(x)/q(x)), p being the target's law at that place. The
first rejected token is replaced by one drawn from the residual max(p - q, 0), normalised, and what was drafted behind it is
forgotten. When every token was accepted, one more is drawn from the target's law behind them. What comes out has the law p at
every place, whatever q is.

Both laws must be those that would be drawn from: temperature, top-k, top-p, min-p and repetition penalty applied on both sides.
Greedy decoding is the same rule with laws that are certain.

The rule is exact only if a place is drafted or not before its token is drawn. A token that was drawn and then dropped because it
looked unlikely would change the law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edgekv.generation.sampling import Sampler

Law = tuple[np.ndarray, np.ndarray]
"""Token ids int64 [n], all different, and their probabilities float64 [n], which sum to 1; other tokens have none."""


class Verdict(NamedTuple):
    """How many of the drafted tokens stand, and the target's own token that follows them."""

    accepted: int
    token: int


def probability(law: Law, token: int) -> float:
    """Probability of a token under a law."""
    ids, probabilities = law
    if token < ids.size and ids[token] == token:  # a law over the whole vocabulary lists it in order
        return float(probabilities[token])
    found = np.flatnonzero(ids == token)
    return float(probabilities[found[0]]) if found.size else 0.0


class AcceptanceRule:
    """Applies the rule; one object per vocabulary, because it keeps a scratch array of its size."""

    def __init__(self, vocab: int):
        self._scratch = np.zeros(vocab)

    def residual(self, target: Law, draft: Law | None, token: int) -> Law:
        """max(p - q, 0) on the target's candidates, not normalised; `draft` None is certainty of `token`."""
        ids, probabilities = target
        scratch = self._scratch
        taken = np.array([token]) if draft is None else draft[0]
        scratch[taken] = 1.0 if draft is None else draft[1]
        rest = np.maximum(probabilities - scratch[ids], 0.0)
        scratch[taken] = 0.0
        # Rejection has probability sum(max(q - p, 0)), the sum of this residual: where it is zero by rounding alone, p == q.
        return (ids, rest) if rest.sum() > 0.0 else target

    def verify(
        self, tokens: Sequence[int], laws: Sequence[Law | None], target: Callable[[int], Law], sampler: Sampler
    ) -> Verdict:
        """Judges drafted tokens.

        tokens   drafted ids, in order, [n]
        laws     what each was drawn from, [n]; None: the token was certain, as from a drafter that proposes without chance
        target   target(i) is the target's law where token i stands, target(n) the one behind them all; asked for in order and
                 only as far as needed
        sampler  its random numbers are used
        """
        for index, (token, law) in enumerate(zip(tokens, laws, strict=True)):
            p = target(index)
            wanted, drawn = probability(p, token), 1.0 if law is None else probability(law, token)
            if wanted >= drawn or (wanted > 0.0 and sampler.rng.random() * drawn < wanted):
                continue
            return Verdict(index, _draw(self.residual(p, law, token), sampler))
        return Verdict(len(tokens), _draw(target(len(tokens)), sampler))


def _draw(law: Law, sampler: Sampler) -> int:
    ids, probabilities = law
    return int(ids[0] if ids.size == 1 else ids[sampler.draw(probabilities)])
