"""Attention sinks and the newest tokens (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def choose(params: Mapping, ranking: np.ndarray) -> np.ndarray:
    """The first `sinks` candidates (sinks never leave, so they come first) and the newest body_slots - sinks."""
    heads, n = ranking.shape
    sinks, slots = params["sinks"], params["body_slots"]
    kept = np.concatenate([np.arange(sinks), np.arange(n - (slots - sinks), n)])
    return np.broadcast_to(kept, (heads, slots))
