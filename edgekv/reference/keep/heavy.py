"""Attention sinks, the newest tokens and the heavy hitters (H2O, arXiv 2306.14048), chosen per kv head."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def choose(params: Mapping, ranking: np.ndarray) -> np.ndarray:
    """Sinks, the newest `window`, and of the others the highest ranked; ties go to the lowest position."""
    heads, n = ranking.shape
    sinks, window, slots = params["sinks"], params["window"], params["body_slots"]
    best = np.argsort(-ranking[:, sinks : n - window], axis=1, kind="stable")[:, : slots - sinks - window]
    fixed = np.broadcast_to(np.concatenate([np.arange(sinks), np.arange(n - window, n)]), (heads, sinks + window))
    return np.sort(np.concatenate([fixed, best + sinks], axis=1), axis=1)
