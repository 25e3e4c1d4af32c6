"""The figures of `edgekv eval` as one HTML page, and its charts as PNG files."""

from __future__ import annotations

import html as markup
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgekv.budget import format_bytes
from edgekv.errors import UserError
from edgekv.memory.charts.canvas import Canvas, PngCanvas, SvgCanvas
from edgekv.memory.charts.plots import Series, lines
from edgekv.quality import heatmap, tables

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 14px 2px 0;text-align:right}td:first-child,th:first-child{text-align:left}"
    "figure{margin:1.5em 0;overflow-x:auto}"
)


def charts(made: dict[str, Any]) -> Iterator[tuple[str, tuple[int, int], Callable[[Canvas], None]]]:
    """(file stem, size, function that draws on a canvas) of every chart."""
    scored = [b for b in made["bundles"] if b["perplexity"]]
    if scored:
        curves = [Series(b["name"], [(r["stop"] - 1, r["perplexity"]) for r in b["perplexity"]["ranges"]]) for b in scored]
        title = "Perplexity of the tokens up to a position, since the point before it"
        yield "perplexity", (860, 360), lambda c: lines(c, title, curves, "position in the text", "perplexity", log_x=True, log_y=True)
    for task in dict.fromkeys(task for b in made["bundles"] for task in b["tasks"]):
        yield f"needle-{task}", heatmap.size(made, task), lambda c, t=task: heatmap.draw(c, made, t)


def check_targets(html: Path | None, png: Path | None) -> None:
    """Raises UserError before anything is measured when the results could not be written, or not drawn."""
    if html is not None:
        if html.is_dir():
            raise UserError(f"{html} is a folder; give the name of an HTML file.")
        if not html.absolute().parent.is_dir() or not os.access(html.absolute().parent, os.W_OK):
            raise UserError(f"{html} cannot be written: its folder does not exist or is not yours to write to.")
    if png is not None:
        if png.exists() and not png.is_dir():
            raise UserError(f"{png} is a file; --png takes a folder.")
        PngCanvas(1, 1)


def write(made: dict[str, Any], html: Path | None, png: Path | None) -> None:
    """Writes the page and the PNG files; a page appears whole or not at all. Raises UserError."""
    drawn = list(charts(made))
    try:
        if html is not None:
            partial = html.with_name(f".{html.name}.partial")
            partial.write_text(page(made, drawn), encoding="utf-8")
            partial.replace(html)
        if png is not None:
            png.mkdir(parents=True, exist_ok=True)
            for stem, (width, height), draw in drawn:
                canvas = PngCanvas(width, height)
                draw(canvas)
                canvas.save(png / f"{stem}.png")
    except OSError as error:
        raise UserError(f"The charts cannot be written: {error.strerror or error}.") from None


def page(made: dict[str, Any], drawn: list) -> str:
    """The HTML document; every name in it is escaped, and it loads nothing from anywhere."""
    parts = ["<h1>Quality of bounded caches</h1>", f"<p>{markup.escape(tables.heading(made))}</p>"]
    for title, rows in tables.all_tables(made):
        parts += [f"<h2>{markup.escape(title)}</h2>", _table(rows)]
    for stem, (width, height), draw in drawn:
        canvas = SvgCanvas(width, height)
        draw(canvas)
        parts.append(f'<figure id="{markup.escape(stem)}">{canvas}</figure>')
    parts.append("<h2>Bundles</h2>")
    for bundle in made["bundles"]:
        words = bundle["policy"].get("words", "")
        text = f"{bundle['name']}: {bundle['model']}, weights {bundle['weights']}, KV arena {format_bytes(bundle['kv_bytes'])}. {words}"
        parts.append(f"<p>{markup.escape(text)}</p>")
    head = f'<meta charset="utf-8"><title>edgekv eval</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>" + "\n".join(parts) + "</body></html>\n"


def _table(rows: list[tuple[str, ...]]) -> str:
    def cells(row: tuple[str, ...], tag: str) -> str:
        return "".join(f"<{tag}>{markup.escape(cell)}</{tag}>" for cell in row)

    return "<table>" + "".join(f"<tr>{cells(row, 'td' if i else 'th')}</tr>" for i, row in enumerate(rows)) + "</table>"
