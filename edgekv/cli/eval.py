"""`edgekv eval`: what a bundle's cache costs in quality, several bundles side by side."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from edgekv.cli import _common
from edgekv.errors import UserError

MOST_TOKENS = 1 << 24


def _lengths(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[int, ...]:
    try:
        lengths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        lengths = []
    if not lengths or not 64 <= lengths[0] <= lengths[-1] <= MOST_TOKENS:
        raise UserError(f"--lengths takes prompt lengths in tokens separated by commas, at least 64, like 1024,2048, not {text!r}.")
    return tuple(lengths)


@click.command("eval", short_help="Measure perplexity, agreement and retrieval of bundles, side by side.")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--text", "text_file", type=click.Path(path_type=Path), help="A UTF-8 text of your own; default: six chapters of a novel.")
@click.option("--tokens", type=click.IntRange(0, MOST_TOKENS), default=4096, show_default=True,
              help="Most tokens of the text for perplexity and agreement; 0 leaves them out.")  # fmt: skip
@click.option("--reference", type=click.Path(path_type=Path), help="Bundle that the others are compared with; default: the first that keeps every token as it is.")
@click.option("--tasks", default="passkey", show_default=True,
              help="Retrieval tasks, separated by commas: passkey, multi-key, multi-value, variable-tracking; all; none.")  # fmt: skip
@click.option("--lengths", default="1024,2048", show_default=True, callback=_lengths, help="Prompt lengths of the retrieval tasks, in tokens.")
@click.option("--depths", type=click.IntRange(1, 100), default=5, show_default=True, help="Depths at which facts are hidden, from start to end.")
@click.option("--trials", type=click.IntRange(1, 1000), default=1, show_default=True, help="Prompts per length and depth.")
@click.option("--retrieve", help="Compressed tokens that a row attends to, instead of what the bundles say: 96, 7.5% or all (selfindex).")
@click.option("--rerank", type=click.IntRange(1, 64), help="Candidates per retrieved token that are ranked again by their stored keys.")
@click.option("--seed", type=click.IntRange(0, (1 << 31) - 1), default=0, show_default=True,
              help="Of the first trial's fact and haystack; each further trial takes the next seed.")  # fmt: skip
@_common.threads_option
@_common.verify_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--html", type=click.Path(path_type=Path), help="Write a page with tables and heat maps to this file.")
@click.option("--png", type=click.Path(path_type=Path), help="Write the charts to this folder (needs edgekv[charts]).")
def command(
    bundles: tuple[Path, ...], text_file: Path | None, reference: Path | None, tasks: str, verify: bool, as_json: bool,
    html: Path | None, png: Path | None, retrieve: str | None, rerank: int | None, **options: Any,
) -> None:  # fmt: skip
    """Measure what the caches of BUNDLES cost: perplexity of a text, agreement with the full cache, facts found in long prompts.

    All bundles read the same text and the same prompts. They should hold the same weights; `edgekv export BUNDLE` gives a bundle
    another cache in seconds.
    """
    from edgekv import bundle as loader
    from edgekv.quality import evaluate, page, tables, text
    from edgekv.quality.tasks import TASKS
    from edgekv.retrieval import parse_retrieval

    amount = parse_retrieval(retrieve) if retrieve is not None else None
    names = {"all": tuple(TASKS), "none": ()}.get(tasks)
    chosen = evaluate.check_tasks([t.strip() for t in tasks.split(",")]) if names is None else names
    if not chosen and not options["tokens"]:
        raise UserError("--tokens 0 and --tasks none leave nothing to measure; drop one of them.")
    page.check_targets(html, png)
    prose = text.check(text.shipped() if text_file is None else text.Text(text_file.name, _common.read_text(text_file)))
    opened = [loader.open_bundle(path, verify) for path in bundles]
    index = None
    if reference is not None:
        same = [i for i, path in enumerate(bundles) if path.resolve() == reference.resolve()]
        if not same:
            opened.append(loader.open_bundle(reference, verify))
        index = same[0] if same else len(opened) - 1
    if (amount is not None or rerank is not None) and not any(b.compressed for b in opened):
        raise UserError("--retrieve and --rerank are for caches with an index, and none of these bundles has one; export with --cache selfindex.")
    quiet = as_json or not sys.stderr.isatty()
    try:
        made = evaluate.evaluate(opened, index, prose, evaluate.Options(tasks=chosen, retrieve=amount, rerank=rerank, **options), _silent if quiet else _progress)
    finally:
        if not quiet:
            _progress("")
    page.write(made, html, png)
    if as_json:
        click.echo(json.dumps(made))
    else:
        _show(made, tables)


def _show(made: dict[str, Any], tables: Any) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 140)
    console.print(tables.heading(made), "")
    for title, (header, *rows) in tables.all_tables(made):
        table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for i, name in enumerate(header):
            table.add_column(name, justify="right" if i else "left", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table, "")
    for bundle in made["bundles"]:
        if bundle["lengths_left_out"]:
            console.print(f"{bundle['name']} cannot hold prompts of {', '.join(map(str, bundle['lengths_left_out']))} tokens; they were left out.")


def _silent(line: str) -> None:
    pass


def _progress(line: str) -> None:
    sys.stderr.write(f"\r\033[K{line}")
    sys.stderr.flush()
