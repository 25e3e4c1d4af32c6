"""Measured times: how long a step takes by its number of rows, learnt while text is generated.

Machines change their speed: clocks fall when it gets warm, other programs want the memory. What a decision needs is how times
compare, so they are kept in seconds of a machine at its usual pace, and the pace of the moment beside them.
"""

from __future__ import annotations

_WARM_UP = 3  # first samples, of which the fastest counts: a new shape makes buffers
_OWN = 0.05  # weight of a new sample
_PACE = 0.25  # the same, for the pace
_OUTLIER = 2.0  # a sample moves an estimate as if it were at most so many times longer or shorter
_NEIGHBOURS = 4.0  # samples that a line through the neighbouring numbers of rows counts for
_FIRST_SLOPE = 0.35  # cost of a second row, of one row's, that is assumed until it was measured


class Duration:
    """A running estimate of one duration in seconds, robust against outliers; 0 before the first sample."""

    def __init__(self) -> None:
        self.samples = 0
        self.seconds = 0.0

    def record(self, seconds: float) -> None:
        self.samples += 1
        if self.samples <= _WARM_UP:
            self.seconds = seconds if self.samples == 1 else min(self.seconds, seconds)
        else:
            self.seconds *= 1.0 + _OWN * (_bounded(seconds / max(self.seconds, 1e-9)) - 1.0)

    @property
    def known(self) -> bool:
        """Whether the estimate can be compared with."""
        return self.samples >= _WARM_UP


class Pace:
    """How slow the machine is at the moment: what things take over what they usually take."""

    def __init__(self) -> None:
        self.factor = 1.0

    def observe(self, seconds: float, usual: float) -> None:
        """Something that usually takes `usual` seconds took `seconds`."""
        self.factor *= 1.0 + _PACE * (_bounded(seconds / max(usual * self.factor, 1e-9)) - 1.0)


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1.0 / _OUTLIER), _OUTLIER)


class StepCosts:
    """Time of a step by its number of rows, 1..most.

    Numbers of rows that were never measured are interpolated; beyond the largest, the slope from the least to the largest goes on.
    """

    def __init__(self, most: int):
        self._durations = [Duration() for _ in range(most + 1)]
        self.seconds = [0.0] * (most + 1)
        """Estimate for every number of rows, index 0 unused; zeros before the first sample. Never falls as rows are added."""

    def samples(self, rows: int) -> int:
        return self._durations[rows].samples

    def known(self, rows: int) -> bool:
        return self._durations[rows].known

    def record(self, rows: int, seconds: float) -> None:
        self._durations[rows].record(seconds)
        self._fill()

    def _fill(self) -> None:
        """Makes the table from what was measured: few samples count little against a line through the neighbours."""
        known = [(rows, duration.seconds, duration.samples) for rows, duration in enumerate(self._durations) if duration.samples]
        points: list[tuple[int, float]] = []
        for index, (rows, own, samples) in enumerate(known):
            if 0 < index < len(known) - 1:
                (low, before, _), (high, after, _) = known[index - 1], known[index + 1]
                line = before + (after - before) * (rows - low) / (high - low)
                own = (samples * own + _NEIGHBOURS * line) / (samples + _NEIGHBOURS)
            points.append((rows, max(own, points[-1][1]) if points else own))
        if len(points) == 1:
            rows, time = points[0]
            one = time / (1.0 + _FIRST_SLOPE * (rows - 1))
            points = [(1, one), (2, one * (1.0 + _FIRST_SLOPE))] if rows == 1 else [(1, one), points[0]]
        (first, least), (last, largest) = points[0], points[-1]
        (low, start), (high, end), *rest = points
        for rows in range(1, len(self.seconds)):
            if rows >= high and rest:
                (low, start), (high, end), *rest = (high, end), *rest
            if rows > last:
                (low, start), (high, end) = (first, least), (last, largest)
            self.seconds[rows] = max(start + (end - start) * (rows - low) / (high - low), 1e-9)
