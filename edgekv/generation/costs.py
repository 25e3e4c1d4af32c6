"""Measured times: how long a step takes by its number of rows, learnt while text is generated."""

from __future__ import annotations

_WARM_UP = 3  # first samples, of which the fastest counts: a new shape makes buffers
_OWN, _OTHERS = 0.05, 0.02  # weight of a new sample for its own number of rows and for the others
_OUTLIER = 2.0  # a sample moves an estimate as if it were at most so many times longer or shorter
_FIRST_SLOPE = 0.35  # cost of a second row, of one row's, that is assumed until it was measured


class Duration:
    """A running estimate of one duration in seconds, robust against outliers; 0 before the first sample."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0

    def record(self, seconds: float) -> float:
        """Takes a sample; returns its ratio to the estimate before, bounded, 1 while warming up."""
        self.samples += 1
        if self.samples <= _WARM_UP:
            self.seconds = seconds if self.samples == 1 else min(self.seconds, seconds)
            return 1.0
        ratio = min(max(seconds / max(self.seconds, 1e-9), 1.0 / _OUTLIER), _OUTLIER)
        self.seconds *= 1.0 + _OWN * (ratio - 1.0)
        return ratio


class StepCosts:
    """Time of a step by its number of rows, 1..most.

    Numbers of rows that were never measured are interpolated; beyond the largest, the last slope goes on. As a text grows, all
    steps get slower together, so a sample of one kind also moves the others a little.
    """

    def __init__(self, most: int):
        self._durations = [Duration() for _ in range(most + 1)]
        self.seconds = [0.0] * (most + 1)
        """Estimate for every number of rows, index 0 unused; zeros before the first sample. Never falls as rows are added."""

    def samples(self, rows: int) -> int:
        return self._durations[rows].samples

    def record(self, rows: int, seconds: float) -> None:
        ratio = self._durations[rows].record(seconds)
        if ratio != 1.0:
            factor = 1.0 + _OTHERS * (ratio - 1.0)
            for other, duration in enumerate(self._durations):
                if other != rows:
                    duration.seconds *= factor
        self._fill()

    def _fill(self) -> None:
        known: list[tuple[int, float]] = []
        for rows, duration in enumerate(self._durations):
            if duration.samples:
                known.append((rows, max(duration.seconds, known[-1][1]) if known else duration.seconds))
        rows, time = known[0]
        slope = time * _FIRST_SLOPE / (1.0 + _FIRST_SLOPE * (rows - 1))  # before the first two kinds of step are known
        at, table = (rows, time), self.seconds
        ahead = iter(known[1:] if len(known) > 1 else ())
        following = next(ahead, None)
        if following:
            slope = (following[1] - time) / (following[0] - rows)
        for index in range(1, len(table)):
            if following and index >= following[0]:
                at, following = following, next(ahead, None)
                if following:
                    slope = (following[1] - at[1]) / (following[0] - at[0])
            table[index] = max(at[1] + (index - at[0]) * slope, 1e-9)
