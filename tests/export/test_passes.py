"""Every graph rule: what the graph computes stays the same, and the nodes it is there to remove are gone."""

import dataclasses
from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import tiny_models
import torch
from onnx_ir.passes.common import RemoveUnusedNodesPass
from transformers import AutoModelForCausalLM

from edgekv import native
from edgekv.engine.onnxruntime import session_options
from edgekv.export import checkpoint, graph, load, trace
from edgekv.export.passes import gelu, heads, linear, match, rms_norm, rotary, siblings
from edgekv.policy import CachePolicy, layer_params

RULES = {"linear": linear, "rms_norm": rms_norm, "gelu": gelu, "rotary": rotary, "heads": heads, "siblings": siblings}
ORDER = list(RULES)


def traced(folder, name):
    source = load.find(str(tiny_models.make(folder / name, name)))
    hollow = checkpoint.ghost(source.config)
    geometry = trace.discover(hollow)
    model = trace.trace(hollow, len(geometry))
    graph.bind(model, checkpoint.match(hollow, source.checkpoint) or checkpoint.load_whole(source.folder, source.config, hollow))
    graph.clean(model)
    return model, geometry


def apply(model, rules):
    """Applies rules in order; returns layer -> rotation when the rotary rule was among them."""
    rotations = {}
    for rule in rules:
        result = RULES[rule].apply(model)
        rotations = result if rule == "rotary" else rotations
        RemoveUnusedNodesPass()(model)
    return rotations


def run(model, geometry, rotations, ids):
    """Logits float32 [T, vocab] of one step on an empty cache."""
    policy = CachePolicy(element="fp32").resolve(32, 32)
    params, inv_freq = [], []
    for index, layer in enumerate(geometry):
        node = next(n for n in match.attentions(model) if n.attributes["layer"].value == index)
        factor = node.attributes["query_factor"].value if "query_factor" in node.attributes else 1.0
        layer = dataclasses.replace(layer, scale=layer.scale * factor)
        if index in rotations:
            found = rotations[index]
            layer = dataclasses.replace(layer, rotary_dim=found.dim, rotary_interleaved=found.interleaved, inv_freq=found.inv_freq)
        params.append(layer_params(policy, layer, index, 32, fused_rotary=index in rotations))
        inv_freq.append(layer.inv_freq)
    graph.set_cache(model, params, inv_freq)
    graph.finish(model)
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString(), session_options(1), providers=["CPUExecutionProvider"])
    binding, zero = session.io_binding(), np.zeros(1, np.int64)
    rows = np.arange(ids.size)
    for name, value in {"input_ids": ids[None], "position": zero, "rows": rows, "shift": zero}.items():
        if name in {given.name for given in session.get_inputs()}:
            binding.bind_cpu_input(name, np.ascontiguousarray(value))
    states = [native.new_state(native.LayerParams(**p)) for p in params]
    for index, state in enumerate(states):
        value = ort.OrtValue.ortvalue_from_numpy(state.view(np.int8))
        binding.bind_ortvalue_input(f"state.{index}", value)
        binding.bind_ortvalue_output(f"state.{index}.out", value)
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[-1].numpy()[0]


def operators(model):
    return Counter(node.op_type for node in model.graph)


# rule -> (a model where it matters, rules that must run before, an operator that gets rarer)
CASES = [
    ("linear", "llama", [], "Transpose"),
    ("linear", "gpt2", [], "Gemm"),
    ("rms_norm", "llama", ["linear"], "ReduceMean"),
    ("rms_norm", "gemma2", ["linear"], "ReduceMean"),
    ("rms_norm", "cohere", ["linear"], "ReduceMean"),
    ("gelu", "gpt2", ["linear"], "Tanh"),
    ("rotary", "llama", ["linear", "rms_norm"], "Neg"),
    ("rotary", "phi", ["linear"], "Neg"),
    ("rotary", "cohere", ["linear", "rms_norm"], "Neg"),
    ("heads", "llama", ["linear", "rms_norm", "rotary"], "Transpose"),
    ("heads", "opt", ["linear"], "Transpose"),
    ("siblings", "llama", ["linear", "rms_norm", "rotary", "heads"], "MatMul"),
    ("siblings", "phi", ["linear", "rotary", "heads"], "MatMul"),
    ("siblings", "phi3", ["linear", "rms_norm", "rotary", "heads"], "Slice"),
]


@pytest.mark.parametrize(("rule", "name", "earlier", "rarer"), CASES, ids=[f"{c[0]}-{c[1]}" for c in CASES])
def test_rule_changes_nodes_but_no_logits(rule, name, earlier, rarer, tmp_path):
    ids = tiny_models.random_text(20)
    plain, geometry = traced(tmp_path, name)
    before = apply(plain, earlier)
    count = operators(plain)[rarer]
    want = run(plain, geometry, before, ids)
    changed, geometry = traced(tmp_path / "again", name)
    rotations = apply(changed, [*earlier, rule]) or before
    assert operators(changed)[rarer] < count
    got = run(changed, geometry, rotations, ids)
    assert np.ptp(want) > 1.0
    np.testing.assert_allclose(got, want, atol=2e-4)


# most nodes from one attention node to the next, all rules applied
MOST_NODES = {"llama": 12, "qwen2": 13, "phi3": 12, "mistral": 12, "gemma2": 14, "gpt2": 14, "opt": 16, "smollm3": 12, "phi": 12, "cohere": 12}


@pytest.mark.parametrize("name", MOST_NODES)
def test_nodes_per_layer(name, tmp_path):
    model, _ = traced(tmp_path, name)
    graph.simplify(model)
    graph.widen(model)
    places = [i for i, node in enumerate(model.graph) if node.op_type == match.ATTENTION]
    assert places[1] - places[0] <= MOST_NODES[name] + 1


def test_frequencies_are_the_models_own(tmp_path):
    for name in ("llama", "llama-yarn", "llama-rope-scaled", "cohere", "phi"):
        model, _ = traced(tmp_path, name)
        rotations = apply(model, ORDER)
        own = AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        inv_freq = next(buffer for key, buffer in own.named_buffers() if key.endswith("inv_freq"))
        assert len(rotations) == 2
        for rotation in rotations.values():
            assert rotation.inv_freq == tuple(inv_freq.tolist())
            assert rotation.interleaved == (name == "cohere")


def test_frequencies_that_the_graph_does_not_use_are_not_believed(tmp_path):
    model, _ = traced(tmp_path, "llama")
    node = next(node for node in model.graph if node.op_type == "Cos")
    doubled = match.node("Mul", [node.inputs[0], match.initialiser(model, "two", np.float32(2.0).reshape(1))], like=node.inputs[0])
    match.before(node, doubled)
    node.replace_input_with(0, doubled.outputs[0])
    rotations = apply(model, ORDER)
    assert len(rotations) == 2 and all(rotation.inv_freq == () for rotation in rotations.values())
