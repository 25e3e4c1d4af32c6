"""The ops for ONNX Runtime's CUDA provider, in real sessions over emulated kernels: outputs and states of the CPU ops."""

import numpy as np
import onnxruntime
import ort_cuda
import pytest
from cache_cases import INV_FREQ, Text, make_params
from one_node import INPUTS, attributes, make_model, open_session, run
from onnx import TensorProto, helper

from edgekv import layout, native


@pytest.fixture(scope="module")
def cuda():
    return ort_cuda.library()


def open_cuda(library, model) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library))
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


CASES = {
    "full": make_params("full", 128, 32, "fp32"),
    "window": make_params("window", 64, 32, "fp16", sinks=4, softcap=3.0),
    "heavy": make_params("heavy", 64, 32, "fp16", "cache", sinks=4, window=16, observe=32, rotary_dim=6, fused_rotary=1),
    "by head": make_params("window", 64, 32, "fp32", rotary_dim=6, fused_rotary=layout.BY_HEAD),
    "sliding": make_params("window", 32, 32, "fp32", sliding_window=20, q_heads=3, kv_heads=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["rows", "heads", "packed"])
def test_outputs_and_state_of_the_cpu_op(cuda, case, form):
    params = native.LayerParams(**CASES[case])
    full, tables = attributes(params), params.fused_rotary
    names = ("q", "position", "state") if form == "packed" else INPUTS[:5]
    given = (*names, "cos", "sin") if tables else names
    model = make_model(params, given)
    ours, theirs = open_cuda(cuda, model), open_session(model, 1)
    text, states = Text(full, 96), (native.new_state(params), native.new_state(params))
    for start, rows in ((0, 1), (1, 12), (13, 19), (32, 5), (37, 27), (64, 32)):
        part = slice(start, start + rows)
        x = {n: getattr(text, n)[part] for n in "qkv"}
        if form == "packed":
            feeds = {"q": np.concatenate([x[n].reshape(1, rows, -1) for n in "qkv"], axis=2)}
        else:
            feeds = {n: np.ascontiguousarray(a.reshape(1, rows, -1) if form == "rows" else a.transpose(1, 0, 2)[None]) for n, a in x.items()}
        feeds["position"] = np.array([start])
        if tables:
            angle = (np.arange(start, start + rows)[:, None] * np.asarray(INV_FREQ)).astype(np.float32)
            if tables == layout.BY_HEAD:
                angle = np.concatenate([angle, angle * np.float32(0.37)], 1)  # a second kv head that turns slower
            feeds |= {"cos": np.cos(angle)[None], "sin": np.sin(angle)[None]}
        got, want = (run(session, state, **feeds) for session, state in zip((ours, theirs), states))
        np.testing.assert_allclose(got, want, atol=2e-5 if params.element == layout.ELEMENTS["fp32"] else 2e-3)
        views = [layout.StateView(full, state) for state in states]
        for plane in layout.planes(full):
            a, b = (np.asarray(getattr(view, plane), np.float64) for view in views)
            np.testing.assert_allclose(a, b, atol=1e-6 if params.element == layout.ELEMENTS["fp32"] else 1e-3, err_msg=plane)
        end = start + rows
        if end % 32 == 0:  # compaction is no op: the CPU's on both
            inv_freq = np.asarray(INV_FREQ, np.float32) if params.positions else None
            for state in states:
                native.compact(params, state, end, min(end, 64) if params.positions else end, inv_freq)


def test_what_the_host_can_see_is_refused_with_a_sentence(cuda):
    params = native.LayerParams(**make_params("window", 64, 32, "fp16"))
    text, state = Text(attributes(params), 40), native.new_state(params)
    session = open_cuda(cuda, make_model(params))

    def feeds(rows):
        return {n: getattr(text, n)[:rows].reshape(1, rows, -1) for n in "qkv"} | {"position": np.array([0])}

    with pytest.raises(Exception, match="at most 32 rows"):
        run(session, state, **feeds(33))
    with pytest.raises(Exception, match="updated in place"):
        session.run(None, feeds(3) | {"state": state.view(np.int8)})
    with pytest.raises(Exception, match="not the size"):
        short = open_cuda(cuda, make_model(params, state_size=state.nbytes - 256))
        run(short, state[: state.nbytes - 256], **feeds(3))
    packed = native.LayerParams(**(make_params("full", 64, 32, "fp16") | {"format": 1, "key_dim": 32, "value_dim": 32, "intervals": 4}))
    with pytest.raises(Exception, match="BoundedCacheAttention: "):
        open_cuda(cuda, make_model(packed))


def test_rows_beyond_the_boundary_are_nan_and_leave_the_state_alone(cuda):
    """What only the device can see: the host learns it from the answer."""
    params = native.LayerParams(**make_params("window", 64, 32, "fp16"))
    text, state = Text(attributes(params), 4), native.new_state(params)
    before = state.copy()
    feeds = {n: getattr(text, n).reshape(1, 4, -1) for n in "qkv"} | {"position": np.array([30])}
    assert np.isnan(run(open_cuda(cuda, make_model(params)), state, **feeds)).all()
    at = layout.state_layout(attributes(params)).body_pos
    np.testing.assert_array_equal(state[at:], before[at:])


@pytest.mark.parametrize("columns", [32, 33, 96, 1056, 2080])
def test_block_sums_have_the_bits_of_the_cpu_op(cuda, columns):
    node = helper.make_node("AppendBlockSums", ["x"], ["y"], domain="edgekv")
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in "xy"]
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)]
    model = helper.make_model(helper.make_graph([node], "sums", values[:1], values[1:]), opset_imports=versions, ir_version=10)
    x = np.random.default_rng(columns).standard_normal((1, 5, columns), np.float32)
    got, want = (session.run(None, {"x": x})[0] for session in (open_cuda(cuda, model), open_session(model)))
    assert got.shape == want.shape
    np.testing.assert_array_equal(got, want)
