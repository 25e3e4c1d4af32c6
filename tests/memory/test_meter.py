"""The account of a run: what the meter adds up against the formulas, on real bundles run by the real engine; its views."""

from __future__ import annotations

import json
import xml.dom.minidom

import numpy as np
import pytest
import tiny_bundle
from running import edgekv, refused  # noqa: F401

from edgekv import engine, native, policy
from edgekv.generation.session import Session
from edgekv.memory import profiles
from edgekv.memory.meter import MeteredEngine
from edgekv.memory.traffic import compaction_traffic, step_traffic
from edgekv.memory.traffic_view import lines

PROFILE = profiles.load("raspberry-pi-5", 8 << 30)


@pytest.mark.parametrize("keep", ["full", "window", "heavy"])
def test_counted_kv_bytes_of_a_run_are_the_formula(tmp_path, keep):
    bundle = tiny_bundle.make(tmp_path / "b", keep=keep, kept=128 if keep == "full" else 48, positions="original")
    meter = MeteredEngine(engine.load(bundle, 1), PROFILE, hardware=False)
    session = Session(meter)
    tokens = np.random.default_rng(0).integers(0, 250, 90)
    session.feed(tokens)
    for token in (1, 2, 3):
        session.step([token])
        session.commit(1)
    session.step([4, 5], np.array([1]))  # rejected: read, but never committed
    session.commit(0)
    meter.finish()
    for step in meter.steps:
        layers = [layer["params"] for layer in bundle.layers]
        if step.kind == "compaction":
            if keep == "full" and step.position == 32:
                every = [list(range(32))] * 2
                expected = sum(sum(compaction_traffic(p, [[], []], every, 32)) for p in layers)
                assert step.bytes["compaction"] == expected
            assert step.bytes["compaction"] > 0
            continue
        formula = [step_traffic(p, step.position, step.rows, native.isa()) for p in layers]
        assert step.bytes["kv_payload"] == sum(f[n] for f in formula for n in f if n.startswith("read_"))
        assert step.bytes["kv_write"] == sum(f["write_tail"] for f in formula)
    kinds = [s.kind for s in meter.steps]
    assert kinds.count("compaction") == 2 and kinds.count("decode") == 3 and kinds.count("prefill") == 4
    meter.close()


@pytest.mark.parametrize("rerank", [1, 4])
def test_counted_kv_bytes_of_rows_that_retrieve_are_the_formula(tmp_path, monkeypatch, rerank):
    monkeypatch.setattr(policy, "DENSE_WINDOW", 0)
    bundle = tiny_bundle.make(tmp_path / "b", cache="selfindex", keep="full", kept=256, boundary=32, chunk=32, sinks=20, retrieve="24", rerank=rerank)
    meter = MeteredEngine(engine.load(bundle, 1), PROFILE, hardware=False)
    session = Session(meter)
    session.feed(np.random.default_rng(0).integers(0, 250, 201))
    session.step([4])
    session.commit(1)
    meter.finish()
    step = meter.steps[-1]
    layers = [layer["params"] for layer in bundle.layers]
    formula = [step_traffic(p, 201, 1, native.isa(), retrieve=24, candidates=24 * rerank, scored=True) for p in layers]
    assert step.bytes["kv_index"] == sum(f["read_body_index"] for f in formula)
    assert step.bytes["kv_payload"] == sum(f[n] for f in formula for n in f if n.startswith("read_") and n != "read_body_index")
    meter.close()


def test_totals_are_the_sum_of_the_steps_and_nothing_is_both_on_chip_and_dram(tmp_path):
    meter = MeteredEngine(engine.load(tiny_bundle.make(tmp_path / "b"), 1), PROFILE, hardware=False)
    session = Session(meter)
    session.feed(np.arange(40) % 250)
    meter.finish()
    for kind in ("prefill", "decode", "compaction"):
        total = meter.totals(kind)
        assert sum(total["bytes"].values()) == pytest.approx(total["on_chip"] + total["dram"])
        assert total["on_chip"] >= 0 and total["dram"] >= 0
    assert meter.totals("prefill")["rows"] == 40
    meter.close()


def test_reset_starts_counting_anew_without_a_negative_step(tmp_path):
    meter = MeteredEngine(engine.load(tiny_bundle.make(tmp_path / "b"), 1), PROFILE, hardware=False)
    session = Session(meter)
    for _ in range(2):
        session.feed(np.arange(20) % 250)
        session.reset()
    first, second = (s for s in meter.steps if s.kind == "prefill")
    assert first.bytes == second.bytes
    meter.close()


def test_device_decides_what_is_on_chip(tmp_path):
    """The tiny model fits a 2 MiB cache whole, so no byte but the cache's own writes comes from DRAM there."""
    def dram(profile):
        meter = MeteredEngine(engine.load(tiny_bundle.make(tmp_path / profile.name.replace(":", "-"), positions="original"), 1), profile, hardware=False)
        session = Session(meter)
        session.feed(np.arange(40) % 250)
        session.step([1])
        meter.finish()
        meter.close()
        return meter.totals("decode")["dram"], meter.totals("decode")["bytes"]

    fits, sizes = dram(PROFILE)
    assert fits == sizes["kv_write"]
    streams, sizes = dram(profiles.load("stm32mp25", 1 << 30))
    assert streams >= sizes["weights"]


def test_command_reports_the_traffic(tmp_path, edgekv):  # noqa: F811
    bundle = tiny_bundle.make(tmp_path / "b").folder
    done = edgekv("run", bundle, "-p", "hello hello hello hello hello hello hello", "-n", 12, "--ignore-eos", "--traffic", "--device", "n150",
                  "--traffic-json", tmp_path / "t.json", "--traffic-html", tmp_path / "t.html")  # fmt: skip
    text = done.stderr.decode()
    assert done.returncode == 0, text
    assert "traffic   on n150" in text and "counted by the kernels" in text and "(modelled)" in text
    account = json.loads((tmp_path / "t.json").read_text())
    assert account["device"] == "n150" and account["labels"]["dram"] == "modelled residency"
    assert account["totals"]["decode"]["steps"] in (11, 12)  # the last token need not be fed
    assert len(account["steps"]) >= 12 and set(account["unavailable"]) | {m["counter"] for m in account["measured"]} == {
        "tegrastats", "emc-sysfs", "resctrl", "perf", "rapl"}  # fmt: skip
    page = (tmp_path / "t.html").read_text()
    for svg in page.split("<svg ")[1:]:
        xml.dom.minidom.parseString("<svg " + svg.split("</svg>")[0] + "</svg>")


def test_command_puts_the_account_into_its_json(tmp_path, edgekv):  # noqa: F811
    bundle = tiny_bundle.make(tmp_path / "b").folder
    done = edgekv("run", bundle, "-p", "abc", "-n", 4, "--ignore-eos", "--json", "--traffic")
    shown = json.loads(done.stdout)
    assert shown["traffic"]["totals"]["decode"]["rows"] >= 3 and shown["traffic"]["steps"] == []
    plain = json.loads(edgekv("run", bundle, "-p", "abc", "-n", 4, "--ignore-eos", "--json", "--temperature", 0).stdout)
    metered = json.loads(edgekv("run", bundle, "-p", "abc", "-n", 4, "--ignore-eos", "--json", "--temperature", 0, "--traffic").stdout)
    assert "traffic" not in plain and plain["token_ids"] == metered["token_ids"]


def test_live_view_prints_lines_when_there_is_no_terminal(tmp_path, edgekv):  # noqa: F811
    bundle = tiny_bundle.make(tmp_path / "b").folder
    done = edgekv("run", bundle, "-p", "abc", "-n", 200, "--ignore-eos", "--traffic=live")
    assert done.returncode == 0
    assert "rows/s, DRAM" in done.stderr.decode()


def test_wrong_traffic_options_are_refused(tmp_path, refused):  # noqa: F811
    bundle = tiny_bundle.make(tmp_path / "b").folder
    assert "belongs to --traffic" in refused("run", bundle, "-p", "a", "--device", "n150")
    assert "nearest: n150" in refused("run", bundle, "-p", "a", "--traffic", "--device", "n151")


def test_summary_says_why_nothing_was_measured(tmp_path):
    meter = MeteredEngine(engine.load(tiny_bundle.make(tmp_path / "b"), 1), PROFILE)
    Session(meter).feed(np.arange(20) % 250)
    meter.finish()
    text = "\n".join(lines(meter))
    assert "measured by" in text or "no DRAM counter works here" in text
    meter.close()
