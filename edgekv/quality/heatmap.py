"""Retrieval scores as a map of text length (across) and depth (down), one panel per bundle, on any canvas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from edgekv.memory.charts.canvas import Canvas

LOW, MIDDLE, HIGH = (0xD7, 0x30, 0x27), (0xFE, 0xE0, 0x8B), (0x1A, 0x98, 0x50)  # scores 0, 0.5 and 1
CELL_WIDTH, CELL_HEIGHT = 58, 26
LEFT, TOP, GAP = 56, 62, 30
MOST_ACROSS = 3  # panels in one row
INK = "#333333"


def colour(score: float) -> str:
    """'#rrggbb' between red (0), yellow (0.5) and green (1)."""
    score = min(max(score, 0.0), 1.0)
    a, b, share = (LOW, MIDDLE, score * 2) if score < 0.5 else (MIDDLE, HIGH, score * 2 - 1)
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in zip(a, b, strict=True))


def panels(made: dict[str, Any], task: str) -> list[tuple[str, list[dict[str, Any]]]]:
    """(caption, cells) of every bundle that has scores for the task."""
    found = []
    for bundle in made["bundles"]:
        if task in bundle["tasks"]:
            result = bundle["tasks"][task]
            found.append((f"{bundle['name']}: {result['score']:.0%}", result["cells"]))
    return found


def size(made: dict[str, Any], task: str) -> tuple[int, int]:
    """Width and height in pixels of the map of one task."""
    lengths, depths = _axes(made, task)
    shown = len(panels(made, task))
    across, down = min(shown, MOST_ACROSS), -(-shown // MOST_ACROSS)
    width, height = _panel(lengths, depths)
    return max(LEFT + across * width, 360), down * height + 12


def draw(canvas: Canvas, made: dict[str, Any], task: str) -> None:
    """The map of one task."""
    lengths, depths = _axes(made, task)
    width, height = _panel(lengths, depths)
    canvas.text(6, 18, f"{task}: share of the hidden facts that came back, by text length and depth", 13, INK)
    for index, (caption, cells) in enumerate(panels(made, task)):
        left, top = LEFT + index % MOST_ACROSS * width, TOP + index // MOST_ACROSS * height
        canvas.text(left, top - 22, caption if len(caption) * 7 < width + LEFT else caption[: (width + LEFT) // 7 - 1] + "…", 12, INK)
        for column, length in enumerate(lengths):
            canvas.text(left + (column + 0.5) * CELL_WIDTH, top - 6, str(length), 10, INK, "middle")
        for row, depth in enumerate(depths):
            y = top + row * CELL_HEIGHT
            if index % MOST_ACROSS == 0:
                canvas.text(left - 6, y + CELL_HEIGHT / 2 + 4, "spread" if depth is None else f"{depth:.0%}", 10, INK, "end")
            for column, length in enumerate(lengths):
                _cell(canvas, left + column * CELL_WIDTH, y, _score(cells, length, depth))


def _cell(canvas: Canvas, x: float, y: float, score: float | None) -> None:
    canvas.box(x + 1, y + 1, CELL_WIDTH - 2, CELL_HEIGHT - 2, "#eeeeee" if score is None else colour(score))
    text = "–" if score is None else f"{score:.0%}"  # grey: the prompt does not fit this bundle
    canvas.text(x + CELL_WIDTH / 2, y + CELL_HEIGHT / 2 + 4, text, 11, INK if score is None or 0.2 < score < 0.85 else "#ffffff", "middle")


def _score(cells: Sequence[dict[str, Any]], length: int, depth: float | None) -> float | None:
    return next((c["score"] for c in cells if c["length"] == length and c["depth"] == depth), None)


def _axes(made: dict[str, Any], task: str) -> tuple[list[int], list[float | None]]:
    cells = [c for _, found in panels(made, task) for c in found]
    return sorted({c["length"] for c in cells}), sorted({c["depth"] for c in cells}, key=lambda d: -1.0 if d is None else d)


def _panel(lengths: Sequence[int], depths: Sequence[float | None]) -> tuple[int, int]:
    return len(lengths) * CELL_WIDTH + GAP, len(depths) * CELL_HEIGHT + TOP
