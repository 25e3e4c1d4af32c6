"""What drafters that run a model share: grades by its logits, and the loop that draws token after token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from edgekv.generation.drafters import Draft, Length
from edgekv.generation.sampling import Sampler

# Grades: how far the most probable token leads the second, in logits. Known before a token is drawn.
_LEADS = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
GRADES = len(_LEADS) + 1


def grade(logits: np.ndarray) -> int | None:
    """Certainty of a law by its logits float32 [vocab], 0..GRADES-1; None when they are not numbers. Leaves them as they were."""
    best = int(logits.argmax())
    top = logits[best]
    if not np.isfinite(top):
        return None
    logits[best] = -np.inf
    lead = top - logits.max()
    logits[best] = top
    return sum(bool(lead >= least) for least in _LEADS)


def prior(grade: int) -> float:
    """Acceptance before any was measured: that of a mediocre draft, so that a good one is soon used and a bad one soon dropped."""
    return 0.35 + 0.06 * grade


def draw_tokens(
    logits: np.ndarray, step: Callable[[int], np.ndarray | None], length: Length, sampler: Sampler
) -> Draft:
    """Draws tokens as long as `length` wants them.

    logits  float32 [vocab] of the first place, which `length` was asked for already
    step    step(token) feeds a drafted token: logits of the place behind it, or None when the model can go no further
    """
    draft = Draft([], [], [])
    while True:
        certainty = grade(logits)
        if certainty is None or not length.wants_token(certainty):
            return draft  # a draft model that fails must not end the answer: the target goes on alone
        ids, probabilities = sampler.candidates(logits, draft.tokens)
        token = int(ids[0] if ids.size == 1 else ids[sampler.draw(probabilities)])
        draft.tokens.append(token)
        draft.laws.append((ids, probabilities))
        draft.grades.append(certainty)
        if not length.wants_law() or (logits := step(token)) is None:
            return draft
