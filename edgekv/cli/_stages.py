"""Progress of long work that goes through stages: a line each, with a bar, the time taken and the time left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Report = Callable[[str, "int | None", "int | None"], None]  # stage, done, total


@contextmanager
def stages(console: Any) -> Iterator[Report]:
    """A report that draws on `console` (rich). What follows a comma in the name of a stage may change without beginning another one."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console) as progress:
        task, current = progress.add_task("starting", total=None), "starting"

        def report(stage: str, done: int | None, total: int | None) -> None:
            nonlocal task, current
            if stage.split(",")[0] != current:
                progress.stop_task(task)
                task, current = progress.add_task(stage, total=total), stage.split(",")[0]
            progress.update(task, description=stage, completed=done or 0, total=total)

        yield report
