"""Measured times: how long a step takes by its number of rows, learnt while text is generated.

Machines change their speed: clocks fall when it gets warm, other programs want the memory. What a decision needs is how times
compare, so they are kept in seconds of a machine at its usual pace, and the pace of the moment beside them.
"""

from __future__ import annotations

_WARM_UP = 3  # first samples, of which the fastest counts: a new shape makes buffers
_OWN = 0.05  # weight of a new sample, when there were many
_YOUNG = 0.12  # the same, when there were few: those of a slow moment at the start must not stand for the rest of a text
_PACE = 0.25  # weight of a new sample of the pace
_OUTLIER = 2.0  # a sample moves an estimate as if it were at most so many times longer or shorter
_LINE = 4  # samples that the line through all numbers of rows counts for
_SETTLED = 8  # samples of a number of rows below which its time may be an accident, and most that count for it in the line
_UNMEASURED = 0.1  # weight of a time that was not measured, of one that is settled
_STALE = 0.01  # change of the time of one row below which the table stays as it is
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
            weight = min(max(1.0 / self.samples, _OWN), _YOUNG)
            self.seconds *= 1.0 + weight * (_bounded(seconds / max(self.seconds, 1e-9)) - 1.0)

    @property
    def known(self) -> bool:
        """Whether the estimate can be compared with."""
        return self.samples >= _WARM_UP


class Pace:
    """How slow the machine is at the moment: what things take over what they usually take."""

    def __init__(self) -> None:
        self.factor = 1.0
        self._seconds = self._usual = 0.0

    def note(self, seconds: float, usual: float) -> None:
        """Something that usually takes `usual` seconds took `seconds`."""
        self._seconds, self._usual = self._seconds + seconds, self._usual + usual

    def observe(self, least: float) -> None:
        """Takes account of what was noted since last time, if that is usually more than `least` seconds: less tells nothing."""
        if self._usual > least:
            self.factor *= 1.0 + _PACE * (_bounded(self._seconds / (self._usual * self.factor)) - 1.0)
        self._seconds = self._usual = 0.0


def _bounded(ratio: float) -> float:
    return min(max(ratio, 1.0 / _OUTLIER), _OUTLIER)


class StepCosts:
    """Time of a step by its number of rows, 1..most.

    Numbers of rows that were never measured lie on a line through those that were.
    """

    def __init__(self, most: int):
        self._durations = [Duration() for _ in range(most + 1)]
        self._filled_one = 0.0  # time of one row when the table was made
        self.seconds = [0.0] * (most + 1)
        """Estimate for every number of rows, index 0 unused; zeros before the first sample. Never falls as rows are added."""

    def samples(self, rows: int) -> int:
        return self._durations[rows].samples

    def usual(self, rows: int) -> float | None:
        """Mean of what was measured; None while that may be an accident."""
        duration = self._durations[rows]
        return duration.seconds if duration.samples >= _SETTLED else None

    def record(self, rows: int, seconds: float) -> None:
        duration = self._durations[rows]
        duration.record(seconds)
        # making the table takes longer than all else between two plain steps
        if rows > 1 or duration.samples <= _SETTLED or abs(duration.seconds - self._filled_one) > _STALE * self._filled_one:
            self._fill()
            self._filled_one = self._durations[1].seconds

    def _fill(self) -> None:
        """Makes the table from what was measured: few samples of one kind count little against the line through all kinds."""
        known = [(rows, duration.seconds, duration.samples) for rows, duration in enumerate(self._durations) if duration.samples]
        start, slope = _line(known)
        table = [0.0, *(start + slope * rows for rows in range(1, len(self.seconds)))]
        weights = [0.0] * len(table)
        for rows, own, samples in known:
            weights[rows] = min(samples / _SETTLED, 1.0)
            # plain decoding, which all is judged against, owes nothing to the line
            table[rows] = own if rows == 1 else (samples * own + _LINE * table[rows]) / (samples + _LINE)
        self.seconds = [0.0, *_rising(table[1:], weights[1:])]


def _line(points: list[tuple[int, float, int]]) -> tuple[float, float]:
    """Seconds at no rows and per row, by least squares of the errors at (rows, seconds, samples), many samples counting no more than some."""
    if len(points) == 1:
        rows, seconds, _ = points[0]
        one = seconds / (1.0 + _FIRST_SLOPE * (rows - 1))
        return one * (1.0 - _FIRST_SLOPE), one * _FIRST_SLOPE
    weights = [min(samples, _SETTLED) for *_, samples in points]
    total = sum(weights)
    middle = sum(w * rows for w, (rows, *_) in zip(weights, points, strict=True)) / total
    mean = sum(w * seconds for w, (_, seconds, _) in zip(weights, points, strict=True)) / total
    spread = sum(w * (rows - middle) ** 2 for w, (rows, *_) in zip(weights, points, strict=True))
    slope = sum(w * (rows - middle) * (seconds - mean) for w, (rows, seconds, _) in zip(weights, points, strict=True)) / spread
    slope = max(slope, 0.0)
    return mean - slope * middle, slope


def _rising(values: list[float], weights: list[float]) -> list[float]:
    """The sequence nearest to `values`, by weighted least squares, that never falls (pool adjacent violators); all above zero."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        mean, heavy, count = max(value, 1e-9), weight + _UNMEASURED, 1
        while pools and pools[-1][0] > mean:
            before, other, more = pools.pop()
            mean, heavy, count = (before * other + mean * heavy) / (other + heavy), other + heavy, count + more
        pools.append((mean, heavy, count))
    return [mean for mean, _, count in pools for _ in range(count)]
