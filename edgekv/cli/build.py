"""`edgekv build`: makes a TensorRT engine from a bundle, on the device that will run it, or says beforehand why it cannot."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli import _common
from edgekv.errors import UserError

if TYPE_CHECKING:
    from edgekv.bundle import Bundle

SPARE_DISK = 64 << 20
PRECISIONS = ("int4w", "fp16", "fp32", "int8")


def _size(ctx: click.Context, parameter: click.Parameter, text: str | None) -> int | None:
    from edgekv.budget import parse_budget

    if text is None:
        return None
    size = parse_budget(text).bytes
    if size is None:
        raise UserError(f"--{parameter.name} takes bytes, like 256MiB, not {text!r}.")
    return size


@click.command()
@_common.bundle_argument
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Folder of the engine; default: BUNDLE.engine beside the bundle.")
@click.option("--precision", type=click.Choice(PRECISIONS), help="int4w: 4-bit weights, fp16 otherwise (default for int4 bundles); fp16; fp32.")
@click.option("--rows", type=click.IntRange(1, 256), default=17, show_default=True, help="Most rows of logits per step: longest draft + 1.")
@click.option("--workspace", callback=_size, help="Most device memory for temporary data, like 256MiB.")
@click.option("--timing-cache", type=click.Path(path_type=Path), help="File that keeps measured kernel times, so that the next build is faster.")
@click.option("--level", type=click.IntRange(0, 5), help="TensorRT's builder optimisation level; higher tries more.")
@click.option("--device", "profile", help="Device profile to check the memory of, see `edgekv devices`; default: this machine.")
@click.option("--rtx", is_flag=True, help="Build with TensorRT-RTX for another GPU (--sm); no GPU is needed here.")
@click.option("--sm", type=int, help="With --rtx: compute capability to build for, such as 86.")
@click.option("--plugin", type=click.Path(path_type=Path), help="Plugin library; default: the one that tools/build_plugin.py makes.")
@click.option("--no-plugin", is_flag=True, help="Let TensorRT's own operators keep the cache (TensorRT >= 10.15; policies full and window).")
@click.option("--force", is_flag=True, help="Replace an engine, and build although the memory estimate says no.")
@click.option("--check", is_flag=True, help="Only the checks before the build.")
@_common.verify_option
def command(
    bundle: Path,
    output: Path | None,
    precision: str | None,
    rows: int,
    workspace: int | None,
    timing_cache: Path | None,
    level: int | None,
    profile: str | None,
    rtx: bool,
    sm: int | None,
    plugin: Path | None,
    no_plugin: bool,
    force: bool,
    check: bool,
    verify: bool,
) -> None:
    """Make a TensorRT engine from BUNDLE.

    Checks first that TensorRT and the plugin library offer every operator, that memory and disk suffice, and that the device is
    supported. The engine appears under its name only when it is complete.
    """
    if (sm is not None) != rtx:
        raise UserError("--rtx and --sm belong together: TensorRT-RTX builds for the compute capability you name.")
    if timing_cache is not None and not timing_cache.parent.is_dir():
        raise UserError(f"There is no folder {timing_cache.parent} for the timing cache.")
    if no_plugin and plugin is not None:
        raise UserError("--plugin and --no-plugin exclude each other; give one of them.")
    from edgekv import bundle as bundles
    from edgekv.engine import tensorrt_manifest

    opened = bundles.open_bundle(bundle, verify)
    precision = choose_precision(opened, precision)
    target = output or tensorrt_manifest.default_folder(opened)
    if target.exists() and not check and not force:
        raise UserError(f"{target} exists already; give another name or --force to replace it.")
    if target.exists() and not (target / tensorrt_manifest.DESCRIPTION).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not an engine, so it will not be replaced; give another name.")
    if no_plugin:
        from edgekv.engine.ring_cache import layer_rings

        layer_rings(opened)  # refuses what needs the plugin, before anything is prepared
    place = Place.find(rtx, sm, plugin, not no_plugin)
    with _scratch(target) as partial:
        graph_folder = partial / "graph"
        graph_folder.mkdir()
        lowered = lower(opened, graph_folder, precision, place)
        estimate = preflight(place, lowered, opened, partial, profile, force)
        click.echo(estimate, err=True)
        if check:
            click.echo("The bundle can be built here.")
            return
        started = time.monotonic()
        plan = build(place, lowered, opened, rows, workspace, timing_cache, level)
        seconds = time.monotonic() - started
        shutil.rmtree(graph_folder)
        finish(partial, target, opened, place, plan, precision, rows, seconds)
    click.echo(f"{target}: {len(plan) / 1e6:.1f} MB for {place.words} after {seconds:.0f} s")


def choose_precision(bundle: Bundle, asked: str | None) -> str:
    """What to build; UserError for what TensorRT or the bundle cannot give."""
    form = bundle.manifest.get("weights", {}).get("format")
    if asked == "int8":
        raise UserError(
            "TensorRT keeps no 8-bit weights without 8-bit activations; use --precision int4w with a bundle of int4 weights, or fp16."
        )
    if asked == "int4w" and form != "int4":
        raise UserError(f"{bundle.folder} has {form} weights; --precision int4w needs `edgekv export --weights int4`.")
    return asked or ("int4w" if form == "int4" else "fp16")


class Place:
    """What builds and for what: TensorRT's bindings, the plugin library (None: TensorRT's own operators), the device."""

    def __init__(self, trt: Any, plugin: Path | None, sm: int, device: dict[str, Any]):
        self.trt, self.plugin, self.sm, self.device = trt, plugin, sm, device
        from edgekv.engine.tensorrt import make_logger

        self.messages: list[str] = []
        self.logger = make_logger(trt, self.messages)

    @property
    def words(self) -> str:
        return f"{self.device.get('name') or 'a device'} of compute capability {self.sm / 10:.1f}"

    @classmethod
    def find(cls, rtx: bool, sm: int | None, plugin: Path | None, with_plugin: bool = True) -> Place:
        """UserError says what is missing."""
        from edgekv.engine import tensorrt_build
        from edgekv.engine.device import LIBRARY, Device
        from edgekv.engine.tensorrt import load_tensorrt

        trt = load_tensorrt("tensorrt_rtx" if rtx else "tensorrt")
        tensorrt_build.check_version(trt, with_plugin)
        if rtx and not with_plugin:
            return cls(trt, None, sm or 0, {"name": None})
        device = Device(plugin or LIBRARY)
        if rtx:
            return cls(trt, device.path, sm or 0, {"name": None})
        info = device.info()
        if not info["count"]:
            raise UserError(
                f"There is no CUDA device here ({info['reason']}); build on the device that will run the engine, or use --rtx --sm for "
                "TensorRT-RTX."
            )
        return cls(trt, device.path if with_plugin else None, info["sm"], info)


def lower(bundle: Bundle, folder: Path, precision: str, place: Place) -> Any:
    """The graph for TensorRT, with a progress line."""
    try:
        if place.plugin:
            from edgekv.export.to_tensorrt import lower as run
        else:
            from edgekv.export.to_tensorrt_plain import lower_plain as run
    except ModuleNotFoundError as error:
        raise UserError(f"Preparing the graph needs the Python package {error.name!r}: pip install 'edgekv[tensorrt]'.") from None

    show = sys.stderr.isatty()

    def progress(done: int, total: int) -> None:
        if show and (done % 16 == 0 or done == total):
            click.echo(f"\rpreparing the graph: {done} of {total} nodes" + ("\r\033[K" if done == total else ""), nl=False, err=True)

    return run(bundle, folder, half=precision != "fp32", int4=precision == "int4w", progress=progress)


def preflight(place: Place, lowered: Any, bundle: Bundle, folder: Path, profile: str | None, force: bool) -> str:
    """Everything that can be known before hours of building; UserError on the first thing that would fail. Returns a summary."""
    from edgekv import machine
    from edgekv.engine import tensorrt_build
    from edgekv.engine.ring_cache import RingCache
    from edgekv.memory import detect

    trt = place.trt
    offered = tensorrt_build.load_plugins(trt, place.plugin) if place.plugin else set()
    network = trt.Builder(place.logger).create_network(0)
    parser = trt.OnnxParser(network, place.logger)
    missing = tensorrt_build.missing_operators(trt, parser, lowered.graph, offered)
    if missing:
        both = f"TensorRT {trt.__version__} and {place.plugin} lack" if place.plugin else f"TensorRT {trt.__version__} lacks"
        raise UserError(f"{both} operators of the graph: {', '.join(missing)}.")

    peak = tensorrt_build.estimated_peak(lowered.weight_bytes)
    available, where = machine.available_memory(), "this machine"
    if profile:
        from edgekv.memory import profiles

        known = profiles.load(profile)
        if known.total_bytes is None:
            raise UserError(f"The profile {profile} does not know the device's memory; leave out --device to check this machine.")
        available, where = known.total_bytes - (known.idle_bytes or 0), profile
    cache = bundle.arena_bytes if place.plugin else RingCache.needed_bytes(bundle, "float16")
    resident = lowered.weight_bytes + cache
    versions = [f"TensorRT {trt.__version__}", place.words]
    if place.device.get("driver"):
        versions.append("CUDA driver {}.{}".format(place.device["driver"] // 1000, place.device["driver"] % 1000 // 10))
    if release := detect.l4t():
        versions.append(f"L4T {release}")
    summary = (
        f"{', '.join(versions)}; weights {lowered.weight_bytes / 1e6:.0f} MB ({lowered.int4_matrices} matrices in 4 bits), KV cache {cache / 1e6:.0f} MB; "
        f"building takes about {peak / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available on {where}"
    )
    if peak > available and not force:
        raise UserError(
            f"Building needs about {peak / 1e9:.1f} GB of memory and {available / 1e9:.1f} GB are available on {where}: close other "
            "programs, add swap, export smaller --weights, or try anyway with --force."
        )
    if resident > available and not force:
        raise UserError(f"Weights and KV cache need {resident / 1e9:.1f} GB and {available / 1e9:.1f} GB are available on {where}.")
    free = shutil.disk_usage(folder).free
    needed = 2 * lowered.weight_bytes + SPARE_DISK
    if free < needed:
        raise UserError(f"The engine needs about {needed / 1e6:.0f} MB of disk and {free / 1e6:.0f} MB are free at {folder.parent}.")
    return summary


def build(place: Place, lowered: Any, bundle: Bundle, rows: int, workspace: int | None, timing_cache: Path | None, level: int | None) -> bytes:
    """The plan, with a progress line."""
    from edgekv.engine import tensorrt_build

    wanted = tensorrt_build.profiles(min(bundle.chunk, bundle.boundary), rows)
    show = sys.stderr.isatty()
    if show:
        click.echo("building; this takes minutes on a Jetson", err=True)

    def progress(done: str) -> None:
        if show:
            click.echo(f"\r\033[K{done}", nl=False, err=True)

    plan = tensorrt_build.build(
        place.trt, lowered.graph, place.plugin, wanted, messages=place.messages, logger=place.logger, workspace=workspace,
        timing_cache=timing_cache, sm=place.sm, level=level, masks=() if place.plugin else lowered.masks,
        progress=progress,
    )  # fmt: skip
    if show:
        click.echo("\r\033[K", nl=False, err=True)
    return plan


def finish(partial: Path, target: Path, bundle: Bundle, place: Place, plan: bytes, precision: str, rows: int, seconds: float) -> None:
    """Writes the plan and its description, reads both back, and only then gives them their name."""
    from edgekv import __version__
    from edgekv.bundle import sha256_file
    from edgekv.engine import tensorrt_build, tensorrt_manifest
    from edgekv.memory import detect

    with open(partial / tensorrt_manifest.PLAN, "wb") as file:
        file.write(plan)
        file.flush()
        os.fsync(file.fileno())
    profiles = tensorrt_build.profiles(min(bundle.chunk, bundle.boundary), rows)
    tensorrt_manifest.write(
        partial,
        {
            "created_by": f"edgekv {__version__}",
            "bundle": tensorrt_manifest.bundle_id(bundle),
            "lowering": tensorrt_manifest.PLUGIN if place.plugin else tensorrt_manifest.STANDARD,
            "precision": precision,
            "library": place.trt.__name__,
            "tensorrt": place.trt.__version__,
            "sm": place.sm,
            "device": place.device.get("name"),
            "cuda": {"driver": place.device.get("driver"), "runtime": place.device.get("runtime")},
            "plugin": sha256_file(place.plugin) if place.plugin else None,
            "power_mode": detect.power_mode(),
            "profiles": [{"name": p.name, "tokens": p.tokens, "rows": p.rows} for p in profiles],
            "build_seconds": round(seconds, 1),
        },
    )
    tensorrt_manifest.read(partial)
    os.chmod(partial, 0o755)
    old = partial.with_name(partial.name + ".old")
    if target.exists():
        os.rename(target, old)
    os.rename(partial, target)
    shutil.rmtree(old, ignore_errors=True)


@contextlib.contextmanager
def _scratch(target: Path) -> Iterator[Path]:
    """A folder beside the target that is gone afterwards unless it was renamed; what killed builds left is removed."""
    from edgekv.bundle import remove_orphans

    prefix = f".{target.name}.partial-"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(target.parent, prefix)
        partial = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}.") from None
    try:
        yield partial
    except OSError as error:
        raise UserError(f"{target} could not be written: {error.strerror or error}; nothing was left behind.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
