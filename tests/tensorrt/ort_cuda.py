"""The library of ONNX Runtime's CUDA ops, over the emulation: its ops belong to the CPU provider there, host memory is device memory."""

from __future__ import annotations

from pathlib import Path

from build_plugin import ORT_CUDA
from emulated import PLUGINS, build, watched_sources


def library() -> Path:
    sources = [PLUGINS / name for name in ("cuda/api.cu", "emulation/emulation.cpp", "emulation/device.cpp", *ORT_CUDA)]
    headers = [p for folder in ("ort", "ort/cuda", "cpu", "trt") for p in (PLUGINS / folder).glob("*.h")]
    return build("ort-cuda", sources, [*watched_sources(), *headers])
