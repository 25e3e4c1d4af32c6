"""How `edgekv run --traffic` shows the account of a MeteredEngine: summary lines, a live view, JSON, and a timeline."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

from edgekv.budget import format_bytes
from edgekv.errors import UserError
from edgekv.memory.meter import OWNERS, MeteredEngine


def _size(count: float) -> str:
    return format_bytes(round(count))


def lines(meter: MeteredEngine) -> list[str]:
    """The summary for a person: bytes per token by owner, on chip and DRAM, measured beside modelled."""
    text = [f"traffic   on {meter.profile.name}; KV bytes counted by the kernels, the rest modelled"]
    for kind in ("prefill", "decode"):
        total = meter.totals(kind)
        if not total["rows"]:
            continue
        per = total["rows"]
        parts = ", ".join(f"{owner.replace('_', ' ')} {_size(size / per)}" for owner, size in total["bytes"].items())
        rate = total["dram"] / total["seconds"] / 1e9 if total["seconds"] else 0.0
        text.append(f"  {kind:<8}per token {parts}; on chip {_size(total['on_chip'] / per)}, DRAM {_size(total['dram'] / per)}, {rate:.1f} GB/s (modelled)")
    moved = meter.totals("compaction")["bytes"].get("compaction", 0)
    if moved:
        text.append(f"  compaction moved {_size(moved)} in all")
    text.append("  " + meter.sentence()[:1].upper() + meter.sentence()[1:])
    for m in meter.measured:
        if m.reading.dram_bytes is not None:
            text.append(f"  measured by {m.reading.counter}: {_size(m.reading.dram_bytes)} of DRAM traffic against {_size(m.modelled)} modelled, ratio {m.ratio:.2f}; it covers {m.reading.covers}")
    if meter.joules_per_token() is not None:
        text.append(f"  {meter.joules_per_token():.3g} J per token (measured)")
    if not any(m.reading.dram_bytes is not None for m in meter.measured):
        text.append("  no DRAM counter works here: " + " ".join(meter.unavailable.values()))
    clocks = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in meter.conditions["before"].items())
    return text + ([f"  {clocks}"] if clocks else [])


class Live:
    """Bytes per second by owner on standard error while text is generated; a line per second when that is no terminal."""

    INTERVAL = 0.5

    def __init__(self, meter: MeteredEngine):
        self.meter, self._seen, self._end = meter, 0, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Live:
        from rich.console import Console
        from rich.live import Live as RichLive

        console = Console(stderr=True, highlight=False)
        # text for the terminal is printed above the view; text for a file or pipe must still go there
        redirect = sys.stdout.isatty()
        view = RichLive(console=console, refresh_per_second=4, transient=True, redirect_stdout=redirect, redirect_stderr=True)
        self._view = view if console.is_terminal else None
        if self._view:
            self._view.start()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._end.set()
        self._thread.join()
        if self._view:
            self._view.stop()
        else:
            self._show()  # the steps since the last line; of a short run, all of them

    def _run(self) -> None:
        while not self._end.wait(self.INTERVAL if self._view else 1.0):
            self._show()

    def _show(self) -> None:
        steps = self.meter.steps[self._seen :]
        self._seen += len(steps)
        seconds = sum(s.seconds for s in steps)
        if not steps or not seconds:
            return
        rates = {owner: sum(s.bytes.get(owner, 0) for s in steps) / seconds for owner in OWNERS}
        on_chip, total = sum(s.on_chip for s in steps) / seconds, sum(rates.values())
        rows = sum(s.rows for s in steps) / seconds
        if self._view:
            self._view.update(self._table(rates, rows, on_chip, total))
        else:
            print(f"traffic {rows:.1f} rows/s, DRAM {(total - on_chip) / 1e9:.2f} GB/s, on chip {on_chip / 1e9:.2f} GB/s (modelled)", file=sys.stderr, flush=True)

    @staticmethod
    def _table(rates: dict[str, float], rows: float, on_chip: float, total: float) -> Any:
        from rich.table import Table

        table = Table(box=None, pad_edge=False, title=f"{rows:.1f} rows/s; DRAM {(total - on_chip) / 1e9:.2f} GB/s, on chip {on_chip / 1e9:.2f} GB/s (modelled)")
        top = max(rates.values()) or 1.0
        for owner, rate in rates.items():
            if rate:
                table.add_row(owner.replace("_", " "), f"{rate / 1e9:8.3f} GB/s", "█" * max(1, round(40 * rate / top)))
        return table


def write_json(meter: MeteredEngine, path: Path) -> None:
    _write(path, json.dumps(meter.to_json()))


def write_html(meter: MeteredEngine, path: Path) -> None:
    """A timeline: DRAM and on-chip GB/s of every step, measured samples beside them, and bytes by owner per kind of step."""
    from edgekv.memory.charts.canvas import SvgCanvas
    from edgekv.memory.charts.page import HEIGHT, STYLE, WIDTH
    from edgekv.memory.charts.plots import Series, lines as plot_lines, stacked_bars

    steps = [s for s in meter.steps if s.seconds > 0]
    series = [
        Series("DRAM, modelled", [(s.began, s.dram / s.seconds / 1e9) for s in steps]),
        Series("on chip, modelled", [(s.began, s.on_chip / s.seconds / 1e9) for s in steps]),
    ]
    series += [Series(f"DRAM, {m.reading.counter}", list(m.reading.samples), "dashed") for m in meter.measured if m.reading.samples]
    timeline = SvgCanvas(WIDTH, HEIGHT)
    plot_lines(timeline, "Traffic over the run", series, "seconds", "GB/s")
    totals = {kind: meter.totals(kind) for kind in ("prefill", "decode")}
    bars = SvgCanvas(WIDTH, HEIGHT)
    per_row = [(kind, {o.replace("_", " "): size / t["rows"] / 2**20 for o, size in t["bytes"].items()}) for kind, t in totals.items() if t["rows"]]
    stacked_bars(bars, "Bytes per token by owner", per_row, "MiB")
    body = "".join(f"<p>{_escape(line.strip())}</p>" for line in lines(meter))
    _write(path, f'<!doctype html><html><head><meta charset="utf-8"><title>Traffic</title><style>{STYLE}</style></head><body>{timeline}{bars}{body}</body></html>\n')


def _escape(text: str) -> str:
    import html

    return html.escape(text)


def _write(path: Path, text: str) -> None:
    try:
        partial = path.with_name(f".{path.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}.") from None
