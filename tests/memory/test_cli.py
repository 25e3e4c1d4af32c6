"""`edgekv devices` and `edgekv profile` as commands: what they print, write and refuse."""

from __future__ import annotations

import json
import re
import xml.dom.minidom

import pytest
import tiny_bundle
import yaml
from memory_shapes import PUBLISHED, SMOLLM2
from running import edgekv, refused  # noqa: F401

from edgekv.memory import profiles


@pytest.fixture
def model(tmp_path):
    """model(name) -> a folder with nothing but a config.json."""

    def make(name):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(SMOLLM2 if name == "smollm2" else PUBLISHED[name]))
        return folder

    return make


def output(done):
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode()


def test_devices_lists_every_profile(edgekv):  # noqa: F811
    text = output(edgekv("devices"))
    assert all(name in text for name in profiles.known())
    assert {p["name"] for p in json.loads(output(edgekv("devices", "--json")))} == set(profiles.known())


def test_show_prints_every_figure_with_its_source(edgekv):  # noqa: F811
    text = output(edgekv("devices", "show", "orin-nano:15W"))
    assert "gpu.l2" in text and "unsure" in text and "In power mode 15W: 68.3 GB/s" in text and "10.16.2" in text
    assert json.loads(output(edgekv("devices", "show", "agx-thor", "--json")))["name"] == "agx-thor"


@pytest.mark.slow
def test_detected_profile_can_be_used_at_once(edgekv, tmp_path, model):  # noqa: F811
    file = tmp_path / "mine.yaml"
    done = edgekv("devices", "detect", "-o", file)
    assert done.returncode == 0, done.stderr.decode()
    profile = profiles.load_file(file)
    assert profile.value("memory.measured_bandwidth") > 0.5 and profile.last_level_bytes and profile.cores
    assert profile.data["calibration"]["weight_rate"]["int4"]["confidence"] == "measured"
    text = output(edgekv("profile", model("smollm2"), "--device", file, "--context", 4096))
    assert "rates measured on this device" in text and "arithmetic rate measured" in text


def test_detect_keeps_a_file_that_is_there(refused, tmp_path):  # noqa: F811
    (tmp_path / "mine.yaml").write_text("x")
    assert "--force" in refused("devices", "detect", "-o", tmp_path / "mine.yaml", "--no-calibrate")
    assert (tmp_path / "mine.yaml").read_text() == "x"


def test_profile_from_a_config_alone(edgekv, model):  # noqa: F811
    text = output(edgekv("profile", model("llama-3.2-3b"), "-d", "orin-nano-8gb"))
    for words in ("3213 million parameters", "114688 KV bytes per token", "KV body", "it fits", "Largest single allocation", "Building an engine",
                  "Longest context", "tokens/s", "t0 2.15 ms, 86%", "reading the weights", "All figures are modelled"):  # fmt: skip
        assert words in text, words


def test_profile_compares_devices_and_offers_a_command(edgekv, model):  # noqa: F811
    folder = model("llama-3.2-3b")
    text = output(edgekv("profile", folder, "-d", "orin-nano-8gb", "-d", "agx-thor", "-d", "pi5", "--memory", "8GiB", "--fit", "context=32k"))
    assert "orin-nano-8gb" in text and "agx-thor" in text and "raspberry-pi-5" in text
    assert len(re.findall(r"edgekv export \S*llama-3.2-3b -o \S+ --weights int4 --keep \w+ .*--context 32768", text)) == 3


def test_profile_json_and_charts_agree(edgekv, model, tmp_path):  # noqa: F811
    quality = tmp_path / "quality.json"
    quality.write_text(json.dumps([{"name": f"p{i}", "kv_bytes": i << 20, "quality": q} for i, q in enumerate((0.5, 0.4, 0.9), 1)]))
    page, pictures = tmp_path / "a.html", tmp_path / "png"
    made = json.loads(output(edgekv("profile", model("smollm2"), "-d", "n150", "--memory", "8GiB", "--keep", "heavy", "--kv-budget", "512tok",
                                    "--json", "--html", page, "--png", pictures, "--quality", quality)))  # fmt: skip
    device = made["devices"][0]
    assert device["memory"]["needed"] == sum(line["bytes"] for line in device["memory"]["lines"])
    assert device["cache"]["capacity"] <= 512 and device["memory"]["fits"] is True
    text = page.read_text()
    figures = re.findall(r'<figure id="([^"]+)"', text)
    assert figures == ["memory-n150", "speed", "roofline-n150", "pareto"]
    for svg in re.findall(r"<svg .*?</svg>", text, re.S):
        xml.dom.minidom.parseString(svg)
    assert sorted(f.name for f in pictures.iterdir()) == sorted(f"{name}.png" for name in figures)
    assert all(f.read_bytes()[:4] == b"\x89PNG" for f in pictures.iterdir())


def test_profile_of_a_bundle_uses_its_real_cache_and_files(edgekv, tmp_path):  # noqa: F811
    bundle = tiny_bundle.make(tmp_path / "b", keep="window")
    device = json.loads(output(edgekv("profile", bundle.folder, "-d", "n150", "--memory", "8GiB", "--json")))["devices"][0]
    assert device["cache"]["arena_bytes"] == bundle.arena_bytes
    assert next(line["bytes"] for line in device["memory"]["lines"] if line["owner"] == "weights") >= bundle.weight_bytes


def test_hostile_names_stay_text(edgekv, tmp_path):  # noqa: F811
    folder = tmp_path / "<script>alert(1)<"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SMOLLM2))
    output(edgekv("profile", folder, "-d", "n150", "--html", tmp_path / "a.html"))
    assert "<script>" not in (tmp_path / "a.html").read_text()


def test_unknown_device_names_the_nearest(refused, model):  # noqa: F811
    assert "nearest: orin-nano" in refused("profile", model("smollm2"), "-d", "orin-nanoo")
    assert "nearest: raspberry-pi-5" in refused("devices", "show", "raspberrypi5")


def test_model_that_cannot_fit_is_told_what_would(refused, model):  # noqa: F811
    assert "use --weights int8" in refused("profile", model("llama-3.2-3b"), "-d", "orin-nano-8gb", "--weights", "fp16", "--context", "4096")
    assert "a device with at least" in refused("profile", model("llama-2-70b"), "-d", "orin-nano-8gb", "--context", "4096")


def test_budget_over_usable_memory_is_told_the_one_that_fits(refused, model):  # noqa: F811
    sentence = refused("profile", model("llama-3.2-3b"), "-d", "orin-nano-8gb", "--keep", "window", "--kv-budget", "6GiB", "--context", "131072")
    assert re.search(r"a KV budget of up to \d+MiB fits", sentence)


def test_profile_file_with_a_wrong_unit_names_the_field(refused, model, tmp_path):  # noqa: F811
    data = json.loads(json.dumps(dict(profiles.known()["n150"].data)))
    data["memory"]["bandwidth"]["unit"] = "MB/s"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    assert "memory.bandwidth.unit must be 'GB/s', not 'MB/s'" in refused("profile", model("smollm2"), "-d", tmp_path / "mine.yaml")
    del data["memory"]["bandwidth"]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(data))
    assert "the field memory.bandwidth is missing" in refused("devices", "show", tmp_path / "mine.yaml")


@pytest.mark.parametrize(("arguments", "words"), [
    (("--keep", "window"), "needs --kv-budget"), (("--fit", "latency=1"), "is not understood"), (("--memory", "25%"), "in bytes"),
    (("--context", "100000"), "trained for"), (("--fit", "speed=100000"), "Nothing meets these constraints"),
    (("--quality", "/nonexistent.json"), "There is no file"),
])  # fmt: skip
def test_options_that_make_no_sense_are_refused(refused, model, arguments, words):  # noqa: F811
    assert words in refused("profile", model("smollm2"), "-d", "n150", *arguments)


def test_quality_file_of_another_form_is_refused(refused, model, tmp_path):  # noqa: F811
    (tmp_path / "q.json").write_text('[{"name": 1}]')
    assert "kv_bytes" in refused("profile", model("smollm2"), "-d", "n150", "--quality", tmp_path / "q.json")
    (tmp_path / "q.json").write_text("{")
    assert "not valid JSON" in refused("profile", model("smollm2"), "-d", "n150", "--quality", tmp_path / "q.json")


def test_charts_that_cannot_be_written_are_refused(refused, model, tmp_path):  # noqa: F811
    assert "cannot be written" in refused("profile", model("smollm2"), "-d", "n150", "--html", tmp_path / "no" / "a.html")
    assert not (tmp_path / "no").exists()


def test_missing_pillow_is_told_in_a_sentence(refused, model, tmp_path):  # noqa: F811
    (tmp_path / "PIL").mkdir()
    (tmp_path / "PIL" / "__init__.py").write_text("raise ImportError('absent')\n")
    import os

    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    sentence = refused("profile", model("smollm2"), "-d", "n150", "--png", tmp_path / "png", env=environment)
    assert "edgekv[charts]" in sentence and not (tmp_path / "png").exists()
