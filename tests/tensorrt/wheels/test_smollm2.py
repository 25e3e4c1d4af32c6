"""A real model, all 30 layers, through the real parser and builder: every policy parses, and engines are built for an absent GPU."""

import sys

import pytest
from plugin_build import ROOT, WHEELS

sys.path.insert(0, str(WHEELS / "rtx"))

import tensorrt_rtx_bindings as trt  # noqa: E402

from edgekv.engine import tensorrt_build  # noqa: E402
from edgekv.engine.tensorrt import make_logger  # noqa: E402
from edgekv.export.exporter import Options, export  # noqa: E402
from edgekv.export.to_tensorrt import lower  # noqa: E402
from edgekv.policy import CachePolicy, parse_budget  # noqa: E402

pytestmark = pytest.mark.slow
GGUF = ROOT / ".cache" / "smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
POLICIES = {
    "full": (CachePolicy(keep="full", positions="original", boundary=64), None),
    "window": (CachePolicy(keep="window", sinks=4, positions="cache", boundary=64), "512tok"),
    "heavy": (CachePolicy(keep="heavy", score="attention", sinks=4, window=128, observe=64, positions="cache", boundary=64), "512tok"),
    "selfindex": (CachePolicy(keep="full", format="selfindex", boundary=64), None),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("smollm2")


def lowered(folder, keep, weights):
    policy, budget = POLICIES[keep]
    budget = parse_budget(budget) if budget else None
    context = 2048 if policy.keep == "full" else None
    bundle = export(str(GGUF), folder / f"{keep}-{weights}", Options(policy, budget, weights, context=context, chunk=64, check_parity=False, force=True))
    target = folder / f"{keep}-{weights}.lowered"
    target.mkdir(exist_ok=True)
    return bundle, lower(bundle, target)


@pytest.mark.parametrize("keep", POLICIES)
@pytest.mark.parametrize("weights", ["fp16", "int4"])
def test_every_policy_parses_and_is_built(folder, plugin, keep, weights):
    """The 8.6 stands in for Orin's 8.7, which this builder does not know. Aliased states are checked by the builder itself."""
    bundle, made = lowered(folder, keep, weights)
    messages: list[str] = []
    logger = make_logger(trt, messages)
    tensorrt_build.load_plugins(trt, plugin)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(made.graph)), messages
    kinds = [network.get_layer(i).type for i in range(network.num_layers)]
    assert kinds.count(trt.LayerType.PLUGIN_V3) == (60 if keep == "selfindex" else 30)  # retrieval and attention
    shapes = {network.get_output(i).name: tuple(network.get_output(i).shape) for i in range(network.num_outputs)}
    assert shapes["logits"] == (1, -1, 49152)
    assert all(shapes[f"state.{i}.out"] == (layer["bytes"],) for i, layer in enumerate(bundle.layers))
    plan = tensorrt_build.build(trt, made.graph, plugin, tensorrt_build.profiles(64, 17), messages=messages, logger=logger, sm=86)
    assert made.int4_matrices == (120 if weights == "int4" else 0)
    # The engine holds the weights: 4-bit ones must not have been widened (106 M parameters in the layers).
    layers = 106e6 * (0.7 if weights == "int4" else 2)
    assert len(plan) > layers and (weights != "int4" or len(plan) < 106e6 * 2 + 2 * 57e6)
