"""ONNX Runtime with the CUDA ops, over the emulation: the session's text, its reports and its memory are those of the CPU engine."""

import numpy as np
import onnxruntime
import ort_cuda
import pytest
from fake_tensorrt import FakeDevice
from tiny_bundle import make

from edgekv import engine, errors, layout
from edgekv.cli import doctor
from edgekv.engine import onnxruntime_cuda
from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.engine.onnxruntime_cuda import OnnxRuntimeCudaEngine
from edgekv.generation.session import Session

PROMPT = np.random.default_rng(3).integers(0, 256, 77).tolist()


@pytest.fixture(scope="module")
def cuda():
    return ort_cuda.library()


def open_engine(bundle, device, max_rows=4):
    return OnnxRuntimeCudaEngine(bundle, max_rows, device=device, providers=["CPUExecutionProvider"], place="cpu")


def greedy(running, count) -> tuple[list[int], np.ndarray]:
    session, out, seen = Session(running), [], []
    logits = session.feed(PROMPT)
    for _ in range(count):
        seen.append(np.array(logits).reshape(-1).copy())
        out.append(int(np.argmax(seen[-1])))
        logits = session.feed([out[-1]])
    return out, np.stack(seen)


@pytest.mark.parametrize("how", [{"keep": "full", "kept": 160}, {"keep": "window", "positions": "original"}, {"keep": "window"}, {"keep": "heavy"}], ids=str)
def test_the_text_and_the_state_of_the_cpu_engine(tmp_path, cuda, how):
    bundle = make(tmp_path / "bundle", element="fp32", **how)
    device = FakeDevice(cuda)
    ours, theirs = open_engine(bundle, device), OnnxRuntimeEngine(bundle, threads=1, max_rows=4)
    got, want = greedy(ours, 50), greedy(theirs, 50)
    assert got[0] == want[0] and ours.observe == theirs.observe
    np.testing.assert_allclose(got[1], want[1], atol=2e-3)
    position = len(PROMPT) + 50
    assert ours.occupancy(position) == theirs.occupancy(position) and ours.arena.nbytes == theirs.arena.nbytes
    start = 0
    for layer in bundle.layers:  # rotations differ in the last bit
        views = [layout.StateView(layout.complete(layer["params"]), arena[start : start + layer["bytes"]]) for arena in (ours.arena, theirs.arena)]
        for plane in ("body_pos", "body_k", "body_v", "tail_k", "tail_v"):
            np.testing.assert_allclose(*(np.asarray(getattr(view, plane), np.float64) for view in views), atol=2e-5, err_msg=plane)
        start += -(-layer["bytes"] // 256) * 256
    digest = ours.state_hash(position)
    rows, tokens = np.arange(1), np.array([3])
    ours.look(16), theirs.look(16)
    np.testing.assert_allclose(ours.step(tokens, position, rows), theirs.step(tokens, position, rows), atol=2e-3)
    ours.reset()
    assert greedy(ours, 50)[0] == want[0] and ours.state_hash(position) == digest
    for call in (lambda: ours.step(np.zeros(0, np.int64), 0, rows), lambda: ours.step(np.zeros(40, np.int64), 128, rows)):
        with pytest.raises(errors.NativeError):
            call()
    ours.close()
    assert not device.live


def test_too_little_device_memory_is_a_sentence(tmp_path, cuda):
    with pytest.raises(errors.UserError, match="of device memory .* are free"):
        open_engine(make(tmp_path / "bundle"), FakeDevice(cuda, free=1000))


def test_the_gpu_is_used_when_everything_is_there_and_else_the_reason_is_known(tmp_path, cuda, monkeypatch):
    bundle = make(tmp_path / "bundle")
    assert "onnxruntime-gpu" in onnxruntime_cuda.refusal(bundle)  # this environment has the package for CPUs
    works, said = doctor._onnxruntime_cuda()
    assert works is False and "onnxruntime-gpu" in said
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"])
    monkeypatch.setattr(onnxruntime_cuda, "Device", lambda: FakeDevice(cuda))
    assert onnxruntime_cuda.refusal(bundle) is None and doctor._onnxruntime_cuda()[0] is True
    monkeypatch.setattr(onnxruntime_cuda, "OnnxRuntimeCudaEngine", lambda bundle, max_rows: ("gpu", max_rows))
    assert engine.load(bundle, max_rows=3) == ("gpu", 3)
    assert "compressed" in onnxruntime_cuda.refusal(make(tmp_path / "packed", cache="selfindex", kept=64))
    monkeypatch.setattr(FakeDevice, "info", lambda self: {"count": 0, "reason": "driver too old"})
    assert onnxruntime_cuda.refusal(bundle) == "no CUDA device (driver too old)"
    assert isinstance(engine.load(bundle), OnnxRuntimeEngine)
