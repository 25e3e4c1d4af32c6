"""`edgekv build` with a real NVIDIA parser and builder (TensorRT-RTX, which builds for a GPU that is not there)."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from plugin_build import ROOT, WHEELS

sys.path.insert(0, str(WHEELS / "rtx"))

import tensorrt_rtx_bindings as trt  # noqa: E402
from lowering_models import SHAPES, tiny  # noqa: E402

from edgekv import bundle as bundles  # noqa: E402
from edgekv import machine  # noqa: E402
from edgekv.cli import build  # noqa: E402
from edgekv.engine import tensorrt_build, tensorrt_manifest  # noqa: E402
from edgekv.engine.tensorrt import make_logger  # noqa: E402
from edgekv.export.to_tensorrt import lower  # noqa: E402


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return tmp_path_factory.mktemp("models")


def run(*arguments) -> tuple[int, str]:
    """The command with its own error handling: sentences on standard error, exit code 2."""
    done = subprocess.run(
        [sys.executable, "-m", "edgekv", "build", *map(str, arguments)], capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": f"{WHEELS / 'rtx'}:{ROOT}"},
    )  # fmt: skip
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("name", "weights", "keep"), [("llama", "int4", "window"), ("gpt2", "fp16", "full"), ("gemma3_text", "int4", "heavy")])
def test_an_engine_is_built_and_described(models, tmp_path, plugin, name, weights, keep):
    bundle = tiny(models, name, weights, keep)
    target = tmp_path / "engine"
    times = models / f"{name}.times"
    code, text = run(bundle.folder, "-o", target, "--rtx", "--sm", 86, "--plugin", plugin, "--timing-cache", times, "--workspace", "64MiB")
    assert code == 0, text
    assert times.stat().st_size > 0
    facts = tensorrt_manifest.read(target)
    assert facts["sm"] == 86 and facts["tensorrt"] == trt.__version__ and facts["precision"] == ("int4w" if weights == "int4" else "fp16")
    assert [p["name"] for p in facts["profiles"]] == ["decode", "prefill"] and facts["profiles"][1]["tokens"] == 32
    assert {p.name for p in tmp_path.iterdir()} == {"engine"} and {p.name for p in target.iterdir()} == {"engine.plan", "engine.json"}
    assert (target / "engine.plan").stat().st_size > 10_000
    code, text = run(bundle.folder, "-o", target, "--rtx", "--sm", 86, "--plugin", plugin)
    assert code == 2 and "--force" in text


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_and_aliasing_as_tensorrt_sees_them(models, tmp_path, plugin, name):
    """Parsed by the real parser: the logits' shape follows T and R, states keep theirs, all caches are our plugin's."""
    bundle = tiny(models, name)
    made = lower(bundle, tmp_path)
    messages: list[str] = []
    logger = make_logger(trt, messages)
    tensorrt_build.load_plugins(trt, plugin)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(made.graph)), messages
    outputs = {network.get_output(i).name: network.get_output(i) for i in range(network.num_outputs)}
    assert tuple(outputs["logits"].shape) == (1, -1, 260) and outputs["logits"].dtype == trt.float32
    for index, layer in enumerate(bundle.layers):
        assert tuple(outputs[f"state.{index}.out"].shape) == (layer["bytes"],) and outputs[f"state.{index}.out"].dtype == trt.int8
    caches = [network.get_layer(i) for i in range(network.num_layers) if network.get_layer(i).type == trt.LayerType.PLUGIN_V3]
    assert len(caches) == len(bundle.layers)


@pytest.mark.parametrize("keep", ["full", "heavy"])
def test_a_compressed_cache_is_built(models, tmp_path, plugin, keep):
    """Both plugins of a layer, the state passing through retrieval into attention: accepted by the real parser and builder."""
    bundle = tiny(models, "llama", "int4", keep, format="selfindex", retrieve="20")
    made = lower(bundle, tmp_path)
    messages: list[str] = []
    logger = make_logger(trt, messages)
    tensorrt_build.load_plugins(trt, plugin)
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(made.graph)), messages
    plugins = [network.get_layer(i) for i in range(network.num_layers) if network.get_layer(i).type == trt.LayerType.PLUGIN_V3]
    assert len(plugins) == 2 * len(bundle.layers)
    for search, layer in zip(plugins[::2], bundle.layers):
        p = layer["params"]
        slots, state = search.get_output(0), search.get_output(1)
        assert tuple(slots.shape) == (p["kv_heads"], -1, p["body_slots"] // 32) and slots.dtype == trt.int32
        assert tuple(state.shape) == (layer["bytes"],) and state.dtype == trt.int8
    code, text = run(bundle.folder, "-o", tmp_path / "engine", "--rtx", "--sm", 86, "--plugin", plugin)
    assert code == 0, text
    assert (tmp_path / "engine" / "engine.plan").stat().st_size > 10_000


def test_without_the_preview_feature_aliasing_is_refused(models, tmp_path, plugin, monkeypatch):
    """TensorRT checks that the state is updated in place; the feature our build asks for is what allows it."""
    bundle = tiny(models, "llama")
    made = lower(bundle, tmp_path)

    class Without:
        PreviewFeature = type("PreviewFeature", (), {})
        __name__, __version__ = trt.__name__, trt.__version__

        def __getattr__(self, name):
            return getattr(trt, name)

    messages: list[str] = []
    with pytest.raises(Exception, match="(?i)alias"):
        tensorrt_build.build(
            Without(), made.graph, plugin, tensorrt_build.profiles(32, 4), messages=messages, logger=make_logger(trt, messages), sm=86
        )


def test_pain_06_operators_that_nobody_offers_are_named_before_the_build(models, tmp_path, plugin):
    """The pain this answers: "plugin not found", deep in a build log."""
    import onnx

    bundle = tiny(models, "llama")
    made = lower(bundle, tmp_path)
    model = onnx.load(made.graph, load_external_data=False)
    model.graph.node[0].op_type = "NoSuchOperator"
    next(n for n in model.graph.node if n.op_type == "BoundedCacheAttention").op_type = "OtherCache"
    onnx.save(model, made.graph)
    messages: list[str] = []
    with pytest.raises(bundles.UserError, match="NoSuchOperator, edgekv::OtherCache"):
        tensorrt_build.build(trt, made.graph, plugin, [], messages=messages, logger=make_logger(trt, messages), sm=86)


def test_pain_01_too_little_memory_or_disk_is_said_before_the_build(models, tmp_path, plugin, monkeypatch):
    bundle = tiny(models, "llama")
    place = build.Place.find(True, 86, plugin)
    made = lower(bundle, tmp_path)
    monkeypatch.setattr(machine, "available_memory", lambda: 500 << 20)
    with pytest.raises(bundles.UserError, match="Building needs about 0.9 GB of memory and 0.5 GB are available on this machine"):
        build.preflight(place, made, bundle, tmp_path, None, False)
    summary = build.preflight(place, made, bundle, tmp_path, None, True)
    assert summary.startswith(f"TensorRT {trt.__version__}, a device of compute capability 8.6; weights") and "building takes about" in summary
    monkeypatch.undo()
    monkeypatch.setattr(build.shutil, "disk_usage", lambda path: type("Usage", (), {"free": 1 << 20})())
    with pytest.raises(bundles.UserError, match="of disk and 1 MB are free"):
        build.preflight(place, made, bundle, tmp_path, None, False)
    monkeypatch.undo()
    assert "on orin-nano-8gb" in build.preflight(place, made, bundle, tmp_path, "orin-nano-8gb", False)


def test_the_memory_estimate_is_above_the_peak(models, tmp_path, plugin):
    """Measured in a process of its own; the fixed part dominates for a tiny model (docs/tensorrt.md has a real one)."""
    bundle = tiny(models, "llama")
    made = lower(bundle, tmp_path)
    script = f"""
import resource, sys
sys.path[:0] = [{str(WHEELS / "rtx")!r}, {str(ROOT)!r}]
import tensorrt_rtx_bindings as trt
from pathlib import Path
from edgekv.engine import tensorrt_build as b
from edgekv.engine.tensorrt import make_logger
messages = []
b.build(trt, Path({str(made.graph)!r}), Path({str(plugin)!r}), b.profiles(32, 4), messages=messages, logger=make_logger(trt, messages), sm=86)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    peak, estimate = int(done.stdout), tensorrt_build.estimated_peak(made.weight_bytes)
    assert peak < estimate < 3 * peak


def test_pain_01_a_killed_build_leaves_nothing_that_looks_like_an_engine(models, tmp_path, plugin):
    bundle = tiny(models, "llama")
    target = tmp_path / "engine"
    command = [sys.executable, "-m", "edgekv", "build", str(bundle.folder), "-o", str(target), "--rtx", "--sm", "86", "--plugin", str(plugin)]
    child = subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": f"{WHEELS / 'rtx'}:{ROOT}"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".engine.partial-*/graph/model.onnx")):
        assert child.poll() is None and time.monotonic() < deadline, "the build ended before it could be killed"
        time.sleep(0.01)
    child.send_signal(signal.SIGKILL)
    child.wait()
    assert not target.exists()
    with pytest.raises(bundles.UserError, match="no engine"):
        tensorrt_manifest.read(target)
    code, text = run(bundle.folder, "-o", target, "--rtx", "--sm", 86, "--plugin", plugin)
    assert code == 0, text
    assert {p.name for p in tmp_path.iterdir()} == {"engine"}  # the killed build's leftovers are gone too


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--rtx"], "--rtx and --sm belong together"),
        (["--rtx", "--sm", "86", "--precision", "int8"], "8-bit weights"),
        (["--rtx", "--sm", "86", "--precision", "int4w"], "needs `edgekv export --weights int4`"),
        (["--rtx", "--sm", "86", "--plugin", "/no/such.so"], "has not been built"),
        (["--rtx", "--sm", "86", "--workspace", "10tok"], "takes bytes"),
        (["--rtx", "--sm", "86", "--no-plugin", "--plugin", "x.so"], "exclude each other"),
        ([], "TensorRT's Python bindings are missing"),
    ],
)
def test_wrong_options_are_one_sentence(models, tmp_path, arguments, sentence):
    bundle = tiny(models, "llama")
    code, text = run(bundle.folder, "-o", tmp_path / "engine", *arguments)
    assert code == 2 and sentence in text and "Traceback" not in text
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_no_engine_is_never_replaced(models, tmp_path, plugin):
    bundle = tiny(models, "llama")
    target = tmp_path / "precious"
    target.mkdir()
    (target / "thesis.txt").write_text("years of work")
    code, text = run(bundle.folder, "-o", target, "--rtx", "--sm", 86, "--plugin", plugin, "--force")
    assert code == 2 and "is not an engine" in text and (target / "thesis.txt").read_text() == "years of work"


def test_pain_09_a_bundle_is_built_where_it_was_carried_to(models, tmp_path, plugin):
    """Exported on one machine, copied, built from the copy alone; what was measured is kept for the next build."""
    bundle = tiny(models, "llama", "int4")
    carried, times = tmp_path / "carried", tmp_path / "times"
    shutil.copytree(bundle.folder, carried)
    assert str(models).encode() not in (carried / "manifest.json").read_bytes() + (carried / "model.onnx").read_bytes()
    code, text = run(carried, "--rtx", "--sm", 86, "--plugin", plugin, "--timing-cache", times)
    assert code == 0, text
    measured = times.read_bytes()
    code, text = run(carried, "--rtx", "--sm", 86, "--plugin", plugin, "--timing-cache", times, "--force")
    assert code == 0 and len(times.read_bytes()) == len(measured) > 0, text
    assert tensorrt_manifest.read(tmp_path / "carried.engine")["bundle"] == tensorrt_manifest.bundle_id(bundle)
    times.write_bytes(b"from another version")  # measured anew, not a failure
    code, text = run(carried, "--rtx", "--sm", 86, "--plugin", plugin, "--timing-cache", times, "--force")
    assert code == 0, text


def test_pain_27_attention_with_cache_outputs_is_what_the_parser_rejects(tmp_path):
    """Why neither lowering uses past and present: the real parser says no to them, in a sentence that names the node."""
    import onnx
    from onnx import TensorProto, helper

    shapes = {"q": (1, 4, 2, 16), "k": (1, 2, 2, 16), "v": (1, 2, 2, 16), "past_k": (1, 2, 6, 16), "past_v": (1, 2, 6, 16)}
    outputs = {"y": (1, 4, 2, 16), "new_k": (1, 2, 8, 16), "new_v": (1, 2, 8, 16)}

    def refusal(with_cache: bool) -> str | None:
        given = [*list(shapes)[:3], "", *list(shapes)[3:]] if with_cache else list(shapes)[:3]
        made = list(outputs) if with_cache else ["y"]
        values = [helper.make_tensor_value_info(n, TensorProto.FLOAT16, s) for n, s in (shapes | outputs).items()]
        ins, outs = ([v for v in values if v.name in names] for names in (given, made))
        graph = helper.make_graph([helper.make_node("Attention", given, made, name="the_attention")], "cache", ins, outs)
        path = tmp_path / f"{with_cache}.onnx"
        onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10), path)
        messages: list[str] = []
        logger = make_logger(trt, messages)
        network = trt.Builder(logger).create_network(0)
        parser = trt.OnnxParser(network, logger)
        return None if parser.parse_from_file(str(path)) else parser.get_error(0).desc()

    assert refusal(with_cache=False) is None
    assert refusal(with_cache=True)


@pytest.mark.parametrize(("name", "weights", "keep"), [("llama", "int4", "window"), ("gemma3_text", "fp16", "full")])
def test_an_engine_without_the_plugin_is_built_and_described(models, tmp_path, name, weights, keep):
    bundle = tiny(models, name, weights, keep)
    target = tmp_path / "engine"
    code, text = run(bundle.folder, "-o", target, "--rtx", "--sm", 86, "--no-plugin")
    assert code == 0, text
    facts = tensorrt_manifest.read(target)
    assert facts["lowering"] == "standard" and facts["plugin"] is None and facts["precision"] == ("int4w" if weights == "int4" else "fp16")


@pytest.mark.parametrize(
    ("how", "sentence"),
    [({"keep": "heavy"}, "Heavy hitters need edgekv's plugin"), ({"positions": "cache"}, "export with --positions original")],
)
def test_what_needs_the_plugin_is_refused_before_anything_is_prepared(models, tmp_path, how, sentence):
    bundle = tiny(models, "llama", **how)
    code, text = run(bundle.folder, "-o", tmp_path / "engine", "--rtx", "--sm", 86, "--no-plugin")
    assert code == 2 and sentence in text and text.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "weights", "keep"), [("llama", "int4", "window"), ("gemma3_text", "fp16", "full")])
def test_the_lowering_without_the_plugin_is_parsed_and_built(models, tmp_path, name, weights, keep):
    """TensorScatter updates each cache in place, Attention sees it under the host's mask; no library of ours is loaded."""
    from edgekv.export.to_tensorrt_plain import lower_plain

    bundle = tiny(models, name, weights, keep)
    made = lower_plain(bundle, tmp_path)
    messages, said = [], []
    logger = make_logger(trt, messages)
    plan = tensorrt_build.build(
        trt, made.graph, None, tensorrt_build.profiles(32, 4), messages=messages, logger=logger, sm=86, masks=made.masks,
        progress=said.append,
    )  # fmt: skip
    assert len(plan) > 10_000 and said and all(re.fullmatch(r".+, \d+ of \d+", line) for line in said), said
    network = trt.Builder(logger).create_network(0)
    parser = trt.OnnxParser(network, logger)
    assert parser.parse_from_file(str(made.graph)), messages
    outputs = {network.get_output(i).name: tuple(network.get_output(i).shape) for i in range(network.num_outputs)}
    inputs = {network.get_input(i).name: tuple(network.get_input(i).shape) for i in range(network.num_inputs)}
    for i in range(2):
        assert outputs[f"k.{i}.out"] == inputs[f"k.{i}"] and outputs[f"v.{i}.out"] == inputs[f"v.{i}"]
