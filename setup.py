"""Builds the native library edgekv/_native/libedgekv.so with the C++ compiler alone: no network, no ONNX Runtime headers.

Each plugins/cpu/isa_*.cpp is compiled for its own instruction set and chosen at run time, so that one library serves every
machine of an architecture. $CXX names the compiler, $EDGEKV_CXXFLAGS adds flags, $MAX_JOBS limits parallel compilations.
"""

import os
import platform
import shlex
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError, LinkError

ROOT = Path(__file__).resolve().parent
SOURCE_FOLDERS = ("plugins/cpu", "plugins/cpu/keep_rules", "plugins/ort")
NOT_IN_LIBRARY = {"selftest.cpp"}

# -ffp-contract=off: whether a product is fused into a sum is written in the source, never chosen by the compiler, because two
# instantiations of one kernel must give the same bits.
FLAGS = ["-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-pthread"]
ISA_FLAGS = {
    "isa_avx2": ["-mavx2", "-mfma", "-mf16c"],
    # GCC 12 warns about its own AVX-512 header, which starts from undefined registers on purpose.
    "isa_avx512": ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma", "-mf16c", "-Wno-maybe-uninitialized", "-Wno-uninitialized"],
}

X86 = platform.machine() in ("x86_64", "AMD64")  # elsewhere the files for x86 compile to nothing


def sources():
    found = [p.relative_to(ROOT) for folder in SOURCE_FOLDERS for p in sorted((ROOT / folder).glob("*.cpp"))]
    return [p for p in found if p.name not in NOT_IN_LIBRARY]


def headers():
    return [p.relative_to(ROOT) for folder in ("plugins/layout", *SOURCE_FOLDERS)
            for pattern in ("*.h", "*.def") for p in sorted((ROOT / folder).glob(pattern))]


class BuildNative(build_ext):
    def library(self):
        base = ROOT if self.inplace else Path(self.build_lib)
        return base / "edgekv" / "_native" / "libedgekv.so"

    def get_ext_filename(self, fullname):
        return os.path.join(*fullname.split(".")) + ".so"

    def get_outputs(self):
        return [str(self.library())]

    def run(self):
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        extra = shlex.split(os.environ.get("EDGEKV_CXXFLAGS", ""))
        newest_header = max((ROOT / h).stat().st_mtime for h in [*headers(), "setup.py"])
        objects = Path(self.build_temp) / "native"

        def compile_one(source):
            target = objects / source.with_suffix(".o")
            newest = max(newest_header, (ROOT / source).stat().st_mtime)
            if not self.force and target.exists() and target.stat().st_mtime > newest:
                return target
            target.parent.mkdir(parents=True, exist_ok=True)
            self.call([*compiler, *FLAGS, *(ISA_FLAGS.get(source.stem, []) if X86 else []), *extra, "-I", str(ROOT / "plugins"),
                       "-c", str(ROOT / source), "-o", str(target)], CompileError)
            return target

        jobs = int(os.environ.get("MAX_JOBS", 0)) or os.cpu_count() or 1
        with ThreadPoolExecutor(jobs) as pool:
            compiled = list(pool.map(compile_one, sources()))
        library = self.library()
        library.parent.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(".so.new")
        self.call([*compiler, "-shared", "-pthread", "-static-libstdc++", "-static-libgcc", "-Wl,--exclude-libs,ALL", *extra,
                   *map(str, compiled), "-o", str(unfinished)], LinkError)
        os.replace(unfinished, library)  # a running process keeps the library it has mapped

    def call(self, command, error):
        try:
            done = subprocess.run(command, capture_output=True, text=True)
        except FileNotFoundError:
            raise error(f"the native library needs a C++17 compiler and {command[0]!r} was not found: install g++ or set CXX") from None
        if done.stderr:
            print(done.stderr)
        if done.returncode:
            raise error(f"{shlex.join(command)} failed:\n{done.stderr}")


class PlatformWheel(bdist_wheel):
    """The library is loaded with ctypes, so that one wheel serves every Python 3 on the platform."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[*find_packages(include=["edgekv", "edgekv.*"]), "edgekv.export", "edgekv.export.passes", "edgekv.export.thin", "edgekv.device_profiles"],
    package_dir={"edgekv": "edgekv", "edgekv.export": "export", "edgekv.device_profiles": "device_profiles"},
    ext_modules=[Extension("edgekv._native.libedgekv", [str(s) for s in sources()], depends=[str(h) for h in headers()])],
    cmdclass={"build_ext": BuildNative, "bdist_wheel": PlatformWheel},
)
