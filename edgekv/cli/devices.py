"""`edgekv devices`: the device profiles, one of them in full, and a profile of the machine this runs on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edgekv.errors import UserError


@click.group("devices", invoke_without_command=True, short_help="List, show and detect device profiles.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(ctx: click.Context, as_json: bool) -> None:
    """List the devices that edgekv knows, with their memory system."""
    if ctx.invoked_subcommand:
        return
    from edgekv.memory import profiles

    known = profiles.known()
    if as_json:
        click.echo(json.dumps([dict(profile.data) for profile in known.values()]))
        return
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name, justify in (("name", "left"), ("device", "left"), ("memory", "right"), ("GB/s", "right"), ("on chip", "right"), ("modes", "left")):
        table.add_column(name, justify=justify, overflow="fold")
    for name, profile in known.items():
        total, cache = profile.value("memory.total"), profile.last_level_bytes
        modes = ", ".join(mode["name"] for mode in profile.data["power_modes"])
        table.add_row(
            name, profile.data["title"], f"{total:g} MiB" if total else "varies", f"{profile.peak_gbps:g}" if profile.peak_gbps else "?",
            f"{cache / 2**20:g} MiB {'L2' if profile.data['decode_on'] == 'gpu' else 'cache'}" if cache else "?", modes,
        )  # fmt: skip
    _console().print(table)


@command.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def show(name: str, as_json: bool) -> None:
    """Show the profile NAME (a device, device:powermode, or a file), every figure with its source and confidence."""
    from edgekv.memory import profiles

    profile = profiles.load(name)
    if as_json:
        click.echo(json.dumps(dict(profile.data)))
        return
    from rich.table import Table

    console = _console()
    console.print(f"{profile.title} ({profile.data['name']})")
    table = Table(box=None, pad_edge=False)
    for column in ("figure", "value", "confidence", "source"):
        table.add_column(column, overflow="fold", justify="right" if column == "value" else "left")
    for path, figure in _figures(profile.data):
        value = "unknown" if figure["value"] is None else f"{figure['value']:g} {figure['unit']}".removesuffix(" count")
        table.add_row(path, value, figure["confidence"], figure["source"])
    console.print(table)
    if profile.mode:
        console.print(f"In power mode {profile.mode}: {profile.peak_gbps:.1f} GB/s" + (f", {profile.tflops():.1f} TFLOP/s" if profile.tflops() else ""))
    releases = set(profile.data["software"]["jetpack"])
    rows = [r for r in profiles.jetpack_table() if r["jetpack"] in releases]
    if rows:
        table = Table(box=None, pad_edge=False, title="JetPack releases", title_justify="left")
        for column in ("jetpack", "l4t", "python", "cuda", "tensorrt"):
            table.add_column(column)
        for row in rows:
            table.add_row(*(str(row[c]) for c in ("jetpack", "l4t", "python", "cuda", "tensorrt")), style=None if row["supported"] else "dim")
        console.print(table)
    for note in profile.data.get("notes", ()):
        console.print(note)


@command.command()
@click.option("--output", "-o", type=click.Path(path_type=Path), help="Write the profile to this file instead of standard output.")
@click.option("--name", default="this-machine", show_default=True, help="Name of the profile.")
@click.option("--calibrate/--no-calibrate", default=True, show_default=True, help="Also time edgekv's own kernels, about 20 s, for close predictions.")
@click.option("--force", is_flag=True, help="Replace a file that is there already.")
def detect(output: Path | None, name: str, calibrate: bool, force: bool) -> None:
    """Write a profile of this machine: caches, cores, memory, measured bandwidth; on Jetson also power mode and clocks."""
    import yaml

    from edgekv.memory import detect as detection
    from edgekv.memory import profiles

    if output is not None and output.exists() and not force:
        raise UserError(f"{output} exists already; give another name or --force to replace it.")
    text = yaml.safe_dump(detection.detect(name, calibrate=calibrate), sort_keys=False, allow_unicode=True, width=160)
    profiles.parse_profile(text, output.name if output else "of this machine")
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        partial = output.with_name(f".{output.name}.partial")
        partial.write_text(text, encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        raise UserError(f"{output} cannot be written: {error.strerror}.") from None
    click.echo(f"{output}: use it with --device {output if output.is_absolute() else './' + str(output)}", err=True)


def _figures(node: Any, path: str = ""):
    if isinstance(node, dict):
        if "confidence" in node:
            yield path, node
            return
        for key, child in node.items():
            yield from _figures(child, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from _figures(child, f"{path}.{index}")


def _console():
    from rich.console import Console

    return Console(highlight=False, markup=False, width=None if Console().is_terminal else 130)
