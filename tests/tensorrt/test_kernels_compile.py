"""Device code is checked with nvcc wherever it is found, unoptimised: two seconds a file. The emulation's compiler takes no notice of what is
host and what is device code; the library itself is built by `make test-tensorrt` only.
"""

from __future__ import annotations

import subprocess

import build_plugin
import pytest

KERNELS = [source for source in build_plugin.SOURCES if source.endswith(".cu")]


@pytest.mark.parametrize("source", KERNELS)
def test_device_code_passes_nvcc(source, tmp_path):
    try:
        nvcc = build_plugin.find_nvcc()
    except SystemExit as missing:
        pytest.skip(str(missing))
    include = build_plugin.PLUGINS
    command = [nvcc, "-std=c++17", "-arch=sm_87", "-ptx", "-Xcicc", "-O0", f"-I{include}", str(include / source), "-o", str(tmp_path / "kernels.ptx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
