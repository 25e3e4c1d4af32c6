"""Keep everything: a text that no longer fits is an error, never a silent loss."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv.errors import CacheFullError


def choose(params: Mapping, ranking: np.ndarray) -> np.ndarray:
    raise CacheFullError(
        f"The cache keeps every token and is full: {ranking.shape[1]} tokens do not fit {params['body_slots']} slots."
    )
