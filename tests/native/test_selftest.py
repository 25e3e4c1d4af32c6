"""plugins/cpu/selftest.cpp: the vector operations of every instruction set, and whole caches on ARM, under an emulator if need be."""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from edgekv import native

PLUGINS = Path(__file__).resolve().parents[2] / "plugins"
FLAGS = {
    "scalar": [], "neon": [], "avx2": ["-mavx2", "-mfma", "-mf16c"],
    "avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"],
}  # fmt: skip
ON_ARM = platform.machine() == "aarch64"
CAN_RUN_ARM = ON_ARM or (shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64"))
needs_arm = pytest.mark.skipif(not CAN_RUN_ARM, reason="needs an ARM processor, or g++-aarch64-linux-gnu and qemu-user")


def build_and_run(folder: Path, isa: str, *more: str) -> str:
    arm = isa == "neon" and not ON_ARM
    compiler = ["aarch64-linux-gnu-g++", "-static"] if arm else ["g++"]
    sources = [str(PLUGINS / "cpu" / "selftest.cpp"), *more]
    program = folder / "selftest"
    subprocess.run(
        [*compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-pthread", *FLAGS[isa], f'-DEDGEKV_SIMD="cpu/simd_{isa}.h"', "-w",
         "-I", str(PLUGINS), *sources, "-o", str(program)],
        check=True,
    )  # fmt: skip
    done = subprocess.run([*(["qemu-aarch64"] if arm else []), str(program)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("isa", [*native.SCHEMA["isa"], *([] if ON_ARM else [pytest.param("neon", marks=needs_arm)])])
def test_vector_operations(tmp_path, isa):
    assert "exp2: relative error" in build_and_run(tmp_path, isa)


@needs_arm
@pytest.mark.slow
def test_caches_on_arm(tmp_path):
    sources = [str(s) for folder in ("cpu", "cpu/keep_rules") for s in (PLUGINS / folder).glob("*.cpp") if s.name != "selftest.cpp"]
    assert "neon: keep 2" in build_and_run(tmp_path, "neon", "-DEDGEKV_SELFTEST_KERNELS", *sources)
