"""Plots on a canvas: stacked bars, lines over a logarithmic or linear axis, points, roofline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from edgekv.memory.charts.canvas import Canvas

COLOURS = ("#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2", "#97bbf5", "#9c6b4e", "#9498a0")
GRID, INK = "#e3e3e3", "#333333"
LEFT, RIGHT, TOP, BOTTOM = 64, 190, 34, 44


@dataclass(frozen=True)
class Series:
    """One line or set of points. points: (x, y). style: line, dashed or dots."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str = "line"
    labels: Sequence[str] = field(default=())


class _Axis:
    def __init__(self, low: float, high: float, start: float, end: float, log: bool):
        if log:
            low, high = math.log10(max(low, 1e-12)), math.log10(max(high, 1e-12))
        self.low, self.high, self.start, self.end, self.log = low, high if high > low else low + 1, start, end, log

    def __call__(self, value: float) -> float:
        value = math.log10(max(value, 1e-12)) if self.log else value
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.log:
            first, last = math.floor(self.low), math.ceil(self.high)
            steps = (1, 2, 5) if last - first <= 3 else (1,)
            return [t for e in range(first, last + 1) for s in steps if self.low - 1e-9 <= math.log10(t := s * 10.0**e) <= self.high + 1e-9]
        raw = (self.high - self.low) / 5
        step = 10 ** math.floor(math.log10(raw))
        step *= next(m for m in (1, 2, 5, 10) if step * m >= raw)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step) + 1)]


def short(value: float) -> str:
    """1500 -> '1.5k', 0.02 -> '0.02'."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def _frame(canvas: Canvas, title: str, x: _Axis | None, y: _Axis, x_label: str, y_label: str) -> None:
    canvas.text(LEFT, 20, title, 14, INK)
    for tick in y.ticks():
        canvas.line([(LEFT, y(tick)), (canvas.width - RIGHT, y(tick))], GRID)
        canvas.text(LEFT - 6, y(tick) + 4, short(tick), 11, INK, "end")
    for tick in x.ticks() if x else ():
        canvas.line([(x(tick), TOP), (x(tick), canvas.height - BOTTOM)], GRID)
        canvas.text(x(tick), canvas.height - BOTTOM + 16, short(tick), 11, INK, "middle")
    canvas.text((LEFT + canvas.width - RIGHT) / 2, canvas.height - 8, x_label, 11, INK, "middle")
    canvas.text(6, TOP - 6, y_label, 11, INK)


def _legend(canvas: Canvas, names: Sequence[str]) -> None:
    for index, name in enumerate(names[:14]):
        y = TOP + 8 + 18 * index
        canvas.box(canvas.width - RIGHT + 14, y, 11, 11, COLOURS[index % len(COLOURS)])
        canvas.text(canvas.width - RIGHT + 31, y + 10, name if len(name) <= 24 else name[:23] + "…", 11)


def lines(canvas: Canvas, title: str, series: Sequence[Series], x_label: str, y_label: str, log_x: bool = False, log_y: bool = False) -> None:
    """Lines and points over common axes; the linear y axis starts at 0."""
    xs = [x for s in series for x, _ in s.points] or [1.0]
    ys = [y for s in series for _, y in s.points] or [1.0]
    x = _Axis(min(xs), max(xs), LEFT, canvas.width - RIGHT, log_x)
    y = _Axis(min(ys) * 0.8 if log_y else 0.0, max(ys) * (1.25 if log_y else 1.08), canvas.height - BOTTOM, TOP, log_y)
    _frame(canvas, title, x, y, x_label, y_label)
    for index, s in enumerate(series):
        colour, at = COLOURS[index % len(COLOURS)], [(x(a), y(b)) for a, b in s.points]
        if s.style == "dots" or len(at) == 1:
            for a, b in at:
                canvas.dot(a, b, 4, colour)
        else:
            canvas.line(at, colour, 2, s.style == "dashed")
        for (a, b), label in zip(at, s.labels, strict=False):
            canvas.text(a + 6, b - 6, label, 10, colour)
    _legend(canvas, [s.name for s in series])


def stacked_bars(canvas: Canvas, title: str, bars: Sequence[tuple[str, dict[str, float]]], y_label: str, limit: tuple[str, float] | None = None) -> None:
    """One bar per (name, {part: height}); a dashed line marks the limit."""
    parts = list(dict.fromkeys(part for _, heights in bars for part in heights))
    top = max([sum(h.values()) for _, h in bars] + [limit[1] if limit else 0.0, 1e-9])
    y = _Axis(0.0, top * 1.06, canvas.height - BOTTOM, TOP, False)
    _frame(canvas, title, None, y, "", y_label)
    room = (canvas.width - LEFT - RIGHT) / max(len(bars), 1)
    for index, (name, heights) in enumerate(bars):
        base = 0.0
        for part, height in heights.items():
            low, high = y(base), y(base + height)
            canvas.box(LEFT + room * (index + 0.15), high, room * 0.7, low - high, COLOURS[parts.index(part) % len(COLOURS)])
            base += height
        canvas.text(LEFT + room * (index + 0.5), canvas.height - BOTTOM + 16, name, 11, INK, "middle")
        canvas.text(LEFT + room * (index + 0.5), y(base) - 4, short(base), 10, INK, "middle")
    if limit:
        canvas.line([(LEFT, y(limit[1])), (canvas.width - RIGHT, y(limit[1]))], "#b00020", 1.5, True)
        canvas.text(canvas.width - RIGHT - 2, y(limit[1]) - 5, limit[0], 11, "#b00020", "end")
    _legend(canvas, parts)


def roofline(canvas: Canvas, title: str, peak_gbps: float, peak_tflops: float | None, points: Sequence[tuple[str, float, float]]) -> None:
    """Attainable TFLOP/s over operations per DRAM byte; points: (name, operations per byte, TFLOP/s predicted)."""
    xs = [0.25, 512.0, *(p[1] for p in points)]
    roof = [(x, min(peak_gbps * x / 1e3, peak_tflops or math.inf)) for x in _spread(min(xs), max(xs))]
    series = [Series("roof: memory" + (", arithmetic" if peak_tflops else ""), roof)]
    series += [Series(name, [(x, y)], "dots") for name, x, y in points]
    lines(canvas, title, series, "operations per byte from DRAM", "TFLOP/s", log_x=True, log_y=True)


def _spread(low: float, high: float, count: int = 60) -> list[float]:
    return [low * (high / low) ** (i / (count - 1)) for i in range(count)]
