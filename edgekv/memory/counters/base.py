"""The protocol of a hardware counter, and the thread that those which must be polled share.

A counter is measured, never modelled. One that cannot work on this machine says why in one sentence and is not used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable


@dataclass(frozen=True)
class Reading:
    """What a counter saw between start and stop; None means it does not measure that.

    seconds: wall time covered. dram_bytes: bytes between DRAM and the chip, both directions unless `covers` says otherwise.
    joules: energy. covers: what else on the machine is counted with it. resolution: in words.
    samples: polled pairs (seconds since start, GB/s), for the timeline.
    """

    counter: str
    seconds: float
    dram_bytes: float | None = None
    joules: float | None = None
    covers: str = ""
    resolution: str = ""
    samples: tuple[tuple[float, float], ...] = ()
    details: dict = field(default_factory=dict)


@runtime_checkable
class Counter(Protocol):
    name: str

    def unavailable(self) -> str | None:
        """None when this counter works here, else one sentence saying why not."""

    def start(self) -> None:
        """Begins counting."""

    def stop(self) -> Reading:
        """Ends counting; called once after start."""


class Poller:
    """Calls `read` every `interval` seconds on a thread of its own until stopped; a failing read ends it silently.

    read returns a number or None (no figure this time). Values are kept with the time since start.
    """

    def __init__(self, read: Callable[[], float | None], interval: float):
        self.read, self.interval = read, interval
        self.values: list[tuple[float, float]] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self.began = time.perf_counter()
        self._thread.start()

    def _run(self) -> None:
        while not self._end.is_set():
            try:
                value = self.read()
            except OSError:
                return
            if value is not None:
                self.values.append((time.perf_counter() - self.began, value))
            self._end.wait(self.interval)

    def stop(self) -> float:
        """Ends polling and returns the seconds covered."""
        self._end.set()
        self._thread.join()
        return time.perf_counter() - self.began


def integrate(samples: list[tuple[float, float]], seconds: float) -> float | None:
    """Integral of sampled rates over the whole time: each sample holds until the next; None without samples."""
    if not samples:
        return None
    edges = [0.0, *(t for t, _ in samples[1:]), max(seconds, samples[-1][0])]
    return sum(rate * (end - begin) for (_, rate), begin, end in zip(samples, edges[:-1], edges[1:], strict=True))
