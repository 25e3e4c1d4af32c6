"""`edgekv bench`: prefill and decode speed of a bundle at several depths, with what a reader needs to judge the figures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from edgekv.cli import _common
from edgekv.errors import UserError

BUSY = 0.5  # runnable tasks before the start beyond which figures are not worth much


def _depths(ctx: click.Context, parameter: click.Parameter, text: str) -> list[int]:
    try:
        depths = sorted({int(part) for part in text.split(",")})
    except ValueError:
        depths = []
    if not depths or not 1 <= depths[0] <= depths[-1] <= 1 << 24:
        raise UserError(f"--depths takes numbers of tokens separated by commas, like 64,1024, not {text!r}.")
    return depths


@click.command()
@_common.bundle_argument
@click.option("--depths", default="64,512,1024,2048,4096", show_default=True, callback=_depths, help="Tokens before the measurement.")
@click.option("--tokens", type=click.IntRange(1, 1 << 20), default=64, show_default=True, help="Tokens decoded at each depth.")
@click.option("--repeats", type=click.IntRange(1, 1000), default=3, show_default=True, help="Runs per depth; medians are shown.")
@_common.threads_option
@_common.engine_option
@_common.verify_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, depths: list[int], tokens: int, repeats: int, threads: int | None, kind: str, verify: bool, as_json: bool) -> None:
    """Measure the speed of BUNDLE at several depths of text."""
    from edgekv import bundle as bundles
    from edgekv import engine, machine
    from edgekv.generation.measure import measure
    from edgekv.generation.report import mebibytes
    from edgekv.generation.session import Session

    opened = bundles.open_bundle(bundle, verify)
    load_before = machine.load()
    loaded = engine.load(opened, threads, kind=kind)
    try:
        facts = machine.describe(loaded.threads)
        fitting = [d for d in depths if loaded.capacity is None or d + tokens <= loaded.capacity]
        left_out = [d for d in depths if d not in fitting]
        if not fitting:
            raise UserError(f"No depth fits: this bundle ends at {loaded.capacity} tokens; choose --depths and --tokens below that.")
        quiet = as_json or not sys.stderr.isatty()
        results = []
        if not as_json:
            click.echo(f"{facts['cpu']}, {facts['threads']} threads, load {load_before:.2f} at the start")
            click.echo(f"{opened.model['name']}, weights {opened.manifest.get('weights', {}).get('format', '?')}, "
                       f"KV arena {mebibytes(opened.arena_bytes)}\n")  # fmt: skip
            click.echo("  depth   prefill tok/s   decode tok/s    kept tokens   KV used")
        for depth in measure(Session(loaded), fitting, tokens, repeats, _silent if quiet else _progress):
            results.append(depth)
            if not as_json:
                wipe = "" if quiet else "\r\033[K"
                click.echo(
                    f"{wipe}{depth.depth:7d} {depth.prefill_tokens_per_second:10.1f} ±{depth.prefill_spread / 2:4.0%}"
                    f" {depth.decode_tokens_per_second:9.1f} ±{depth.decode_spread / 2:4.0%} {depth.kept:12d}   {mebibytes(depth.kv_bytes_used)}"
                )
        load_after = machine.load()
    finally:
        loaded.close()
    if as_json:
        shown = {
            "bundle": str(bundle), "model": opened.model["name"], "weights": opened.manifest.get("weights", {}),
            "policy": opened.manifest["policy"], "kv_bytes_allocated": opened.arena_bytes, "machine": facts,
            "load_before": round(load_before, 2), "load_after": round(load_after, 2), "repeats": repeats,
            "depths": [depth.to_json() for depth in results], "depths_left_out": left_out, "peak_rss_bytes": machine.peak_rss(),
        }  # fmt: skip
        click.echo(json.dumps(shown))
        return
    click.echo(f"\nmedians of {repeats} runs, ± half the spread; {tokens} tokens decoded per run; peak memory {mebibytes(machine.peak_rss())}")
    if left_out:
        click.echo(f"left out because the cache ends at {loaded.capacity} tokens: {', '.join(map(str, left_out))}")
    if load_before > BUSY:
        click.echo(f"the machine was busy (load {load_before:.2f}) when this started: measure again on a quiet one", err=True)


def _silent(text: str) -> None:
    pass


def _progress(text: str) -> None:
    sys.stderr.write(f"\r\033[K{text}")
    sys.stderr.flush()
