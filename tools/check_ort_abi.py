"""Compares plugins/ort/ort_abi.h with ONNX Runtime's own headers: places of functions, layout of a custom op, numbers of enums.

    python tools/check_ort_abi.py /usr/include/onnxruntime

The folder holds onnxruntime_c_api.h (Debian: libonnxruntime-dev; or a release archive's include/). Building edgekv never needs it.
Everything is checked by the compiler, with static_assert; the exit code is 0 when it agrees.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

PLUGINS = Path(__file__).resolve().parents[1] / "plugins"

# Our name -> the header's, where rewriting the name by rule is not enough.
FUNCTIONS = {
    "CustomOpDomainAdd": "CustomOpDomain_Add",
    "KernelInfoGetFloat": "KernelInfoGetAttribute_float",
    "KernelInfoGetInt": "KernelInfoGetAttribute_int64",
    "KernelInfoGetString": "KernelInfoGetAttribute_string",
    "KernelInfoGetFloats": "KernelInfoGetAttributeArray_float",
    "KernelInfoGetConstantInput": "KernelInfoGetConstantInput_tensor",
    "KernelContextGetInputCount": "KernelContext_GetInputCount",
    "KernelContextGetInput": "KernelContext_GetInput",
    "KernelContextGetOutput": "KernelContext_GetOutput",
    "KernelContextGetStream": "KernelContext_GetGPUComputeStream",
    "KernelContextGetAllocator": "KernelContext_GetAllocator",
    "KernelContextParallelFor": "KernelContext_ParallelFor",
    "ReleaseTensorInfo": "ReleaseTensorTypeAndShapeInfo",
}
OP_FIELDS = {
    "get_execution_provider": "GetExecutionProviderType",
    "get_input_count": "GetInputTypeCount",
    "get_output_count": "GetOutputTypeCount",
    "get_input_presence": "GetInputCharacteristic",
    "get_output_presence": "GetOutputCharacteristic",
    "get_input_memory": "GetInputMemoryType",
    "get_variadic_input_least": "GetVariadicInputMinArity",
    "get_variadic_input_homogeneous": "GetVariadicInputHomogeneity",
    "get_variadic_output_least": "GetVariadicOutputMinArity",
    "get_variadic_output_homogeneous": "GetVariadicOutputHomogeneity",
    "infer_output_shape": "InferOutputShapeFn",
    "version": "version",
}
ENUMS = {
    "kOk": "ORT_OK",
    "kFail": "ORT_FAIL",
    "kInvalidArgument": "ORT_INVALID_ARGUMENT",
    "kUndefined": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED",
    "kFloat": "ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT",
    "kUint8": "ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8",
    "kInt8": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8",
    "kInt32": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32",
    "kInt64": "ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64",
    "kRequired": "INPUT_OUTPUT_REQUIRED",
    "kOptional": "INPUT_OUTPUT_OPTIONAL",
    "kMemoryDefault": "OrtMemTypeDefault",
    "kDeviceAllocator": "OrtDeviceAllocator",
}


def checks(ours: str) -> list[str]:
    """One static_assert per function, field and enumerator that ort_abi.h declares."""
    lines = []
    for name in re.findall(r"using (\w+) =\s+Entry<", ours):
        real = FUNCTIONS.get(name, name)
        lines.append(f'static_assert(offsetof(OrtApi, {real}) == {name}::index * sizeof(void*), "place of {real}");')
    struct = ours[ours.index("struct CustomOp {") :]
    struct = struct[: struct.index("\n};")]
    fields = ["version", *re.findall(r"\(\*(\w+)\)\(", struct)]
    for name in fields:
        real = OP_FIELDS.get(name) or "".join(part.capitalize() for part in name.split("_"))
        lines.append(f'static_assert(offsetof(OrtCustomOp, {real}) == offsetof(CustomOp, {name}), "offset of {real}");')
    for name in re.findall(r"\b(k[A-Z]\w+) = \d+", "".join(re.findall(r"enum \w+ : int \{[^}]*\}", ours))):
        lines.append(f'static_assert(int({ENUMS[name]}) == int(edgekv::ort::{name}), "{name}");')
    lines.append('static_assert(offsetof(OrtApiBase, GetApi) == offsetof(ApiBase, get_api), "GetApi");')
    lines.append('static_assert(offsetof(OrtApiBase, GetVersionString) == offsetof(ApiBase, get_version), "GetVersionString");')
    lines.append('static_assert(ORT_API_VERSION >= kApiVersion, "these headers are older than the version ort_abi.h speaks");')
    return lines


def main() -> int:
    if len(sys.argv) != 2 or not Path(sys.argv[1], "onnxruntime_c_api.h").is_file():
        print(__doc__)
        return 2
    lines = checks((PLUGINS / "ort" / "ort_abi.h").read_text())
    source = "\n".join(
        ["#include <cstddef>", "#include <onnxruntime_c_api.h>", '#include "ort/ort_abi.h"', "using namespace edgekv::ort;", *lines]
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "check.cpp")
        file.write_text(source)
        command = ["g++", "-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-I", sys.argv[1], "-I", str(PLUGINS), str(file)]
        done = subprocess.run(command, capture_output=True, text=True)
    print(done.stderr or f"{len(lines)} facts agree with {sys.argv[1]}")
    return 1 if done.returncode else 0


if __name__ == "__main__":
    sys.exit(main())
