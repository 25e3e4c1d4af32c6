"""The compiled plugin library: what it needs, where it loads, what its kernels use."""

import ctypes
import re
import subprocess
import sys

import pytest
from build_plugin import PLUGINS, find_nvcc
from plugin_build import WHEELS, cached_build


def test_nothing_of_tensorrt_or_cuda_is_left_undefined(plugin):
    """One library for every TensorRT: it meets TensorRT only through interfaces it is handed, and carries the CUDA runtime itself."""
    listed = subprocess.run(["nm", "-D", "--undefined-only", str(plugin)], capture_output=True, text=True, check=True).stdout
    undefined = {line.split()[-1].split("@")[0] for line in listed.splitlines()}
    assert not [name for name in undefined if re.search(r"nvinfer|TensorRT|^_?cu[A-Z]|^cuda|getPluginRegistry|createInfer", name)], undefined
    needed = subprocess.run(["readelf", "-d", str(plugin)], capture_output=True, text=True, check=True).stdout
    libraries = re.findall(r"NEEDED.*\[(.*?)\]", needed)
    assert all(re.match(r"(libc|libm|libdl|librt|libpthread|libstdc\+\+|libgcc_s|ld-linux.*)\.so", name) for name in libraries), libraries


def test_exports_are_the_c_functions_and_nothing_else(plugin):
    listed = subprocess.run(["nm", "-D", "--defined-only", str(plugin)], capture_output=True, text=True, check=True).stdout
    names = {line.split()[-1] for line in listed.splitlines()}
    assert {"getCreators", "setLoggerFinder", "edgekv_cuda_step", "edgekv_cuda_compact", "edgekv_device_info"} <= names
    entries = {"getCreators", "setLoggerFinder", "RegisterCustomOps"}  # TensorRT's and ONNX Runtime's
    assert entries <= names and all(name in entries or name.startswith("edgekv_") for name in names), names


REGISTRY = """
import sys
sys.path.insert(0, {folder!r})
import numpy as np
import tensorrt_lean_bindings as trt

class Logger(trt.ILogger):
    def __init__(self):
        trt.ILogger.__init__(self)
        self.errors = []
    def log(self, severity, message):
        if severity == trt.ILogger.ERROR:
            self.errors.append(message)

logger = Logger()
registry = trt.get_plugin_registry()
assert registry.load_library({plugin!r}) is not None
creator = registry.get_creator("BoundedCacheAttention", "1", "edgekv")
assert registry.get_creator("SignVQRetrieval", "1", "edgekv") is not None
print(trt.__version__)
print(",".join(f.name for f in creator.field_names))

def make(**values):
    fields = [trt.PluginField(n, np.array([v], np.int32), trt.PluginFieldType.INT32) for n, v in values.items()]
    return creator.create_plugin("layer", trt.PluginFieldCollection(fields), trt.TensorRTPhase.BUILD)

good = dict(q_heads=9, kv_heads=3, key_dim=64, value_dim=64, body_slots=64, tail_slots=64, keep=1, sinks=4)
plugin = make(**good)
for kind in (trt.PluginCapabilityType.CORE, trt.PluginCapabilityType.BUILD, trt.PluginCapabilityType.RUNTIME):
    assert plugin.get_capability_interface(kind) is not None
try:
    bad = make(**(good | dict(kv_heads=4)))
except Exception:
    bad = None
print("refused" if bad is None else "accepted")
"""


@pytest.mark.parametrize(("name", "version"), [("lean10", "10.16."), ("lean11", "11.")])
def test_it_loads_in_two_generations_of_the_registry(plugin, name, version):
    """In a process of its own: two TensorRTs do not go into one."""
    from edgekv import layout

    script = REGISTRY.format(folder=str(WHEELS / name), plugin=str(plugin))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    shown, fields, refused = done.stdout.split("\n")[:3]
    assert shown.startswith(version) and refused == "refused"
    assert fields.split(",") == [name for name, _, _ in layout.FIELDS]


def ptxas(log: str) -> dict[tuple[str, str], dict[str, int]]:
    """(architecture, kernel) -> registers, spill bytes; from the compiler's report."""
    found = {}
    pattern = re.compile(
        r"Compiling entry function '(\w+)' for 'sm_(\d+)'.*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
        r".*?Used (\d+) registers",
        re.S,
    )
    for name, arch, _, stores, loads, registers in pattern.findall(log):
        plain = subprocess.run(["c++filt", name], capture_output=True, text=True).stdout.strip()
        found[arch, plain.split("(")[0].replace("edgekv::cuda::", "").removeprefix("void ")] = {
            "registers": int(registers), "spills": int(stores) + int(loads),
        }  # fmt: skip
    return found


@pytest.fixture(scope="module")
def report(headers):
    command = lambda out: [  # noqa: E731
        find_nvcc(), "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", f"-I{headers}", str(PLUGINS / "cuda/api.cu"), "-o", str(out),
    ]  # fmt: skip
    logs = ""
    for arch in ("87", "110"):
        path = cached_build(f"sm{arch}", lambda out, arch=arch: [*command(out), f"-arch=sm_{arch}"])
        logs += path.with_suffix(".log").read_text()
    return ptxas(logs)


@pytest.mark.parametrize("arch", ["87", "110"])
def test_no_kernel_of_a_step_spills_registers(report, arch):
    packed = ("attend_packed", "combine_packed", "turn_queries", "score_tables", "scan_codes", "choose_by_codes", "score_candidates", "choose_by_keys")
    step = {k: v for (a, k), v in report.items() if a == arch and k.split("<")[0] in ("attend", "append_rows", "combine", *packed)}
    assert len(step) == 24 + 2 + 1 + 12 + 7
    for kernel, used in step.items():
        assert used["spills"] == 0, (kernel, used)
        assert used["registers"] * (256 if kernel.startswith("choose") else 128) <= 65536, kernel  # a block must start


# 6: rows per warp, chunks of values, walking; shared memory as attend_shared_bytes says, per device profile limit (bytes per block).
@pytest.mark.parametrize(("key_dim", "element", "limit"), [(64, 2, 48 << 10), (128, 2, 99 << 10), (256, 2, 99 << 10), (128, 4, 99 << 10)])
def test_shared_memory_fits_the_smallest_device(key_dim, element, limit):
    stages, rows = (4 if element == 2 else 3), 16
    size = element * 64 // 16 * 65 * 16 * stages + 4 * rows * key_dim + 4 * rows * 64
    assert size <= limit <= 163 << 10


def test_cuda_12_6_compiles_the_kernels():
    """JetPack 6's compiler, as a library: every kernel of a step and of a compaction, for Orin."""
    library = next(WHEELS.glob("nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    nvrtc = ctypes.CDLL(str(library))
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    assert (major.value, minor.value) == (12, 6)
    kernels = [f"attend<{e}, {r}, {c}, {w}>" for e in ("__half", "float") for c in (1, 2, 4) for r, w in ((1, "false"), (2, "false"), (4, "false"), (4, "true"))]
    kernels += [f"{k}<{e}>" for k in ("append_rows", "observe_tiles", "observe_columns", "sum_keys", "rank_keys", "move_tokens") for e in ("__half", "float")]
    kernels += [f"attend_packed<{r}, {c}, {w}>" for c in (1, 2, 4) for r, w in ((1, "false"), (2, "false"), (4, "false"), (4, "true"))]
    kernels += [f"{k}<{e}>" for k in ("unpack_candidates", "interval_means", "pack_tokens", "copy_sinks") for e in ("__half", "float")]
    kernels += ["combine", "observe_rows", "choose_slots", "move_metadata", "commit_compaction", "combine_packed", "turn_queries"]
    kernels += ["score_tables", "scan_codes", "choose_by_codes", "score_candidates", "choose_by_keys"]
    kernels += ["teach_codebook", "move_records", "move_codes", "commit_packed"]
    files = ("append", "combine", "move", "rank_keys", "rank_candidates", "turn_queries", "attend_packed", "combine_packed", "unpack_candidates", "pack_tokens", "move_packed")
    source = "".join(f'#include "cuda/{name}.cuh"\n' for name in files)
    # The run-time compiler has no standard headers; these few names are all that state_layout.h takes from them.
    standard = {
        "cstddef": "namespace std { using size_t = decltype(sizeof(0)); } using std::size_t;",
        "cstdint": "typedef signed char int8_t; typedef unsigned char uint8_t; typedef short int16_t; typedef unsigned short uint16_t;"
        "typedef int int32_t; typedef unsigned uint32_t; typedef long int64_t; typedef unsigned long uint64_t; typedef unsigned long uintptr_t;",
    }
    program = ctypes.c_void_p()
    names = (ctypes.c_char_p * len(standard))(*(n.encode() for n in standard))
    texts = (ctypes.c_char_p * len(standard))(*(t.encode() for t in standard.values()))
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", len(standard), texts, names) == 0
    for kernel in kernels:
        assert nvrtc.nvrtcAddNameExpression(program, f"edgekv::cuda::{kernel}".encode()) == 0
    headers = next(p for p in ("/usr/local/cuda/include", "/usr/local/cuda-13.0/include") if __import__("os").path.exists(p + "/cuda_fp16.h"))
    options = ["--gpu-architecture=sm_87", "--std=c++17", "--device-as-default-execution-space", f"-I{PLUGINS}", f"-I{headers}"]
    code = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*(o.encode() for o in options)))
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert code == 0, log.value.decode()[:4000]
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    assert size.value > 100_000
    for kernel in kernels:
        lowered = ctypes.c_char_p()
        assert nvrtc.nvrtcGetLoweredName(program, f"edgekv::cuda::{kernel}".encode(), ctypes.byref(lowered)) == 0 and lowered.value
