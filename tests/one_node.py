"""One-node ONNX models of the cache attention, and sessions that bind its state in place."""

from __future__ import annotations

import numpy as np
import onnxruntime
from onnx import TensorProto, helper

from edgekv import native

INPUTS = ("q", "k", "v", "position", "state", "cos", "sin")


def attributes(params: native.LayerParams) -> dict:
    return {name: getattr(params, name) for name, _ in params._fields_}


def make_model(params: native.LayerParams, given=INPUTS[:5], state_size: int | None = None, **attribute_changes):
    """A model whose inputs are `given`; attributes replaced by attribute_changes, left out where those are None."""
    size = native.state_bytes(params) if state_size is None else state_size
    fields = attributes(params) | {"plugin_namespace": "edgekv", "plugin_version": "1"} | attribute_changes
    last = max(INPUTS.index(name) for name in given)
    node = helper.make_node(
        "BoundedCacheAttention",
        [name if name in given else "" for name in INPUTS[: last + 1]],
        ["y", "state.out"],
        domain="edgekv",
        **{name: value for name, value in fields.items() if value is not None},
    )
    return finish([node], given, size)


def finish(nodes, given, size: int, outputs=("y", "state.out"), half=()):
    """A model of these nodes; inputs are float32, those named in half float16."""
    types = {"position": (TensorProto.INT64, [None]), "state": (TensorProto.INT8, [size])} | {name: (TensorProto.FLOAT16, None) for name in half}
    inputs = [helper.make_tensor_value_info(name, *types.get(name, (TensorProto.FLOAT, None))) for name in given]
    made = [
        helper.make_tensor_value_info(name, *((TensorProto.INT8, [size]) if name.startswith("state") else (TensorProto.FLOAT, None)))
        for name in outputs
    ]
    graph = helper.make_graph(nodes, "one", inputs, made)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10)


def open_session(model, threads: int = 2) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4  # refusals are what these tests are about
    options.register_custom_ops_library(str(native.LIBRARY))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(session: onnxruntime.InferenceSession, state: np.ndarray, **inputs: np.ndarray) -> np.ndarray:
    """One step on `state`, in place: y as the op gives it."""
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_cpu_input(name, value)
    binding.bind_output("y")
    for bind, name in ((binding.bind_input, "state"), (binding.bind_output, "state.out")):
        bind(name, "cpu", 0, np.int8, state.shape, state.ctypes.data)
    session.run_with_iobinding(binding)
    return binding.get_outputs()[0].numpy()
