"""Measures how fast a bundle reads and writes at several depths of text."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from edgekv.generation.report import rate
from edgekv.generation.session import Session

_WARM_UP = 8  # tokens decoded before anything counts: kernels are chosen and memory is touched on first use


@dataclass(frozen=True)
class Depth:
    """One measured depth. Rates are medians over the repeats, in tokens per second; spreads are (max - min) / median.

    prefill  of the `depth` tokens before it, from an empty cache
    decode   of the `tokens` after it, one token per step, argmax sampling included
    """

    depth: int
    tokens: int
    prefill_tokens_per_second: float
    prefill_spread: float
    decode_tokens_per_second: float
    decode_spread: float
    kept: int
    kv_bytes_used: int

    def to_json(self) -> dict[str, Any]:
        return {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(self).items()}


def _summary(rates: list[float]) -> tuple[float, float]:
    middle = statistics.median(rates)
    return middle, (max(rates) - min(rates)) / middle


def measure(
    session: Session, depths: list[int], tokens: int, repeats: int, progress: Callable[[str], None] = lambda text: None
) -> Iterator[Depth]:
    """Yields the figures of each depth. Depths that a full cache cannot hold are the caller's to leave out.

    The text is random tokens of a fixed seed: neither the model nor the kernels have paths that depend on their values.
    """
    text = np.random.default_rng(0).integers(0, session.engine.vocab, max(depths))
    row, block = np.zeros(1, np.int64), np.zeros(1, np.int64)

    def decode(count: int) -> None:
        for _ in range(count):
            token = session.step(block, row)[0].argmax()
            session.commit(1)
            block[0] = token

    session.reset()
    decode(min(_WARM_UP, session.room))
    for depth in depths:
        prefills, decodes = [], []
        for repeat in range(repeats):
            progress(f"depth {depth}, run {repeat + 1} of {repeats}")
            session.reset()
            start = time.perf_counter()
            block[0] = session.feed(text[:depth], foresee=True).argmax()
            middle = time.perf_counter()
            decode(tokens)
            end = time.perf_counter()
            prefills.append(rate(depth, middle - start))
            decodes.append(rate(tokens, end - middle))
        cache = session.engine.occupancy(session.position)
        yield Depth(depth, tokens, *_summary(prefills), *_summary(decodes), cache.kept, cache.used)
