"""`edgekv verify`: right kernels pass, wrong ones and wrong engines are reported, and what cannot be checked is named."""

import json

import fake_tensorrt
import numpy as np
import pytest
from click.testing import CliRunner
from fake_tensorrt import FakeDevice
from test_tensorrt_engine import Place, library  # noqa: F401
from tiny_bundle import make

from edgekv import layout
from edgekv.cli.verify import command
from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.engine.tensorrt import TensorRTEngine
from edgekv.verification import checks, comparison


PACKED = {"keep": "full", "kept": 128, "context": 512, "sinks": 12, "cache": "selfindex"}


@pytest.mark.parametrize(
    "how", [{"keep": "full"}, {"keep": "window"}, {"keep": "heavy", "element": "fp32"}, PACKED, PACKED | {"keep": "heavy", "key_bits": 2, "value_bits": 4}], ids=str
)
def test_cpu_and_cuda_kernels_agree_with_the_reference(tmp_path, library, how):  # noqa: F811
    bundle = make(tmp_path / "bundle", **how)
    (params,) = checks.distinct_layers(bundle)
    table = np.asarray(bundle.inv_freq(0), np.float32)
    device = FakeDevice(library)
    for make_cache in (checks.CpuCache, lambda p, t: checks.CudaCache(device, p, t)):
        result = checks.compare_kernels("kernels", params, table, make_cache)
        assert result.passed, result
    assert not device.live


def test_a_wrong_kernel_is_reported(tmp_path):
    class Wrong(checks.CpuCache):
        def attend(self, q, k, v, position):
            return super().attend(q, k, v * (1.0 if position < 40 else 1.1), position)

    bundle = make(tmp_path / "bundle")
    (params,) = checks.distinct_layers(bundle)
    result = checks.compare_kernels("kernels", params, np.asarray(bundle.inv_freq(0), np.float32), Wrong)
    assert result.passed is False and "largest difference" in result.detail


def test_layers_of_one_shape_are_checked_once(tmp_path):
    bundle = make(tmp_path / "bundle", layers=3)
    assert len(checks.distinct_layers(bundle)) == 1
    bundle.layers[2]["params"]["sliding_window"] = 16
    assert [p["sliding_window"] for p in checks.distinct_layers(bundle)] == [0, 16]
    bundle.layers[0]["params"]["body_slots"] = 1 << 20
    assert max(p["body_slots"] for p in checks.distinct_layers(bundle)) == checks.MOST_SLOTS
    assert all(layout.check_params(p) is None for p in checks.distinct_layers(bundle))


def test_engines_that_agree_and_one_that_does_not(tmp_path, library):  # noqa: F811
    place = Place(tmp_path, library)
    feeds = comparison.text_blocks(place.bundle.model["vocab"], place.bundle.boundary, 100)
    assert {len(f["tokens"]) for f in feeds} == set(range(1, comparison.BLOCK + 1)) and sum(len(f["tokens"]) for f in feeds) == 100
    reference = comparison.Comparison(comparison.make_runner("cpu", lambda: OnnxRuntimeEngine(place.bundle), one_by_one=True), feeds)

    def load(**change):
        engine = TensorRTEngine(place.bundle, max_rows=comparison.BLOCK, trt=fake_tensorrt, device=FakeDevice(library))
        for name, value in change.items():
            setattr(engine, name, value(getattr(engine, name)))
        return engine

    result = checks.engine_agrees("engines", reference, load, 0.01)
    assert result.passed and "same best token" in result.detail
    result = checks.engine_agrees("engines", reference, lambda: load(step=lambda step: lambda t, p, r: step(t[::-1] ^ 1, p, r)), 0.01)
    assert result.passed is False

    def broken(tokens, position, rows):
        return np.full((len(rows), place.bundle.model["vocab"]), np.nan, np.float32)

    assert checks.engine_agrees("engines", reference, lambda: load(step=lambda _: broken), 0.01).passed is False
    result = checks.engine_agrees("engines", reference, lambda: TensorRTEngine(place.bundle, tmp_path / "none", trt=fake_tensorrt), 0.01)
    assert result.passed is None and "no engine" in result.detail


def test_the_command_works_without_a_gpu(tmp_path, monkeypatch):
    """ONNX Runtime alone: kernels against the reference, blocks of tokens against single ones; the rest is named."""
    bundle = make(tmp_path / "bundle")
    monkeypatch.setattr(checks, "usable_device", lambda: (None, "no CUDA device (test)"))
    done = CliRunner().invoke(command, [str(bundle.folder), "--json"])
    assert done.exit_code == 0, done.output
    results = json.loads(done.output)
    assert [r["passed"] for r in results] == [True, None, True, None, None]
    assert "no CUDA device" in results[1]["detail"] and "onnxruntime-gpu" in results[3]["detail"] and "no CUDA device" in results[4]["detail"]
    assert "same best token 256 of 256 times" in results[2]["detail"]

    monkeypatch.setitem(checks.TOLERANCE, layout.ELEMENTS["fp16"], 1e-12)
    done = CliRunner().invoke(command, [str(bundle.folder)])
    assert done.exit_code == 1 and "WRONG" in done.output and "not checked" in done.output

    monkeypatch.undo()
    monkeypatch.setattr(comparison, "polygraphy_missing", lambda: True)
    done = CliRunner().invoke(command, [str(bundle.folder)])
    assert done.exit_code == 0 and done.output.count(comparison.MISSING) == 3


@pytest.mark.parametrize("how", [{"keep": "full"}, {"keep": "heavy"}, {"cache": "selfindex", "kept": 64}], ids=str)
def test_every_kind_of_bundle_can_be_verified(tmp_path, how):
    bundle = make(tmp_path / "bundle", **how)
    done = CliRunner().invoke(command, [str(bundle.folder), "--tokens", "80", "--json"])
    assert done.exit_code == 0, done.output
    assert [r["passed"] for r in json.loads(done.output)].count(True) >= 1
