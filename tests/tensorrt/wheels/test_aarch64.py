"""The plugin as a Jetson gets it: cross-compiled for ARM, loaded by ARM's own TensorRT under qemu-user."""

import shutil
import subprocess
from pathlib import Path

import build_plugin
import pytest
from plugin_build import WHEELS, cached_build

pytestmark = pytest.mark.slow
COMPILER, RUNNER = "aarch64-linux-gnu-g++", "qemu-aarch64"


@pytest.fixture(scope="module")
def tools():
    missing = [name for name in (COMPILER, RUNNER) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)} (Debian: g++-aarch64-linux-gnu qemu-user)")


def test_the_plugin_for_arm_loads_in_arms_tensorrt(tools, headers):
    cudart = WHEELS / "arm-cudart/nvidia/cu13/lib"
    plugin = cached_build("plugin-arm", lambda out: build_plugin.compile_command(headers, ["87"], out, [], cudart))
    kind = subprocess.run(["readelf", "-h", str(plugin)], capture_output=True, text=True, check=True).stdout
    assert "AArch64" in kind
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(plugin)], capture_output=True, text=True, check=True).stdout
    assert "cuda" not in listed and "nvinfer" not in listed.lower()

    libraries, source = WHEELS / "arm-lean10/tensorrt_lean_libs", Path(__file__).parent / "load_plugin.cpp"
    cuda = next(p for p in map(Path, ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include")) if (p / "cuda_runtime_api.h").exists())
    program = cached_build(
        "load-plugin-arm",
        lambda out: [
            COMPILER, "-std=c++17", "-Wno-deprecated-declarations", f"-I{headers}", f"-I{cuda}", str(source), "-o", str(out),
            f"-L{libraries}", "-l:libnvinfer_lean.so.10", "-Wl,--allow-shlib-undefined",
        ],
        source,
    )  # fmt: skip
    paths = f"LD_LIBRARY_PATH={libraries}:/usr/aarch64-linux-gnu/lib"
    done = subprocess.run([RUNNER, "-L", "/usr/aarch64-linux-gnu", "-E", paths, str(program), str(plugin)], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip() == "TensorRT 10: 9 query heads made, 8 over 3 refused", done.stdout + done.stderr
