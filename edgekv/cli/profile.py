"""`edgekv profile`: before anything is built, what fits on a device, how fast it will be, and why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from edgekv.cli import export
from edgekv.errors import UserError

CACHE_OPTIONS = ("keep", "kv_budget", "format", "key_bits", "value_bits", "retrieve", "rerank", "sinks", "window", "score", "observe", "score_normalise", "score_decay", "positions", "kv_type", "boundary", "chunk", "weights")


@click.command("profile", short_help="Tell what fits on a device, how fast it will be, and why.")
@click.argument("model")
@click.option("--device", "-d", "devices", multiple=True, help="Device or device:powermode of `edgekv devices`, or a profile file; several times to compare. Default: this machine.")
@click.option("--context", type=click.IntRange(2), help="Tokens to plan for; default the model's own context, at most 32768 and what fits.")
@click.option("--memory", help="Memory of a board that is sold with several sizes, e.g. 8GiB.")
@click.option("--fit", multiple=True, help="Find the best policy for context=32k, speed=20 (tokens/s), memory=4GiB; commas or several times.")
@click.option("--quality", type=click.Path(path_type=Path), help='Results to chart against bytes: JSON list of {"name", "kv_bytes", "quality"}.')
@click.option("--html", type=click.Path(path_type=Path), help="Write tables and charts to this HTML file.")
@click.option("--png", type=click.Path(path_type=Path), help="Write the charts as PNG files into this folder (needs `edgekv[charts]`).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str, devices: tuple[str, ...], context: int | None, memory: str | None, fit: tuple[str, ...], quality: Path | None,
    html: Path | None, png: Path | None, as_json: bool, keep: str, kv_budget: str | None, weights: str, chunk: int | None, **cache: Any,
) -> None:  # fmt: skip
    """Plan MODEL (a bundle, a Hugging Face folder or a config.json; no weights are needed) on one or several devices.

    Shows memory by owner, the longest context per policy, predicted speed, and what limits it. All figures are modelled.
    """
    from edgekv.budget import parse_budget
    from edgekv.memory import report
    from edgekv.memory.fit import parse_constraints
    from edgekv.memory.model import load_shape
    from edgekv.memory.weights import weight_format
    from edgekv.policy import CachePolicy

    shape = load_shape(model)
    wanted = parse_constraints(fit)
    size = parse_budget(memory).bytes if memory else None
    if memory and not size:
        raise UserError("--memory must be in bytes, for example 8GiB.")
    profiles = [_profile(name, size) for name in devices] or [_this_machine()]
    if shape.bundle:
        weights = str(shape.bundle.manifest.get("weights", {}).get("format", weights))
    policy = CachePolicy(keep=keep, element=cache.pop("kv_type"), **cache)
    budget = parse_budget(kv_budget) if kv_budget else None
    if budget is None and keep != "full":
        raise UserError(f"--keep {keep} needs --kv-budget, for example --kv-budget 2MiB, 1024tok or 25%.")
    length = context or wanted.context or (shape.context if shape.bundle else min(shape.context, 32768))
    if length > shape.context and policy.positions != "cache":
        raise UserError(f"--context {length} is beyond the {shape.context} tokens that {shape.name} was trained for; ask for at most that.")
    question = report.Question(shape, weight_format(weights), policy, budget, length, chunk)
    if not (context or wanted.context or budget or shape.bundle):
        question = report.shortened(question, profiles)
    made = {"model": _model(shape, question), "devices": [], "quality": _quality(quality)}
    chosen = [_fit(shape, profile, question, wanted, model) for profile in profiles] if fit else []
    for profile, found in zip(profiles, chosen or [None] * len(profiles), strict=True):
        asked = question if found is None else found[0]
        entry = report.device_report(asked, profile) | {"bars": report.policy_bars(asked, profile)}
        made["devices"].append(entry | ({"fit": found[1]} if found else {}))
    if html or png:
        from edgekv.memory.charts import page

        page.write(made, html, png)
    if as_json:
        click.echo(json.dumps(made))
    else:
        from edgekv.memory.tables import show

        show(made)


command.params.extend(option for option in export.command.params if option.name in CACHE_OPTIONS)


def _profile(name: str, memory: int | None):
    from edgekv.memory import profiles

    return profiles.load(name, memory)


def _this_machine():
    from edgekv.memory import detect, profiles

    return profiles.Profile(detect.detect(calibrate=False))


def _model(shape, question) -> dict[str, Any]:
    return {
        "name": shape.name,
        "architecture": shape.architecture,
        "parameters": shape.parameters,
        "layers": len(shape.layers),
        "context": shape.context,
        "asked_context": question.context,
        "weights": question.weights.name,
        "kv_bytes_per_token_fp16": shape.kv_bytes_per_token(),
        "notes": list(shape.notes),
    }


def _fit(shape, profile, question, wanted, model: str):
    import dataclasses

    from edgekv.memory.fit import fit

    if shape.bundle:
        raise UserError("--fit chooses a cache for an export; give the model itself (a folder or config.json), not a bundle.")
    choice = fit(shape, profile, question.policy, question.weights, dataclasses.replace(wanted, context=question.context))
    asked = dataclasses.replace(question, weights=choice.weights, policy=choice.plan.policy, budget=choice.budget)
    return asked, {"command": choice.command(model, shape), "tokens_per_second": choice.decode.tokens_per_second, "needed": choice.memory.needed}


def _quality(path: Path | None) -> list[dict[str, Any]]:
    if path is None:
        return []
    from edgekv.cli._common import read_text

    try:
        data = json.loads(read_text(path))
    except (ValueError, RecursionError):
        raise UserError(f"{path} is not valid JSON.") from None
    good = isinstance(data, list) and all(
        isinstance(e, dict) and isinstance(e.get("name"), str)
        and all(isinstance(e.get(k), (int, float)) and not isinstance(e[k], bool) and abs(e[k]) < 1e18 for k in ("kv_bytes", "quality")) for e in data
    )  # fmt: skip
    if not good:
        raise UserError(f'{path} must be a JSON list of objects with "name" (text), "kv_bytes" and "quality" (numbers).')
    return data
