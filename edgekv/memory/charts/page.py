"""The charts of `edgekv profile` as one HTML page, or as PNG files."""

from __future__ import annotations

import html as markup
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from edgekv.budget import format_bytes
from edgekv.errors import UserError
from edgekv.memory.charts.canvas import Canvas, PngCanvas, SvgCanvas
from edgekv.memory.charts.plots import Series, lines, roofline, stacked_bars

WIDTH, HEIGHT = 860, 380
STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:900px;margin:2em auto;padding:0 1em;color:#222}"
    "table{border-collapse:collapse;margin:1em 0}td,th{padding:2px 12px 2px 0;text-align:right}td:first-child,th:first-child{text-align:left}"
    "code{background:#f2f2f2;padding:2px 4px}"
)


def charts(made: dict[str, Any]) -> Iterator[tuple[str, Callable[[Canvas], None]]]:
    """(file stem, function that draws on a canvas) of every chart of a report."""
    devices, model = made["devices"], made["model"]
    for device in devices:
        name = device["device"]["name"]
        bars = [(bar["name"], {part: size / 2**20 for part, size in bar["parts"].items()}) for bar in device["bars"]]
        total = device["memory"]["total"]
        limit = ("memory of the device", total / 2**20) if total else None
        title = f"Memory per policy, {model['asked_context']} tokens, {name}"
        yield f"memory-{_stem(name)}", lambda c, t=title, b=bars, m=limit: stacked_bars(c, t, b, "MiB", m)
    speeds = [Series(d["device"]["name"], [(r["depth"], r["tokens_per_second"]) for r in d["speed"]]) for d in devices]
    yield "speed", lambda c: lines(c, f"Decode speed of {model['name']} over context", speeds, "cached tokens", "tokens/s", log_x=True)
    for device in devices:
        facts, name = device["device"], device["device"]["name"]
        points = [(p["name"], p["intensity"], p["tflops"]) for p in device["roofline"]]
        yield f"roofline-{_stem(name)}", lambda c, n=name, f=facts, p=points: roofline(c, f"Roofline, {n}", f["peak_gbps"], f["tflops"], p)
    if made["quality"]:
        points = [Series(e["name"], [(e["kv_bytes"] / 2**20, e["quality"])], "dots") for e in made["quality"]]
        best = Series("best for its bytes", [(x / 2**20, y) for x, y in pareto(made["quality"])], "dashed")
        yield "pareto", lambda c: lines(c, "Quality against KV bytes", [*points, best], "KV MiB", "quality")


def pareto(entries: list[dict[str, Any]]) -> list[tuple[float, float]]:
    """(bytes, quality) of the entries that no other beats with fewer or as many bytes, by bytes. Higher quality is better."""
    best, front = float("-inf"), []
    for entry in sorted(entries, key=lambda e: (e["kv_bytes"], -e["quality"])):
        if entry["quality"] > best:
            best = entry["quality"]
            front.append((entry["kv_bytes"], best))
    return front


def write(made: dict[str, Any], html: Path | None, png: Path | None) -> None:
    """Writes the page and the PNG files; UserError when that is not possible, and then no partial page is left."""
    drawn = list(charts(made))
    try:
        if html:
            partial = html.with_name(f".{html.name}.partial")
            partial.write_text(page(made, drawn), encoding="utf-8")
            partial.replace(html)
        if png:
            pictures = []
            for stem, draw in drawn:
                canvas = PngCanvas(WIDTH, HEIGHT)
                draw(canvas)
                pictures.append((stem, canvas))
            png.mkdir(parents=True, exist_ok=True)
            for stem, canvas in pictures:
                canvas.save(png / f"{stem}.png")
    except OSError as error:
        raise UserError(f"The charts cannot be written: {error}.") from None


def page(made: dict[str, Any], drawn: list[tuple[str, Callable[[Canvas], None]]]) -> str:
    model = made["model"]
    parts = [f"<h1>{markup.escape(model['name'])}</h1>", f"<p>Planned for {model['asked_context']} tokens, {markup.escape(model['weights'])} weights. All figures are modelled.</p>"]
    for stem, draw in drawn:
        canvas = SvgCanvas(WIDTH, HEIGHT)
        draw(canvas)
        parts.append(f'<figure id="{markup.escape(stem)}">{canvas}</figure>')
    for device in made["devices"]:
        parts.append(_device(device))
    head = f'<meta charset="utf-8"><title>{markup.escape(model["name"])}</title><style>{STYLE}</style>'
    return f"<!doctype html><html><head>{head}</head><body>" + "\n".join(parts) + "</body></html>\n"


def _device(device: dict[str, Any]) -> str:
    memory = device["memory"]
    rows = [("owner", "size", "how known")] + [(l["owner"], format_bytes(l["bytes"]), l["basis"]) for l in memory["lines"]]
    rows.append(("all", format_bytes(memory["needed"]), f"usable {format_bytes(memory['usable'])}" if memory["usable"] is not None else "memory of the device unknown"))
    steps = [("cached tokens", "tokens/s", "on chip", "DRAM", "limit")]
    steps += [(str(r["depth"]), f"{r['tokens_per_second']:.1f}", format_bytes(round(r["on_chip_bytes"])), format_bytes(round(r["dram_bytes"])), r["limit"]) for r in device["speed"]]
    text = [f"<h2>{markup.escape(device['device']['title'])}</h2>", f"<p>{markup.escape(device['cache']['words'])}</p>", _table(rows), _table(steps)]
    text.append(f"<p>Prediction: {markup.escape(device['basis'])}. {markup.escape(device['residency'])}</p>")
    if "fit" in device:
        text.append(f"<p><code>{markup.escape(device['fit']['command'])}</code></p>")
    return "\n".join(text)


def _table(rows: list[tuple[str, ...]]) -> str:
    cells = lambda row, tag: "".join(f"<{tag}>{markup.escape(cell)}</{tag}>" for cell in row)  # noqa: E731
    return "<table>" + "".join(f"<tr>{cells(row, 'td' if index else 'th')}</tr>" for index, row in enumerate(rows)) + "</table>"


def _stem(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-." else "-" for c in name).lower()
