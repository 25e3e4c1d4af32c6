#!/usr/bin/env python3
"""Fetch what the TensorRT tests need beside the project's own environment, into build/tensorrt-wheels: a real ONNX parser and
builder that run without a GPU (TensorRT-RTX), two generations of the plugin registry (lean runtime), CUDA 12.6's run-time
compiler, and libraries for ARM. About 700 MB on disk, none of it in the virtual environment.

    python tools/tensorrt_wheels.py      prints the folder; does nothing when it is complete

What cannot be had here (nvcc, a package, headers) is one line on standard error and exit code 3, so that a caller can tell it from a test that
fails.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from build_plugin import find_nvcc, tensorrt_headers

FOLDER = Path(__file__).resolve().parents[1] / "build" / "tensorrt-wheels"
# Folder -> packages. Versions are pinned: the tests say what was seen with these.
WHEELS = {
    "rtx": ["tensorrt-rtx-cu13-libs==1.7.1.116", "tensorrt-rtx-cu13-bindings==1.7.1.116"],
    "lean10": ["tensorrt-lean-cu13-libs==10.16.1.11", "tensorrt-lean-cu13-bindings==10.16.1.11"],
    "lean11": ["tensorrt-lean-cu13-libs==11.4.0.106", "tensorrt-lean-cu13-bindings==11.4.0.106"],
    "nvrtc": ["nvidia-cuda-nvrtc-cu12==12.6.77"],
    # What a Jetson has: for the plugin cross-compiled and loaded under qemu-user.
    "arm-lean10": ["tensorrt-lean-cu13-libs==10.16.1.11", "--platform", "manylinux_2_35_aarch64", "--only-binary=:all:"],
    "arm-cudart": ["nvidia-cuda-runtime==13.0.96", "--platform", "manylinux2014_aarch64", "--only-binary=:all:"],
}


MISSING = 3  # exit code


def main() -> None:
    try:
        find_nvcc()
        fetch_wheels()
        tensorrt_headers()
    except SystemExit as missing:
        print(missing, file=sys.stderr)
        raise SystemExit(MISSING) from None
    print(FOLDER)


def fetch_wheels() -> None:
    for name, packages in WHEELS.items():
        target = FOLDER / name
        if target.exists():
            continue
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(part), *packages]
        if subprocess.run(command, stdout=sys.stderr).returncode:
            raise SystemExit(f"{' '.join(packages)} could not be installed.")
        part.replace(target)
    # The bindings look for the library by its development name.
    link = FOLDER / "rtx" / "tensorrt_rtx_libs" / "libtensorrt_rtx.so"
    if not link.exists():
        link.symlink_to("libtensorrt_rtx.so.1")


if __name__ == "__main__":
    main()
