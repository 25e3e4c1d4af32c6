#!/usr/bin/env python3
"""Build the CUDA library, edgekv/_native/libedgekv_trt.so, with nvcc: kernels, TensorRT's plugin, ops for ONNX Runtime's CUDA provider.

    python tools/build_plugin.py                 for the GPU of this machine, or for all supported ones where there is none
    python tools/build_plugin.py --arch 87 110   for chosen ones
    python tools/build_plugin.py --cross-cudart D   for ARM, with D the folder of its libcudart_static.a
    python tools/build_plugin.py --emulate -o F  for a CPU, with g++ and plugins/emulation (tests)

TensorRT's headers are taken from --tensorrt-include, $EDGEKV_TENSORRT_INCLUDE or the system's include path (where JetPack puts
them); elsewhere they are fetched from a pinned package. The library needs no TensorRT and no CUDA runtime to be present: it is
linked statically against the CUDA runtime and meets TensorRT only through the interfaces that TensorRT hands it, so one
library serves TensorRT 10.3 to 11.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
LIBRARY = ROOT / "edgekv" / "_native" / "libedgekv_trt.so"
# NVIDIA's interface headers (Apache-2.0) as another package carries them; the hash pins what is compiled.
HEADERS_PACKAGE = "kernel-lens==2.0.1"
HEADERS_HASH = "07cc714e8b5e7f34b672f7c7fad93febe7c747be5837ba276b1527370134ffe0"
HEADERS_FOLDER = "kernel_lens/include/tensorrt/"
SYSTEM_INCLUDES = ("/usr/include", "/usr/include/aarch64-linux-gnu", "/usr/include/x86_64-linux-gnu", "/usr/local/tensorrt/include")
NVCC_PLACES = ("/usr/local/cuda/bin/nvcc",)  # where it is not on PATH
ARCHITECTURES = ("86", "87", "89", "90", "110", "120")
# The ops for ONNX Runtime's CUDA provider, which are in the same library.
ORT_CUDA = (
    "ort/cuda/append_block_sums.cu", "ort/cuda/bounded_cache_attention.cpp", "ort/cuda/cuda_op.cpp", "ort/cuda/register.cpp",
    "ort/kernel_io.cpp", "ort/step_inputs.cpp",
)  # fmt: skip
TENSORRT = ("trt/cache_attention.cpp", "trt/creator.cpp", "trt/plugin.cpp", "trt/sign_vq_retrieval.cpp")
SOURCES = ("cuda/api.cu", "trt/device.cu", *TENSORRT, *ORT_CUDA)
EMULATED = ("cuda/api.cu", "emulation/emulation.cpp", "emulation/device.cpp", *TENSORRT, *ORT_CUDA)


def tensorrt_headers(given: str | None = None) -> Path:
    """Folder of NvInferRuntime.h; fetched into build/ when the machine has none."""
    for folder in filter(None, (given, os.environ.get("EDGEKV_TENSORRT_INCLUDE"))):
        if not (Path(folder) / "NvInferRuntime.h").is_file():
            raise SystemExit(f"{folder} holds no NvInferRuntime.h; give the folder of TensorRT's headers.")
        return Path(folder)
    for folder in SYSTEM_INCLUDES:
        if (Path(folder) / "NvInferRuntime.h").is_file():
            return Path(folder)
    target = ROOT / "build" / "tensorrt-headers"
    if not (target / "NvInferRuntime.h").is_file():
        fetch_headers(target)
    return target


def fetch_headers(target: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        wanted = Path(scratch) / "headers.txt"
        wanted.write_text(f"{HEADERS_PACKAGE} --hash=sha256:{HEADERS_HASH}\n")
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes", "-d", scratch, "-r", str(wanted)]
        if subprocess.run(command).returncode:
            raise SystemExit("TensorRT's headers could not be fetched; install them or give --tensorrt-include.")
        wheel = next(Path(scratch).glob("*.whl"))
        part = target.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith(HEADERS_FOLDER) and name.endswith(".h"):
                    (part / Path(name).name).write_bytes(archive.read(name))
        shutil.rmtree(target, ignore_errors=True)
        part.replace(target)


def find_nvcc() -> str:
    found = shutil.which("nvcc") or next((p for p in NVCC_PLACES if Path(p).exists()), None)
    if not found:
        raise SystemExit("nvcc was not found; install the CUDA toolkit or put its bin folder on PATH.")
    return found


def architectures(nvcc: str, wanted: list[str]) -> list[str]:
    """The wanted ones, or the GPU's own, or all that both edgekv and this nvcc support."""
    if wanted:
        return wanted
    if Path("/dev/nvidia0").exists() or Path("/dev/nvhost-gpu").exists() or Path("/dev/nvgpu").exists():
        return ["native"]
    listed = subprocess.run([nvcc, "--list-gpu-arch"], capture_output=True, text=True).stdout
    return [a for a in ARCHITECTURES if f"compute_{a}\n" in listed]


def compile_command(headers: Path, wanted: list[str], output: Path, extra: list[str], cross_cudart: Path | None = None) -> list[str]:
    """cross_cudart: folder of ARM's libcudart_static.a; the library is then made for 64-bit ARM with aarch64-linux-gnu-g++."""
    nvcc = find_nvcc()
    cudart = ["-cudart", "static"]
    if cross_cudart:
        include = Path(os.path.realpath(nvcc)).parents[1] / "include"
        include = include if (include / "cuda_runtime.h").exists() else Path("/usr/local/cuda/include")
        cudart = ["-cudart", "none", "-ccbin", "aarch64-linux-gnu-g++", f"-I{include}"]
        extra = [*extra, f"-L{cross_cudart}", "-lcudart_static", "-ldl", "-lrt", "-lpthread"]
    command = [nvcc, "-std=c++17", "-O3", "-shared", *cudart, "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wno-deprecated-declarations"]
    command += [f"-I{headers}", f"-I{PLUGINS}", "--threads", str(os.cpu_count() or 1)]
    for a in architectures(nvcc, wanted):
        command += ["-arch=native"] if a == "native" else ["-gencode", f"arch=compute_{a},code=sm_{a}"]
    return [*command, *(str(PLUGINS / s) for s in SOURCES), *extra, "-o", str(output)]


def emulate_command(headers: Path, output: Path, extra: list[str]) -> list[str]:
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-march=native", "-fPIC", "-shared", "-fvisibility=hidden", "-DEDGEKV_EMULATE"]
    command += ["-Wno-deprecated-declarations", f"-I{PLUGINS}/emulation/include", f"-I{headers}", f"-I{PLUGINS}", *extra, "-x", "c++"]
    return [*command, *(str(PLUGINS / s) for s in EMULATED), "-o", str(output)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="*", default=[], help="compute capabilities without the dot, such as 87 110")
    parser.add_argument("--emulate", action="store_true", help="build for a CPU")
    parser.add_argument("--cross-cudart", type=Path, help="folder of ARM's libcudart_static.a: build for 64-bit ARM")
    parser.add_argument("--tensorrt-include", help="folder of NvInferRuntime.h")
    parser.add_argument("-o", "--output", type=Path, default=LIBRARY)
    options, extra = parser.parse_known_args()
    headers = tensorrt_headers(options.tensorrt_include)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    part = options.output.with_name(options.output.name + ".part")
    command = emulate_command(headers, part, extra) if options.emulate else compile_command(headers, options.arch, part, extra, options.cross_cudart)
    code = subprocess.run(command).returncode
    if code:
        part.unlink(missing_ok=True)
        raise SystemExit(f"the compiler failed (exit code {code}); nothing was written.")
    part.replace(options.output)
    print(options.output)


if __name__ == "__main__":
    main()
