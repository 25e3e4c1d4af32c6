"""The graph that TensorRT gets computes what the bundle computes, from standard operators and our plugin alone."""

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper
from fake_tensorrt import to_cpu_operators
from lowering_models import tiny

from edgekv import layout, native
from edgekv.engine.onnxruntime import OnnxRuntimeEngine, session_options
from edgekv.engine.ring import Ring
from edgekv.errors import UserError
from edgekv.export.to_tensorrt import OPSET, Lowering, attention_params, lower
from edgekv.export.thin.make import KeyOptions
from edgekv.export.thin.ranks import parse as parse_rank
from edgekv.export.to_tensorrt_data import Blocks, Sink, Source
from edgekv.retrieval import candidates_for, parse_retrieval

TOKENS = np.random.default_rng(0).integers(0, 256, 75)
BLOCKS = [(0, 1), (1, 20), (21, 11), (32, 32), (64, 5)]  # token ranges, none across a boundary of 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def test_thin_keys_are_refused():
    node = helper.make_node("BoundedCacheAttention", ["q", "", "", "position", "state"], ["y", "state.out"], domain="edgekv", head_dim=64, key_dim=32)
    work = Lowering(helper.make_model(helper.make_graph([node], "one", [], [])), None, None, False, False)
    with pytest.raises(UserError, match="no GPU kernels"):
        work.rows(node, attention_params(node))


def bundle_logits(bundle) -> np.ndarray:
    engine = OnnxRuntimeEngine(bundle, threads=1, max_rows=32)
    out = []
    for start, count in BLOCKS:
        out.append(engine.step(TOKENS[start : start + count], start, np.arange(count)).copy())
        if (start + count) % 32 == 0:
            engine.compact(start + count)
    engine.close()
    return np.concatenate(out)


def lowered_logits(bundle, graph, half: bool) -> np.ndarray:
    """Runs a lowered graph on ONNX Runtime, whose op takes float32 only: casts go around the attention nodes first."""
    model = to_cpu_operators(onnx.load(graph))
    if half:
        nodes = []
        for node in model.graph.node:
            if node.op_type == "SignVQRetrieval":
                nodes += [helper.make_node("Cast", [node.input[0]], [f"{node.name}.q"], to=TensorProto.FLOAT), node]
                node.input[0] = f"{node.name}.q"
            elif node.op_type == "BoundedCacheAttention":
                for i in range(3):
                    nodes.append(helper.make_node("Cast", [node.input[i]], [f"{node.name}.{i}"], to=TensorProto.FLOAT))
                    node.input[i] = f"{node.name}.{i}"
                y, node.output[0] = node.output[0], f"{node.name}.y"
                nodes += [node, helper.make_node("Cast", [f"{node.name}.y"], [y], to=TensorProto.FLOAT16)]
            else:
                nodes.append(node)
        del model.graph.node[:]
        model.graph.node.extend(nodes)
    session = ort.InferenceSession(model.SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])
    params = [native.LayerParams(**layer["params"]) for layer in bundle.layers]
    states = [native.new_state(p) for p in params]
    inputs, out, shift = {i.name for i in session.get_inputs()}, [], 0
    for start, count in BLOCKS:
        feeds = {
            "input_ids": TOKENS[None, start : start + count], "position": np.array([start]), "rows": np.arange(count),
            "shift": np.array([shift]),
        }  # fmt: skip
        binding = session.io_binding()
        for name, value in feeds.items():
            if name in inputs:
                binding.bind_cpu_input(name, np.ascontiguousarray(value, np.int64))
        for i, state in enumerate(states):
            shared = ort.OrtValue.ortvalue_from_numpy(state.view(np.int8))
            binding.bind_ortvalue_input(f"state.{i}", shared)
            binding.bind_ortvalue_output(f"state.{i}.out", shared)
        binding.bind_output("logits")
        session.run_with_iobinding(binding)
        logits = next(o for o in binding.get_outputs() if o.shape()[-1] == bundle.model["vocab"] and len(o.shape()) == 3)
        out.append(logits.numpy()[0].copy())
        end = start + count
        if end % 32 == 0:
            rank = min(end, max(p.body_slots for p in params)) if params[0].positions else end
            for i, (p, state) in enumerate(zip(params, states)):
                native.compact(p, state, end, rank, np.asarray(bundle.inv_freq(i), np.float32) if p.rotary_dim and p.positions else None)
            shift = end - rank
            for layer, state in zip(bundle.layers, states):
                if layout.is_selfindex(layer["params"]):
                    header = state[: layout.HEADER.itemsize].view(layout.HEADER)
                    header["retrieve"] = parse_retrieval(bundle.manifest["policy"]["retrieve"]).resolve(int(header["body_count"][0]))
                    header["candidates"] = candidates_for(int(header["retrieve"][0]), bundle.manifest["policy"]["rerank"])
    return np.concatenate(out)


CASES = [("llama", weights) for weights in ("fp32", "int4")] + [(n, "int4") for n in ("gpt2", "gemma3_text")]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in (("llama", "int8"), ("llama", "fp16"), ("qwen2", "int4"))]


@pytest.mark.parametrize(("name", "weights"), CASES)
def test_lowered_graphs_compute_the_same(folder, tmp_path, name, weights):
    bundle = tiny(folder, name, weights, positions="cache" if name == "llama" else "original")
    want = bundle_logits(bundle)
    spread = want.std()
    for half in (False, True):
        target = tmp_path / f"half-{half}"
        target.mkdir()
        made = lower(bundle, target, half=half)
        operators = {(n.domain, n.op_type) for n in onnx.load(made.graph, load_external_data=False).graph.node}
        assert {domain for domain, _ in operators} == {"", "edgekv"} and ("", "RMSNormalization") not in operators
        assert (made.int4_matrices > 0) == (half and weights == "int4")
        got = lowered_logits(bundle, made.graph, half)
        # The bundle's own 4- and 8-bit products round activations to 8 bits (accuracy level 4), TensorRT's do not.
        bound = 0.12 if weights in ("int4", "int8") else 0.03 if half else 2e-4
        assert np.abs(got - want).max() <= bound * max(spread, 1) * (4 if bound == 0.12 else 1), (half, np.abs(got - want).max(), spread)


PACKED = {"format": "selfindex", "value_bits": 4, "retrieve": "20", "rerank": 2}


@pytest.mark.parametrize(("name", "weights"), [("llama", "fp32"), ("llama", "int4"), ("gpt2", "fp32")])
def test_a_compressed_cache_is_lowered(folder, tmp_path, name, weights):
    """Retrieval before every attention to a compressed body; one reader per state, so that nothing has to be copied."""
    bundle = tiny(folder, name, weights, "full", **PACKED)
    made = lower(bundle, tmp_path, half=weights != "fp32")
    model = onnx.load(made.graph, load_external_data=False)
    nodes = [n for n in model.graph.node if n.domain == "edgekv"]
    assert [n.op_type for n in nodes] == ["SignVQRetrieval", "BoundedCacheAttention"] * 2
    rotates = name == "llama"
    for index, (search, attend) in enumerate(zip(nodes[::2], nodes[1::2])):
        assert len(search.input) == (5 if rotates else 3) and len(attend.input) == (8 if rotates else 6) and all((*search.input, *attend.input))
        assert search.input[2] == f"state.{index}" and attend.input[4] == search.output[1] and attend.input[-1] == search.output[0]
        for state in (search.input[2], search.output[1]):
            assert sum(state in n.input for n in model.graph.node) == 1
        assert search.attribute == attend.attribute
    splits = [n for n in model.graph.node if n.op_type == "Split" and n.input[1].startswith("trt.split")]
    assert len(splits) in (0, 2)  # packed queries, keys and values are taken apart once
    want, got = bundle_logits(bundle), lowered_logits(bundle, made.graph, weights != "fp32")
    if weights == "fp32":
        assert np.abs(got - want).max() <= 2e-4 * max(want.std(), 1)
    else:  # rounded otherwise, a row now and then retrieves another token
        assert np.abs(got - want).mean() <= 0.1 * want.std()


@pytest.mark.parametrize("packed", [{}, PACKED])
def test_keys_of_fewer_rotary_pairs_are_lowered(folder, tmp_path, packed):
    """Tables with columns for every kv head reach the plugin as they are; without the plugin there is nothing that could read them."""
    keys = KeyOptions(parse_rank("50%"), "pairs", None, 384, 0)
    bundle = tiny(folder, "llama", "fp32", "full" if packed else "window", keys=keys, **packed)
    assert bundle.layers[0]["params"]["fused_rotary"] == layout.BY_HEAD and bundle.layers[0]["params"]["key_dim"] == 8
    want = bundle_logits(bundle)
    for half in (False, True):
        target = tmp_path / f"half-{half}"
        target.mkdir()
        got = lowered_logits(bundle, lower(bundle, target, half=half).graph, half)
        if packed and half:
            assert np.abs(got - want).mean() <= 0.1 * want.std()
        else:
            assert np.abs(got - want).max() <= (0.03 if half else 1e-3 if packed else 2e-4) * max(want.std(), 1)
    with pytest.raises(UserError, match="thin keys cannot be built without edgekv's plugin"):
        Ring(bundle.layers[0]["params"] | ({} if packed else {"format": 0}))


def test_every_node_is_what_a_parser_of_opset_21_knows(folder, tmp_path):
    bundle = tiny(folder, "llama", "int4")
    made = lower(bundle, tmp_path)
    model = onnx.load(made.graph, load_external_data=False)
    assert {o.domain: o.version for o in model.opset_import} == {"": OPSET, "edgekv": 1}
    for node in model.graph.node:
        if node.domain == "":
            assert onnx.defs.get_schema(node.op_type, OPSET, "").since_version <= OPSET
    caches = [n for n in model.graph.node if n.op_type == "BoundedCacheAttention"]
    assert [len(n.input) for n in caches] == [7, 7] and all(all(n.input) for n in caches)
    for node, layer in zip(caches, bundle.layers):
        given = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert given.pop("plugin_namespace") == b"edgekv" and given.pop("plugin_version") == b"1"
        want = layout.complete(layer["params"])
        assert given == pytest.approx(want)
    assert made.weight_bytes == pytest.approx((tmp_path / "model.onnx.data").stat().st_size, rel=0.2)


def test_an_operator_without_translation_is_named(folder, tmp_path):
    bundle = tiny(folder, "gpt2")
    model = onnx.load(bundle.graph_path, load_external_data=False)
    model.graph.node[3].op_type, model.graph.node[3].domain = "Whatever", "com.microsoft"
    onnx.save(model, bundle.graph_path)
    with pytest.raises(UserError, match="com.microsoft::Whatever"):
        lower(bundle, tmp_path)


@pytest.mark.parametrize(("bits", "sums"), [(4, False), (8, False), (4, True)])
def test_blocks_are_split_exactly(tmp_path, bits, sums):
    """(code - 8) s + (8 - zero) s over int4 codes is (code - zero) s, for odd block counts too; and block sums as further columns."""
    random = np.random.default_rng(bits)
    rows, columns = 6, 128 if sums else 96
    count = columns // 32
    codes = random.integers(0, 1 << bits, (rows, columns)).astype(np.uint8)
    zeros = random.integers(0, 1 << bits, (rows, count)).astype(np.uint8)
    scales = random.uniform(0.01, 0.1, (rows, count)).astype(np.float32)
    want = (codes.reshape(rows, count, 32).astype(np.float32) - zeros[..., None]) * scales[..., None]
    if sums:  # three blocks of weights, then one block whose first three numbers belong to one block each
        want = want[:, :3] + want[:, 3, :3, None]

    def pack(x):
        if bits == 8:
            return x
        x = np.pad(x, ((0, 0), (0, x.shape[1] % 2)))
        return x[:, 0::2] | x[:, 1::2] << 4

    with Sink(tmp_path) as sink:
        for name, array in (("codes", pack(codes)), ("zeros", pack(zeros)), ("scales", scales)):
            sink.array(name, array)
    model = helper.make_model(helper.make_graph([], "weights", [], [], [*sink.tensors.values()]))
    blocks = Blocks(Source(model, tmp_path), "codes", "scales", "zeros", columns, bits, sums)
    assert (blocks.columns, blocks.count) == (96, 3)
    np.testing.assert_array_equal(np.concatenate(list(blocks.wide(np.float32))), want.reshape(rows, -1))
    if bits == 4:
        packed = blocks.signed4()
        signed = np.stack([packed & 15, packed >> 4], -1).reshape(96, rows).astype(np.int8)
        signed = np.where(signed > 7, signed - 16, signed).T.reshape(rows, 3, 32)
        again = signed * scales[:, :3, None] + blocks.offsets().T[..., None]
        np.testing.assert_allclose(again, want, atol=1e-6)
