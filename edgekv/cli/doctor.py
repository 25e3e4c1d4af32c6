"""`edgekv doctor`: what this machine can do with bundles, and for everything it cannot, why and what would help."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import click

from edgekv.errors import EdgekvError


class Finding(NamedTuple):
    """works is None for facts that are neither good nor bad."""

    topic: str
    works: bool | None
    detail: str


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Say what this machine can do: engines, GPU, counters, permissions, memory. Exit code 1 when it cannot run any bundle."""
    findings = examine()
    if as_json:
        click.echo(json.dumps([f._asdict() for f in findings]))
    else:
        width = max(len(f.topic) for f in findings)
        for finding in findings:
            mark = {True: "yes", False: "no ", None: "   "}[finding.works]
            click.echo(f"{mark} {finding.topic:{width}}  {finding.detail}")
    if not all(f.works for f in findings if f.topic in ("native library", "ONNX Runtime")):
        raise SystemExit(1)


def examine() -> list[Finding]:
    """All findings; a check that fails in an unforeseen way becomes a finding, never a traceback."""
    found: list[Finding] = []
    for topic, check in CHECKS:
        try:
            found.append(Finding(topic, *check()))
        except EdgekvError as error:
            found.append(Finding(topic, False, str(error)))
        except Exception as error:  # the very point of this command is to survive a broken installation
            found.append(Finding(topic, False, f"{type(error).__name__}: {error}"))
    return found


Answer = tuple[bool | None, str]


def _system() -> Answer:
    from edgekv import machine
    from edgekv.memory import detect

    known = detect.jetson_profile()
    board = f"{known.title}, " if known else ""
    return None, f"{board}{machine.cpu_model()}, {platform.machine()}, {platform.system()} {platform.release()}, Python {sys.version.split()[0]}"


def _memory() -> Answer:
    import psutil

    from edgekv import machine

    total, available, swap = psutil.virtual_memory().total, machine.available_memory(), psutil.swap_memory().total
    return None, f"{available / 1e9:.1f} GB available of {total / 1e9:.1f} GB, swap {swap / 1e9:.1f} GB"


def _power() -> Answer:
    from edgekv.memory import detect

    mode = detect.power_mode()
    if mode is None:
        return None, "no nvpmodel here; speed depends on the governor and temperature"
    return None, f"power mode {mode}; figures of other modes differ, `sudo nvpmodel -q` and `sudo jetson_clocks --show` tell more"


def _native() -> Answer:
    from edgekv import native

    return True, f"instruction set {native.isa()}, of {', '.join(native.SCHEMA['isa'])}"


def _onnxruntime() -> Answer:
    import onnxruntime as ort

    from edgekv.engine.onnxruntime import session_options

    session_options(1)  # registers the custom operators: fails when they do not fit this version
    return True, f"{ort.__version__} with edgekv's operators; providers {', '.join(ort.get_available_providers())}"


def _onnxruntime_cuda() -> Answer:
    from edgekv.engine import onnxruntime_cuda

    refusal = onnxruntime_cuda.refusal()
    return refusal is None, refusal or "--engine onnxruntime runs bundles there, but for compressed caches"


def _driver() -> Answer:
    from edgekv.memory import detect

    version = Path("/proc/driver/nvidia/version")
    if release := detect.l4t():
        return True, f"L4T {release}"
    if version.is_file():
        return True, version.read_text().splitlines()[0].removeprefix("NVRM version:").strip()
    return False, "no NVIDIA driver is loaded"


def _gpu() -> Answer:
    from edgekv.engine.device import Device

    info = Device().info()
    if not info["count"]:
        return False, info["reason"]
    keep = f"L2 {info['l2_bytes'] >> 10} KiB, {info['persisting_l2_bytes'] >> 10} KiB of it can be set aside for the cache"
    return True, (
        f"{info['name']}, compute capability {info['sm'] / 10:.1f}, {info['multiprocessors']} multiprocessors, {keep}; "
        f"{info['free_bytes'] / 1e9:.1f} of {info['memory_bytes'] / 1e9:.1f} GB free; CUDA driver {info['driver'] // 1000}.{info['driver'] % 1000 // 10}"
    )


def _tensorrt() -> Answer:
    from edgekv.engine import tensorrt_build
    from edgekv.engine.tensorrt import load_tensorrt

    trt = load_tensorrt()
    tensorrt_build.check_version(trt)
    return True, trt.__version__


def _plugin() -> Answer:
    from edgekv.engine import tensorrt_build
    from edgekv.engine.device import LIBRARY, Device
    from edgekv.engine.tensorrt import load_tensorrt

    Device()  # says what to do when there is none
    trt = load_tensorrt()
    offered = tensorrt_build.load_plugins(trt, LIBRARY)
    missing = tensorrt_build.PLUGINS - offered
    return not missing, f"{LIBRARY} offers {', '.join(sorted(name for _, name in tensorrt_build.PLUGINS & offered)) or 'nothing'}"


def _counters() -> Answer:
    from edgekv.memory import counters

    usable, reasons = counters.usable(counters.all_counters())
    names = [c.name for c in usable]
    why = "; ".join(f"{name}: {reason}" for name, reason in reasons.items())
    return bool(names), (f"{', '.join(names)}" if names else "none") + (f" ({why})" if why else "")


def _export() -> Answer:
    from importlib.util import find_spec

    missing = [name for name in ("torch", "transformers", "onnx", "onnxscript", "gguf", "safetensors") if find_spec(name) is None]
    if missing:
        return False, f"{', '.join(missing)} missing: pip install 'edgekv[export]' (not needed to run bundles)"
    return True, "all packages for `edgekv export` are here"


CHECKS: tuple[tuple[str, Callable[[], Answer]], ...] = (
    ("system", _system),
    ("memory", _memory),
    ("power", _power),
    ("native library", _native),
    ("ONNX Runtime", _onnxruntime),
    ("ONNX Runtime on the GPU", _onnxruntime_cuda),
    ("NVIDIA driver", _driver),
    ("CUDA", _gpu),
    ("TensorRT", _tensorrt),
    ("TensorRT plugin", _plugin),
    ("traffic counters", _counters),
    ("export", _export),
)
