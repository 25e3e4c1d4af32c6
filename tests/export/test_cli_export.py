"""`edgekv export` as a process: exit codes, sentences, and what is left after kills and full disks."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from edgekv.bundle import open_bundle

ENVIRONMENT = {**os.environ, "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}


def start(*arguments, **options):
    command = [sys.executable, "-m", "edgekv", "export", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT, **options)


def run(*arguments, **options):
    process = start(*arguments, **options)
    out, err = process.communicate(timeout=600)
    return process.returncode, out, err


def refusal(*arguments, **options):
    code, _, err = run(*arguments, **options)
    assert code == 2, err
    assert "Traceback" not in err
    return next(line for line in err.splitlines() if line.startswith(("edgekv: ", "Error: ")))


def test_options_reach_the_bundle(llama, tmp_path):
    code, _, err = run(llama, "-o", tmp_path / "made", "--keep", "heavy", "--sinks", 2, "--window", 32, "--score", "attention", "--observe", 16,
                       "--kv-budget", "192tok", "--boundary", 32, "--chunk", 24, "--weights", "int8", "--kv-type", "fp32",
                       "--score-decay", 0.5, "--no-score-normalise", "--context", 300)  # fmt: skip
    assert code == 0, err
    assert "Parity on" in err and "writing weights" in err
    made = open_bundle(tmp_path / "made")
    params = made.layers[0]["params"]
    expected = {"keep": 2, "sinks": 2, "window": 32, "observe": 16, "body_slots": 160, "tail_slots": 32, "element": 0, "positions": 0,
                "score_decay": 0.5, "score_normalise": 0}  # fmt: skip
    assert {name: params[name] for name in expected} == expected
    assert made.chunk == 24 and made.model["context"] == 300
    assert made.manifest["weights"]["format"] == "int8"
    assert made.manifest["policy"]["budget"] == "192tok"
    assert sorted(p.name for p in made.folder.iterdir()) == ["manifest.json", "model.onnx", "model.onnx.data", "tokenizer.json"]
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_existing_bundle_needs_force(llama, llama_bundle, tmp_path):
    target = tmp_path / "made"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    assert "exists already" in refusal(llama, "-o", target)
    assert "is not a bundle" in refusal(llama, "-o", target, "--force")
    assert (target / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--keep", "window"], "needs --kv-budget"),
        (["--keep", "full", "--sinks", "4"], "sinks belong to keep"),
        (["--keep", "window", "--kv-budget", "16tok"], "the smallest that fits is"),
        (["--keep", "window", "--kv-budget", "a lot"], "is not understood"),
        (["--keep", "window", "--kv-budget", "128tok", "--boundary", "30"], "multiple of 16"),
        (["--chunk", "64", "--boundary", "32"], "never crosses a boundary"),
        (["--positions", "cache"], "needs a bounded cache"),
        (["--context", "100000"], "trained for"),
    ],
)
def test_options_that_cannot_be_met(arguments, words, llama, tmp_path):
    assert words in refusal(llama, "-o", tmp_path / "made", *arguments)
    assert list(tmp_path.iterdir()) == []


def test_unwritable_output(llama, tmp_path):
    (tmp_path / "file").write_text("")
    assert "cannot be written" in refusal(llama, "-o", tmp_path / "file" / "made")


def test_disk_that_fills_up(llama, tmp_path):
    def limit():
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writing beyond the limit is then an error like that of a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))

    assert "nothing was left behind" in refusal(llama, "-o", tmp_path / "made", "--weights", "fp32", preexec_fn=limit)
    assert list(tmp_path.iterdir()) == []


def test_too_little_disk_is_said_before_writing(llama, tmp_path, monkeypatch):
    from edgekv.errors import UserError
    from edgekv.export import exporter
    from edgekv.policy import CachePolicy

    monkeypatch.setattr(exporter.shutil, "disk_usage", lambda path: SimpleNamespace(free=1 << 20))
    with pytest.raises(UserError, match="and the disk has 1 MiB free"):
        exporter.export(str(llama), tmp_path / "made", exporter.Options(CachePolicy(), None, check_parity=False))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("number", "code"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)])
def test_stopped_export_leaves_no_bundle(number, code, llama, tmp_path):
    process = start(llama, "-o", tmp_path / "made")
    deadline = time.monotonic() + 300
    while not list(tmp_path.glob(".made.partial-*/model.onnx")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == code
    assert not (tmp_path / "made").exists()
    assert not list(tmp_path.glob("**/manifest.json"))
    left = list(tmp_path.iterdir())
    assert len(left) == (1 if number == signal.SIGKILL else 0)
    returncode, _, err = run(llama, "-o", tmp_path / "made", "--no-parity")
    assert returncode == 0, err
    assert [p.name for p in tmp_path.iterdir()] == ["made"]


def test_tokens_and_template_come_along(llama, llama_bundle):
    manifest = json.loads((llama_bundle.folder / "manifest.json").read_text())
    assert manifest["model"]["bos_token_id"] == 256 and manifest["model"]["eos_token_ids"] == [257]
    assert manifest["model"]["name"] == "llama" and manifest["model"]["architecture"] == "llama"
    assert manifest["generation"] == {}
