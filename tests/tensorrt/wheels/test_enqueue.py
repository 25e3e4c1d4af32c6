"""The TensorRT plugin itself, over emulated kernels: enqueue equals the ONNX Runtime op, in place, and refuses what is wrong."""

import ctypes
from ctypes import c_char_p, c_int32, c_int64, c_void_p
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
from build_plugin import emulate_command
from cache_cases import INV_FREQ, Text, make_params
from emulated import bits_of
from onnx import TensorProto, helper
from plugin_build import cached_build

from edgekv import layout, native
from edgekv.engine.onnxruntime import session_options

FLOAT, HALF, INT8, INT32, INT64 = 0, 1, 2, 3, 8  # nvinfer1::DataType
INT32_FIELD, FLOAT32_FIELD = 5, 1  # nvinfer1::PluginFieldType


class Field(ctypes.Structure):
    _fields_ = [("name", c_char_p), ("data", c_void_p), ("type", c_int32), ("length", c_int32)]


class Tensor(ctypes.Structure):
    _fields_ = [("rank", c_int32), ("dims", c_int64 * 4), ("type", c_int32), ("data", c_void_p)]

    @classmethod
    def of(cls, array: np.ndarray) -> "Tensor":
        kinds = {"float32": FLOAT, "float16": HALF, "int8": INT8, "int32": INT32, "int64": INT64}
        return cls(array.ndim, (c_int64 * 4)(*array.shape), kinds[array.dtype.name], array.ctypes.data)


@pytest.fixture(scope="module")
def harness(headers):
    source = Path(__file__).parent / "harness.cpp"
    path = cached_build("harness", lambda out: emulate_command(headers, out, [])[:-2] + [str(source), "-o", str(out)], source)
    lib = ctypes.CDLL(str(path))
    lib.harness_create.restype = c_void_p
    lib.harness_workspace.restype = c_int64
    return lib


class Plugin:
    def __init__(self, harness, params, op="BoundedCacheAttention", **override):
        self.harness, self.params = harness, layout.complete(params)
        keep, fields = [], []
        for name, code, _ in layout.FIELDS:
            value = override.get(name, np.array([self.params[name]], np.int32 if code == "i" else np.float32))
            keep.append(value)
            fields.append(Field(name.encode(), value.ctypes.data, {"int32": 5, "float32": 1, "int64": 10}[value.dtype.name], value.size))
        self.handle = harness.harness_create(op.encode(), (Field * len(fields))(*fields), len(fields))

    def enqueue(self, inputs, outputs) -> int:
        tensors = (Tensor * 10)(*(Tensor.of(a) for a in (*inputs, *outputs)))
        room = self.harness.harness_workspace(c_void_p(self.handle), tensors, len(inputs))
        workspace = native.aligned_bytes(max(room, 1))
        return self.harness.harness_enqueue(c_void_p(self.handle), tensors, len(inputs), len(outputs), c_void_p(workspace.ctypes.data))


def ort_session(params, ranks) -> ort.InferenceSession:
    """A graph of the one op."""
    p = layout.complete(params)
    sizes = {"q": (p["q_heads"], p["key_dim"]), "k": (p["kv_heads"], p["key_dim"]), "v": (p["kv_heads"], p["value_dim"])}
    inputs = []
    for name, rank in zip("qkv", ranks):
        heads, dim = sizes[name]
        shape = [1, heads, "T", dim] if rank == 4 else [1, "T", heads * dim]
        inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
    names = ["q", "k", "v", "position", "state"]
    inputs.append(helper.make_tensor_value_info("position", TensorProto.INT64, [1]))
    inputs.append(helper.make_tensor_value_info("state", TensorProto.INT8, [layout.state_bytes(p)]))
    if p["fused_rotary"]:
        names += ["cos", "sin"]
        inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "T", p["rotary_dim"] // 2]) for n in ("cos", "sin")]
    node = helper.make_node("BoundedCacheAttention", names, ["y", "state.out"], domain="edgekv", **p)
    if p["rotary_dim"]:
        node.attribute.append(helper.make_attribute("inv_freq", list(INV_FREQ)))
    outputs = [
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "T", p["q_heads"] * p["value_dim"]]),
        helper.make_tensor_value_info("state.out", TensorProto.INT8, [layout.state_bytes(p)]),
    ]
    graph = helper.make_graph([node], "op", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])


CASES = {
    "full": make_params("full", 128, 32, "fp32"),
    "window": make_params("window", 64, 32, "fp16", sinks=4, softcap=3.0),
    "heavy": make_params("heavy", 64, 32, "fp16", "cache", sinks=4, window=16, observe=32, rotary_dim=6, fused_rotary=1),
    "sliding": make_params("window", 32, 32, "fp32", sliding_window=20, q_heads=3, kv_heads=1),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("ranks", [(4, 4, 4), (3, 3, 3), (4, 3, 4)])
def test_enqueue_equals_the_onnx_runtime_op_in_place(harness, case, ranks):
    params = layout.complete(CASES[case])
    text, plugin, session = Text(params, 96), Plugin(harness, params), ort_session(params, ranks)
    cpu = native.LayerParams(**params)
    ours, theirs = native.new_state(cpu), native.new_state(cpu)
    assert harness.harness_alias(c_void_p(plugin.handle), 1) == 4 and harness.harness_alias(c_void_p(plugin.handle), 0) == -1
    for start, rows in ((0, 1), (1, 12), (13, 19), (32, 5), (37, 27), (64, 32)):
        part = slice(start, start + rows)
        feeds = {}
        for name, rank in zip("qkv", ranks):
            x = getattr(text, name)[part]
            feeds[name] = np.ascontiguousarray(x.transpose(1, 0, 2) if rank == 4 else x.reshape(rows, -1))[None]
        feeds["position"], feeds["state"] = np.array([start], np.int64), theirs.view(np.int8)
        if params["fused_rotary"]:
            angle = (np.arange(start, start + rows)[:, None] * np.asarray(INV_FREQ)).astype(np.float32)
            feeds["cos"], feeds["sin"] = np.cos(angle)[None], np.sin(angle)[None]

        binding, bound = session.io_binding(), {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in feeds.items()}
        for name, value in bound.items():
            binding.bind_ortvalue_input(name, value)
        want = np.empty((1, rows, params["q_heads"] * params["value_dim"]), np.float32)
        binding.bind_ortvalue_output("y", ort.OrtValue.ortvalue_from_numpy(want))
        binding.bind_ortvalue_output("state.out", bound["state"])
        session.run_with_iobinding(binding)

        y = np.full_like(want, np.nan)
        state = ours.view(np.int8)
        inputs = [feeds["q"], feeds["k"], feeds["v"], feeds["position"], state, *(feeds[n] for n in ("cos", "sin") if n in feeds)]
        assert plugin.enqueue(inputs, [y, state]) == 0
        np.testing.assert_allclose(y, want, atol=2e-5 if params["element"] == 0 else 2e-3)
        if (start + rows) % 32 == 0:
            # Compaction is not the plugin's: the CPU's on both, so that only steps are compared.
            inv_freq = np.asarray(INV_FREQ, np.float32) if params["rotary_dim"] else None
            rank_base = min(start + rows, 64) if params["positions"] else start + rows
            for block in (ours, theirs):
                native.compact(cpu, block, start + rows, rank_base, inv_freq)
    a, b = layout.StateView(params, ours), layout.StateView(params, theirs)
    np.testing.assert_array_equal(a.body_pos, b.body_pos)
    np.testing.assert_allclose(a.body_v.astype(np.float32), b.body_v.astype(np.float32), atol=1e-3)


def test_what_a_builder_may_choose(harness):
    plugin = Plugin(harness, CASES["heavy"])
    f, h, c, i = (np.zeros(1, t) for t in (np.float32, np.float16, np.int8, np.int64))

    def accepts(*arrays):
        return harness.harness_accepts(c_void_p(plugin.handle), (Tensor * 9)(*map(Tensor.of, arrays)), 7, 2)

    assert accepts(f, f, f, i, c, f, f, f, c) and accepts(h, h, h, i, c, h, h, h, c) and accepts(h, h, h, i, c, f, f, h, c)
    for wrong in ((f, h, f, i, c, f, f, f, c), (f, f, f, i, c, f, h, f, c), (f, f, f, i, f, f, f, f, c), (f, f, f, c, c, f, f, f, c), (h, h, h, i, c, f, f, f, c)):
        assert not accepts(*wrong)


def test_enqueue_refuses_a_state_that_is_not_aliased_and_wrong_shapes(harness, capfd):
    params = layout.complete(CASES["window"])
    plugin, cpu = Plugin(harness, params), native.LayerParams(**params)
    q, k, v = np.zeros((1, 4, 3, 8), np.float32), np.zeros((1, 2, 3, 8), np.float32), np.zeros((1, 2, 3, 6), np.float32)
    y, where, state = np.zeros((1, 3, 24), np.float32), np.zeros(1, np.int64), native.new_state(cpu).view(np.int8)
    assert plugin.enqueue([q, k, v, where, state], [y, state]) == 0
    assert plugin.enqueue([q, k, v, where, state], [y, state.copy()]) != 0
    assert "same memory" in capfd.readouterr().err
    for wrong in ([q[:, :, :, :7], k, v], [q, k[:, :1], v], [q, k, v[:, :, :2]], [np.zeros((1, 4, 33, 8), np.float32), k, v]):
        assert plugin.enqueue([*map(np.ascontiguousarray, wrong), where, state], [y, state]) != 0
        assert "shape" in capfd.readouterr().err


def test_attributes_that_make_no_sense_are_refused_by_name(harness, capfd):
    params = CASES["window"]
    for override, sentence in (
        ({"kv_heads": np.array([3], np.int32)}, "kv_heads must divide q_heads"),
        ({"tail_slots": np.array([32, 32], np.int32)}, "attribute tail_slots"),
        ({"sinks": np.array([1 << 40], np.int64)}, "attribute sinks"),
        ({"keep": np.array([1.5], np.float32)}, "attribute keep"),
    ):
        assert Plugin(harness, params, **override).handle is None
        assert sentence in capfd.readouterr().err


def packed_session(params) -> ort.InferenceSession:
    """Retrieval and attention, as a bundle's graph has them."""
    p = layout.complete(params)
    sizes = {"q": p["q_heads"] * p["key_dim"], "k": p["kv_heads"] * p["key_dim"], "v": p["kv_heads"] * p["value_dim"]}
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, "T", size]) for name, size in sizes.items()]
    inputs += [helper.make_tensor_value_info("position", TensorProto.INT64, [1]), helper.make_tensor_value_info("state", TensorProto.INT8, [layout.state_bytes(p)])]
    names = [i.name for i in inputs]
    if p["fused_rotary"]:
        names += ["cos", "sin"]
        inputs += [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1, "T", p["rotary_dim"] // 2]) for n in ("cos", "sin")]
    given = [*names, *[""] * (7 - len(names))]
    nodes = [
        helper.make_node("SignVQRetrieval", given, ["slots"], domain="edgekv", **p),
        helper.make_node("BoundedCacheAttention", [*given, "slots"], ["y", "state.out"], domain="edgekv", **p),
    ]
    for node in nodes if p["rotary_dim"] else ():
        node.attribute.append(helper.make_attribute("inv_freq", list(INV_FREQ)))
    outputs = [
        helper.make_tensor_value_info("slots", TensorProto.INT32, [p["kv_heads"], "T", "k"]),
        helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, "T", p["q_heads"] * p["value_dim"]]),
        helper.make_tensor_value_info("state.out", TensorProto.INT8, [layout.state_bytes(p)]),
    ]
    graph = helper.make_graph(nodes, "ops", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)], ir_version=10)
    return ort.InferenceSession(model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("half", [False, True])
def test_a_compressed_cache_equals_the_onnx_runtime_ops_in_place(harness, rotates, half):
    """Prompt, retrieving steps and verification blocks, over several compactions: the same slots, the same answers, one state."""
    rotation = {"rotary_dim": 6, "fused_rotary": 1} if rotates else {}
    params = layout.complete(
        make_params("heavy", 96, 32, "fp16", format=1, intervals=64, value_bits=2, sinks=5, window=16, observe=16, key_dim=32, value_dim=32, **rotation)
    )
    retrieval, attention, session = Plugin(harness, params, "SignVQRetrieval"), Plugin(harness, params), packed_session(params)
    assert harness.harness_alias(c_void_p(retrieval.handle), 1) == 2 and harness.harness_alias(c_void_p(retrieval.handle), 0) == -1
    assert harness.harness_alias(c_void_p(attention.handle), 1) == 4
    text, cpu = Text(params, 200), native.LayerParams(**params)
    for name in ("q", "k", "v"):
        setattr(text, name, getattr(text, name).astype(np.float16).astype(np.float32))
    ours, theirs = native.new_state(cpu), native.new_state(cpu)
    for start, rows, retrieve in ((0, 32, 0), (32, 32, 0), (64, 32, 0), (96, 1, 20), (97, 7, 20), (104, 16, 20), (120, 8, 0), (128, 16, 20), (144, 16, 500)):
        part, kind = slice(start, start + rows), np.float16 if half else np.float32
        feeds = {name: np.ascontiguousarray(getattr(text, name)[part].reshape(rows, -1))[None] for name in "qkv"}
        feeds |= {"position": np.array([start], np.int64), "state": theirs.view(np.int8)}
        angle = (np.arange(start, start + rows)[:, None] * np.asarray(INV_FREQ)).astype(np.float32)
        tables = {"cos": np.cos(angle)[None], "sin": np.sin(angle)[None]} if rotates else {}
        for block in (ours, theirs):
            header = block[: layout.HEADER.itemsize].view(layout.HEADER)
            header["retrieve"], header["candidates"] = retrieve, 2 * retrieve
        binding, bound = session.io_binding(), {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in (feeds | tables).items()}
        for name, value in bound.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("slots")
        binding.bind_output("y")
        binding.bind_ortvalue_output("state.out", bound["state"])
        session.run_with_iobinding(binding)
        found, want = (value.numpy() for value in binding.get_outputs()[:2])
        if found.ndim == 4:  # ranked again: scores stand behind a row's slots
            found = found[:, :, 0]

        state, y = ours.view(np.int8), np.full(want.shape, np.nan, kind)
        slots = np.zeros((params["kv_heads"], rows, 3), np.int32)
        q, k, v = (feeds[name].astype(kind) for name in "qkv")
        assert retrieval.enqueue([q, feeds["position"], state, *tables.values()], [slots, state]) == 0
        np.testing.assert_array_equal(slots.view(np.uint32), bits_of(found, 96))
        assert attention.enqueue([q, k, v, feeds["position"], state, *tables.values(), slots], [y, state]) == 0
        np.testing.assert_allclose(y.astype(np.float32), want, atol=4e-3 if half else 2e-3)
        if (start + rows) % 32 == 0:
            for block in (ours, theirs):  # compaction is not the plugin's: the CPU's on both, so that only steps are compared
                native.compact(cpu, block, start + rows, start + rows)
    a, b = layout.StateView(params, ours), layout.StateView(params, theirs)
    np.testing.assert_array_equal(a.body_pos, b.body_pos)


def test_what_a_builder_may_choose_for_a_compressed_cache(harness, capfd):
    params = make_params("full", 64, 32, format=1, intervals=4, key_dim=8, rotary_dim=6, fused_rotary=1)
    retrieval, attention = Plugin(harness, params, "SignVQRetrieval"), Plugin(harness, params)
    f, h, c, i, n = (np.zeros(1, t) for t in (np.float32, np.float16, np.int8, np.int64, np.int32))

    def accepts(plugin, *arrays):
        return harness.harness_accepts(c_void_p(plugin.handle), (Tensor * 10)(*map(Tensor.of, arrays)), len(arrays) - 2, 2)

    assert accepts(retrieval, f, i, c, f, f, n, c) and accepts(retrieval, h, i, c, f, f, n, c)
    assert accepts(attention, h, h, h, i, c, f, f, n, h, c)
    for wrong in ((f, i, c, f, h, n, c), (f, i, c, f, f, f, c), (c, i, c, f, f, n, c), (f, n, c, f, f, n, c), (f, i, f, f, f, n, c)):
        assert not accepts(retrieval, *wrong)
    assert not accepts(attention, h, h, h, i, c, f, f, f, h, c) and not accepts(attention, h, h, h, i, c, f, f, h, c)
    q, where, state, table = np.zeros((1, 4, 3, 8), np.float32), np.zeros(1, np.int64), native.new_state(native.LayerParams(**params)).view(np.int8), np.zeros((1, 3, 3), np.float32)
    slots = np.zeros((2, 3, 2), np.int32)
    assert retrieval.enqueue([q, where, state, table, table], [slots, state]) == 0
    assert retrieval.enqueue([q, where, state, table, table], [slots, state.copy()]) != 0
    assert "SignVQRetrieval: state and its output must be the same memory" in capfd.readouterr().err
    assert retrieval.enqueue([q[:, :3].copy(), where, state, table, table], [slots, state]) != 0
    k, v, y = np.zeros((1, 2, 3, 8), np.float32), np.zeros((1, 2, 3, 6), np.float32), np.zeros((1, 3, 24), np.float32)
    assert attention.enqueue([q, k, v, where, state, table, table, slots], [y, state]) == 0
    assert attention.enqueue([q, k, v, where, state, table, table, slots[:, :2].copy()], [y, state]) != 0
