"""How often a bundle's likeliest next token is that of a reference, usually the same weights with the full cache."""

from __future__ import annotations

import numpy as np

from edgekv.quality.perplexity import Scores


def top1(ours: Scores, reference: Scores, start: int = 1) -> float | None:
    """Share of the tokens from `start` on at which both passes have the same argmax; None when there are none.

    Both passes were fed the same text, so this is agreement along the text, not along what either would generate.
    """
    same = (ours.argmax == reference.argmax)[max(start, 1) - 1 :]
    return float(np.mean(same)) if same.size else None
