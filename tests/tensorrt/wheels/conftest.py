"""Tests that need NVIDIA's wheels, headers and nvcc, and minutes: collected by `make test-tensorrt` only."""

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tools"))

if os.environ.get("EDGEKV_TENSORRT_TESTS") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def headers() -> Path:
    from build_plugin import tensorrt_headers

    return tensorrt_headers()


@pytest.fixture(scope="session")
def plugin(headers) -> Path:
    """The real plugin library for two architectures, built once per state of its sources."""
    import build_plugin
    from plugin_build import cached_build

    return cached_build("plugin", lambda out: build_plugin.compile_command(headers, ["87", "110"], out, []))
