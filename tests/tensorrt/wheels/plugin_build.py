"""Compiles the plugin for tests, once per state of its sources; keeps the compiler's own report beside the result."""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Callable
from pathlib import Path

from build_plugin import PLUGINS, ROOT

WHEELS = ROOT / "build" / "tensorrt-wheels"


def cached_build(name: str, command: Callable[[Path], list[str]], *watched: Path) -> Path:
    digest = hashlib.sha256(" ".join(command(Path("out"))).encode())
    rooms = ("cuda", "layout", "emulation", "trt", "ort", "cpu")
    for path in sorted([*(p for room in rooms for p in (PLUGINS / room).rglob("*") if p.is_file()), *watched]):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "tensorrt-tests"
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"{name}-{digest.hexdigest()[:16]}"
    if not target.exists():
        part = target.with_suffix(".part")
        done = subprocess.run(command(part), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        target.with_suffix(".log").write_text(done.stderr + done.stdout)
        part.replace(target)
    return target
