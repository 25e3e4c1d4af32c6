"""The TensorRT engine around a stand-in runtime: the same session code and the same answers as ONNX Runtime, no byte left behind,
and an engine from elsewhere refused with one sentence."""

import json

import fake_tensorrt
import numpy as np
import pytest
from emulated import PLUGINS, build, watched_sources
from fake_tensorrt import FakeDevice
from tiny_bundle import make

from edgekv.bundle import sha256_file
from edgekv.engine import tensorrt_build, tensorrt_manifest
from edgekv.engine.device import Device
from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.engine.tensorrt import RETRIEVING_ROWS, TensorRTEngine
from edgekv.errors import CacheFullError, NativeError, UserError
from edgekv.export.to_tensorrt import lower
from edgekv.export.to_tensorrt_plain import lower_plain
from edgekv.generation.session import Session
from edgekv.retrieval import parse_retrieval


@pytest.fixture(scope="module")
def library():
    sources = [PLUGINS / "cuda/api.cu", PLUGINS / "emulation/emulation.cpp", PLUGINS / "emulation/device.cpp"]
    return build("device", sources, [*watched_sources(), PLUGINS / "trt/device.h"])


class Place:
    """A bundle with an engine beside it, as `edgekv build` leaves them."""

    def __init__(self, folder, library, plugin=True, **how):
        self.bundle, self.library, self.plugin = make(folder / "bundle", **how), library, plugin
        self.folder = tensorrt_manifest.default_folder(self.bundle)
        self.folder.mkdir()
        graph = folder / "lowered"
        graph.mkdir()
        made = (lower if plugin else lower_plain)(self.bundle, graph, half=False)
        (self.folder / tensorrt_manifest.PLAN).write_text(str(made.graph))
        self.describe()

    def describe(self, **change):
        facts = {
            "bundle": tensorrt_manifest.bundle_id(self.bundle), "tensorrt": fake_tensorrt.__version__, "sm": 87, "device": "stand-in",
            "lowering": "plugin" if self.plugin else "standard", "precision": "fp32",
            "plugin": sha256_file(self.library) if self.plugin else None, "profiles": [{"name": "decode", "tokens": 8, "rows": 32}, {"name": "prefill", "tokens": 32, "rows": 32}],
        }  # fmt: skip
        tensorrt_manifest.write(self.folder, facts | change)

    def engine(self, device=None, max_rows=4) -> TensorRTEngine:
        return TensorRTEngine(self.bundle, max_rows=max_rows, trt=fake_tensorrt, device=device or FakeDevice(self.library))


@pytest.fixture
def place(tmp_path, library):
    return Place(tmp_path, library)


def greedy(engine, prompt, count) -> tuple[list[int], list[np.ndarray]]:
    session, out, seen = Session(engine), [], []
    logits = session.feed(prompt)
    for _ in range(count):
        seen.append(np.array(logits).reshape(-1).copy())
        out.append(int(np.argmax(seen[-1])))
        logits = session.feed([out[-1]])
    return out, seen


PROMPT = np.random.default_rng(3).integers(0, 256, 77).tolist()


@pytest.mark.parametrize("how", [{"keep": "full", "kept": 160}, {"keep": "window", "positions": "original"}, {"keep": "window"}, {"keep": "heavy"}], ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_the_same_text_as_onnx_runtime(tmp_path, library, how, graphs):
    place = Place(tmp_path, library, element="fp32", **how)
    reference = OnnxRuntimeEngine(place.bundle, threads=1, max_rows=4)
    device = FakeDevice(library, graphs=graphs)
    engine = place.engine(device)
    want, want_logits = greedy(reference, PROMPT, 60)
    got, logits = greedy(engine, PROMPT, 60)
    np.testing.assert_allclose(np.stack(logits), np.stack(want_logits), atol=2e-3)
    assert got == want
    assert (device.launches > 0) == graphs and (engine.graphs_refused is None) == graphs
    position = len(PROMPT) + 60
    assert engine.occupancy(position) == reference.occupancy(position)
    if how["keep"] != "heavy" and how.get("positions") != "cache" and "positions" in how:
        assert engine.state_hash(position) == reference.state_hash(position)
    first = engine.state_hash(position)
    engine.reset()
    assert greedy(engine, PROMPT, 60)[0] == want and engine.state_hash(position) == first
    engine.close()
    assert not device.live and not device.recorded
    engine.close()  # twice is fine


@pytest.mark.parametrize("how", [{"keep": "full", "kept": 160}, {"keep": "window"}, {"keep": "window", "sliding_window": 24}], ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_the_same_text_without_the_plugin(tmp_path, library, how, graphs):
    """TensorRT's own operators under the host's masks: evictions, verification blocks and rollback give what compaction gives."""
    place = Place(tmp_path, library, plugin=False, element="fp32", positions="original", **how)
    reference = OnnxRuntimeEngine(place.bundle, threads=1, max_rows=4)
    device = FakeDevice(library, graphs=graphs)
    fake_tensorrt.loaded.clear()
    engine = place.engine(device)
    assert not fake_tensorrt.loaded  # no plugin library is handed to TensorRT
    want, want_logits = greedy(reference, PROMPT, 60)
    got, logits = greedy(engine, PROMPT, 60)
    np.testing.assert_allclose(np.stack(logits), np.stack(want_logits), atol=2e-3)
    assert got == want and (device.launches > 0) == graphs
    position = len(PROMPT) + 60
    ours, theirs = engine.occupancy(position), reference.occupancy(position)
    assert ours[1:] == theirs[1:] and ours.allocated == engine.arena.nbytes
    digest = engine.state_hash(position)

    tokens, rows = np.array([3, 5, 7]), np.arange(3)  # a draft that is rejected, then other tokens over it
    for e in (reference, engine):
        e.step(tokens, position, rows)
    np.testing.assert_allclose(engine.step(tokens[::-1].copy(), position, rows), reference.step(tokens[::-1].copy(), position, rows), atol=2e-3)
    assert engine.state_hash(position) == digest != engine.state_hash(position + 1)
    for window in (16, None):
        for e in (reference, engine):
            e.look(window)
        np.testing.assert_allclose(engine.step(tokens, position, rows), reference.step(tokens, position, rows), atol=2e-3)

    engine.reset()
    assert greedy(engine, PROMPT, 60)[0] == want and engine.state_hash(position) == digest
    engine.close()
    assert not device.live and not device.recorded


PACKED = {"keep": "full", "kept": 320, "context": 512, "sinks": 12, "cache": "selfindex", "element": "fp32"}


@pytest.mark.parametrize("how", [{"retrieve": "24"}, {"retrieve": "24", "rerank": 1}, {"retrieve": "all"}, {"retrieve": "24", "keep": "heavy", "kept": 64}], ids=str)
@pytest.mark.parametrize("graphs", [False, True])
def test_a_compressed_cache_gives_the_same_text_as_onnx_runtime(tmp_path, library, how, graphs):
    """Prompt and answer over several compactions by the kernels; the same bytes of the cache at the end."""
    place = Place(tmp_path, library, **(PACKED | how))
    reference = OnnxRuntimeEngine(place.bundle, threads=1, max_rows=4)
    device = FakeDevice(library, graphs=graphs)
    engine = place.engine(device)
    assert str(engine.retrieval) == how["retrieve"]
    want, want_logits = greedy(reference, PROMPT, 60)
    got, logits = greedy(engine, PROMPT, 60)
    np.testing.assert_allclose(np.stack(logits), np.stack(want_logits), atol=2e-3)
    assert got == want and (device.launches > 0) == graphs
    position = len(PROMPT) + 60
    assert engine.occupancy(position) == reference.occupancy(position)
    if how.get("keep") != "heavy":
        assert engine.state_hash(position) == reference.state_hash(position)
    assert engine.reads() == reference.reads()
    first = engine.state_hash(position)
    engine.reset()
    assert greedy(engine, PROMPT, 60)[0] == want and engine.state_hash(position) == first
    engine.close()
    assert not device.live and not device.recorded


def test_retrieving_more_or_less(tmp_path, library):
    """Settings reach the device before the next step, also while it drafts; long blocks go through in parts."""
    place = Place(tmp_path, library, **PACKED, retrieve="24")
    reference, engine = OnnxRuntimeEngine(place.bundle, threads=1, max_rows=32), place.engine(max_rows=32)
    tokens = np.random.default_rng(0).integers(0, 256, 224)
    for e in (reference, engine):
        Session(e).feed(tokens.tolist())
    seen = []
    for amount, rerank, window in (("24", None, None), ("100%", None, None), ("8", 1, None), ("24", 4, None), ("24", 4, 8), ("5%", 2, None)):
        for e in (reference, engine):
            e.retrieve(parse_retrieval(amount), rerank)
            e.look(window)
        for count, rows in ((1, [0]), (7, [6, 0]), (32, list(range(32))), (20, [3, 19, 18]), (20, [2])):
            want = reference.step(tokens[:count], 224, np.array(rows)).copy()
            got = engine.step(tokens[:count], 224, np.array(rows))
            np.testing.assert_allclose(got, want, atol=2e-3)
        seen.append(want)
        np.testing.assert_allclose(engine.read(tokens[:20], 224, np.array([3])), reference.read(tokens[:20], 224, np.array([3])), atol=2e-3)
    assert f"kSideBySideRows = {RETRIEVING_ROWS};" in (PLUGINS / "cuda/rows.cuh").read_text()  # what the kernels take
    assert len({x.tobytes() for x in seen}) == 4  # 24, all, 8 by their codes alone (asked for, and while drafting), 64
    engine.close()


def test_looking_at_a_part_of_the_cache(tmp_path, library):
    """What drafting with the model's own cache asks for: the same cheaper steps as ONNX Runtime, and all of the cache again after."""
    place = Place(tmp_path, library, kept=96, element="fp32")
    reference, engine = OnnxRuntimeEngine(place.bundle, threads=1, max_rows=4), place.engine()
    token, row = np.array([5]), np.array([0])
    for e in (reference, engine):
        Session(e).feed(np.random.default_rng(0).integers(0, 256, 200).tolist())
    whole = engine.step(token, 200, row).copy()
    results = {}
    for window in (16, None):
        for e in (reference, engine):
            e.look(window)
        results[window] = engine.step(token, 200, row).copy()
        np.testing.assert_allclose(results[window], reference.step(token, 200, row), atol=2e-3)
    assert np.abs(results[16] - whole).max() > 1e-3
    np.testing.assert_array_equal(results[None], whole)
    engine.close()


def test_the_protocol_refuses_what_the_cache_cannot_hold(place):
    engine = place.engine()
    for tokens, position, rows in (([1] * 33, 0, [0]), ([1], 0, [0] * 5), ([1, 2], 31, [0]), ([1], 64, [0]), ([], 0, [0])):
        with pytest.raises(NativeError):
            engine.step(np.array(tokens, np.int64), position, np.array(rows))
    engine.close()


def test_a_full_cache_says_so(tmp_path, library):
    engine = Place(tmp_path, library, keep="full", kept=32).engine()
    for start in (0, 32):
        engine.step(np.zeros(32, np.int64), start, np.array([0]))
        if start == 0:
            engine.compact(32)
    with pytest.raises(CacheFullError):
        engine.compact(64)
    assert engine.capacity == 64
    engine.close()


def test_pain_18_one_large_block_refused_falls_back_to_one_per_layer(place):
    """Fragmented memory: the arena as a whole does not fit, its layers do. The answers stay the same."""
    largest = max(layer["bytes"] for layer in place.bundle.layers) + 4096
    assert largest < place.bundle.arena_bytes
    whole, pieces = place.engine(), place.engine(FakeDevice(place.library, largest=largest))
    assert whole.contiguous and not pieces.contiguous
    assert greedy(whole, PROMPT, 20)[0] == greedy(pieces, PROMPT, 20)[0]
    np.testing.assert_array_equal(whole.arena, pieces.arena)
    for engine in (whole, pieces):
        engine.close()


def test_memory_that_is_not_there_is_a_sentence_and_nothing_stays_allocated(place):
    device = FakeDevice(place.library, largest=1000)
    with pytest.raises(UserError, match="layer by layer"):
        place.engine(device)
    assert not device.live
    device = FakeDevice(place.library, free=1000)
    with pytest.raises(UserError, match="are free"):
        place.engine(device)
    assert not device.live


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"sm": 110, "device": "Thor"}, r"built for Thor \(compute capability 11.0\), this one has 8.7"),
        ({"tensorrt": "10.13.3"}, "built with TensorRT 10.13.3, here is 10.3.0"),
        ({"bundle": "0" * 64}, "another version of"),
        ({"plugin": "0" * 64}, "another build of edgekv's plugin"),
        ({"version": 9}, "no engine that this edgekv reads"),
        ({"profiles": None}, "'profiles' is missing"),
        ({"lowering": None}, "does not say whether the engine needs the plugin"),
        ({"plugin": None}, "does not say whether the engine needs the plugin"),
    ],
)
def test_pain_08_an_engine_from_elsewhere_is_refused(place, change, sentence):
    place.describe(**change)
    if "version" in change:
        path = place.folder / tensorrt_manifest.DESCRIPTION
        path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=sentence):
        place.engine()


def test_damage_is_refused(place):
    plan = place.folder / tensorrt_manifest.PLAN
    good = plan.read_bytes()
    plan.write_bytes(b"x" + good[1:])
    with pytest.raises(UserError, match="damaged"):
        place.engine()
    plan.write_bytes(b"no plan at all")
    place.describe()
    with pytest.raises(UserError, match="cannot load .*this is no plan"):
        place.engine()
    (place.folder / tensorrt_manifest.DESCRIPTION).write_text("{")
    with pytest.raises(UserError, match="damaged"):
        place.engine()
    plan.unlink()
    (place.folder / tensorrt_manifest.DESCRIPTION).unlink()
    with pytest.raises(UserError, match="edgekv build"):
        place.engine()


def test_more_rows_than_the_engine_was_built_for(place):
    with pytest.raises(UserError, match="--rows 40"):
        place.engine(max_rows=40)


def test_no_gpu_is_a_sentence(place):
    with pytest.raises(UserError, match="no CUDA device"):
        place.engine(Device(place.library))


def test_without_the_plugin_an_older_tensorrt_is_refused():
    for version, with_plugin, sentence in (
        ("10.2.0", True, "10.3 or newer is needed"), ("10.14.1", False, "10.15 or newer is needed .* leave out --no-plugin"),
        ("10.14.1", True, None), ("10.15.1", False, None), ("11.4.0", False, None),
    ):  # fmt: skip
        here = type("Bindings", (), {"__name__": "tensorrt", "__version__": version})
        if sentence is None:
            tensorrt_build.check_version(here, with_plugin)
        else:
            with pytest.raises(UserError, match=sentence):
                tensorrt_build.check_version(here, with_plugin)
