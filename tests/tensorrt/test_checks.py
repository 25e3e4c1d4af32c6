"""`edgekv verify`: right kernels pass, wrong ones and wrong engines are reported, and what cannot be checked is named."""

import json

import fake_tensorrt
import numpy as np
import pytest
from click.testing import CliRunner
from fake_tensorrt import FakeDevice
from test_tensorrt_engine import Place, library  # noqa: F401
from tiny_bundle import make

from edgekv import checks, layout
from edgekv.cli.verify import command
from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.engine.tensorrt import TensorRTEngine


@pytest.mark.parametrize("how", [{"keep": "full"}, {"keep": "window"}, {"keep": "heavy", "element": "fp32"}], ids=str)
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
    theirs = OnnxRuntimeEngine(place.bundle)
    ours = TensorRTEngine(place.bundle, trt=fake_tensorrt, device=FakeDevice(library))
    result = checks.engines_agree("engines", ours, theirs, 100, 0.01)
    assert result.passed and "same best token" in result.detail

    for engine in (ours, theirs):
        engine.reset()
    step = ours.step
    ours.step = lambda tokens, position, rows: step(tokens[::-1] ^ 1, position, rows)
    assert checks.engines_agree("engines", ours, theirs, 100, 0.01).passed is False
    ours.close()
    theirs.close()


def test_the_command_works_without_a_gpu(tmp_path, monkeypatch):
    bundle = make(tmp_path / "bundle")
    monkeypatch.setattr(checks, "usable_device", lambda: (None, "no CUDA device (test)"))
    done = CliRunner().invoke(command, [str(bundle.folder), "--json"])
    assert done.exit_code == 0, done.output
    results = {r["what"].split()[0]: r for r in json.loads(done.output)}
    assert results["CPU"]["passed"] is True and results["CUDA"]["passed"] is None and results["TensorRT"]["passed"] is None
    assert "no CUDA device" in results["CUDA"]["detail"]

    monkeypatch.setitem(checks.TOLERANCE, layout.ELEMENTS["fp16"], 1e-12)
    done = CliRunner().invoke(command, [str(bundle.folder)])
    assert done.exit_code == 1 and "WRONG" in done.output and "not checked" in done.output
