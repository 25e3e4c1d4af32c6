"""`edgekv verify`: checks on this machine that every engine computes what the reference says, before anybody relies on it."""

from __future__ import annotations

import json
from pathlib import Path

import click

from edgekv.cli import _common


@click.command()
@_common.bundle_argument
@click.option("--engine-folder", type=click.Path(path_type=Path), help="Folder of the TensorRT engine; default: BUNDLE.engine beside the bundle.")
@click.option("--tokens", type=click.IntRange(8, 2048), default=256, show_default=True, help="Length of the text that is compared.")
@click.option("--threshold", type=click.FloatRange(0, min_open=True), default=0.1, show_default=True, help="Largest mean KL divergence (nats) between engines.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@_common.verify_option
def command(bundle: Path, engine_folder: Path | None, tokens: int, threshold: float, as_json: bool, verify: bool) -> None:
    """Compare what runs BUNDLE here: kernels and engines on the CPU and the GPU.

    Each kernel is compared with the NumPy reference on the bundle's own layers, and each engine's logits with those of ONNX Runtime on
    the CPU, token by token (needs polygraphy, of edgekv[tensorrt]). What cannot be checked, without a GPU for instance, is named. Exit
    code 1 when something differs.
    """
    from edgekv import bundle as bundles
    from edgekv.verification import checks

    opened = bundles.open_bundle(bundle, verify)
    results = checks.run_all(opened, engine_folder, tokens, threshold, report=None if as_json else show)
    if as_json:
        click.echo(json.dumps([r._asdict() for r in results]))
    if any(r.passed is False for r in results):
        raise SystemExit(1)


def show(result) -> None:
    mark = {True: "ok", False: "WRONG", None: "not checked"}[result.passed]
    click.echo(f"{mark:12} {result.what}: {result.detail}")
