"""How far counts are from a law."""

from __future__ import annotations

import math

import numpy as np


def chi_square_p(counts: np.ndarray, law: np.ndarray) -> float:
    """Probability of counts [n] at least this far from `law` [n] (chi-square test); 0 when something impossible was counted.

    The upper tail by Wilson and Hilferty's cube root, good to a few percent where the tests look (0.001).
    """
    counts, law = np.asarray(counts, float), np.asarray(law, float)
    if counts[law == 0].any():
        return 0.0
    possible = law > 0
    expected = law[possible] * counts.sum()
    freedom = int(possible.sum()) - 1
    if freedom == 0:
        return 1.0
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    spread = 2.0 / (9.0 * freedom)
    z = ((statistic / freedom) ** (1.0 / 3.0) - (1.0 - spread)) / math.sqrt(spread)
    return 0.5 * math.erfc(z / math.sqrt(2.0))
