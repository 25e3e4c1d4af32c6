"""The options of `edgekv run` that account for every byte, and what starts and ends the account."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import click

from edgekv.errors import UserError


def options(command: Callable) -> Callable:
    """Adds --traffic, --traffic-json, --traffic-html and --device."""
    for option in (
        click.option("--device", help="Device or profile file whose on-chip memory --traffic models; default: this machine."),
        click.option("--traffic-html", type=click.Path(path_type=Path), help="Write a timeline of the traffic to this HTML file."),
        click.option("--traffic-json", type=click.Path(path_type=Path), help="Write every step's traffic to this JSON file."),
        click.option(
            "--traffic", type=click.Choice(["summary", "live"]), is_flag=False, flag_value="summary",
            help="Tell which bytes came from on-chip memory and which from DRAM; --traffic=live shows it while it runs.",
        ),
    ):  # fmt: skip
        command = option(command)
    return command


class Traffic:
    """From the options to a metered engine and its results; does nothing when no traffic option was given."""

    def __init__(self, traffic: str | None, traffic_json: Path | None, traffic_html: Path | None, device: str | None):
        self.wanted = bool(traffic or traffic_json or traffic_html)
        self.live, self.json, self.html, self.device = traffic == "live", traffic_json, traffic_html, device
        self.summary = traffic is not None
        self.meter: Any = None
        self._stack = ExitStack()
        if device and not self.wanted:
            raise UserError("--device belongs to --traffic; add it.")

    def engine(self, loaded: Any) -> Any:
        """The engine to generate with: the loaded one, or one that counts."""
        if not self.wanted:
            return loaded
        from edgekv.memory import detect, profiles
        from edgekv.memory.meter import MeteredEngine
        from edgekv.memory.traffic_view import Live

        profile = profiles.load(self.device) if self.device else profiles.Profile(detect.detect(measure=False, calibrate=False))
        self.meter = MeteredEngine(loaded, profile)
        self._stack.callback(self.meter.finish)
        if self.live:
            self._stack.enter_context(Live(self.meter))
        return self.meter

    def finish(self) -> None:
        """Ends counting and writes the files that were asked for."""
        self._stack.close()
        if self.meter is not None:
            from edgekv.memory import traffic_view

            if self.json:
                traffic_view.write_json(self.meter, self.json)
            if self.html:
                traffic_view.write_html(self.meter, self.html)

    def close(self) -> None:
        """Ends counting, also after an error."""
        self._stack.close()

    def lines(self) -> list[str]:
        from edgekv.memory import traffic_view

        return traffic_view.lines(self.meter) if self.summary and self.meter is not None else []

    def to_json(self) -> dict[str, Any] | None:
        return self.meter.to_json(steps=False) if self.meter is not None else None
