"""A bundle's cache made anew: same weights, another policy."""

import json
import os

import numpy as np
import pytest
import tiny_bundle

from edgekv import bundle, engine, layout
from edgekv.errors import UserError
from edgekv.export.replan import geometries, replan
from edgekv.generation.session import Session
from edgekv.policy import CachePolicy, parse_budget

HEAVY = CachePolicy(keep="heavy", score="attention", positions="cache", boundary=16, observe=8)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tiny_bundle.make(tmp_path_factory.mktemp("source") / "full", keep="full", kept=256, element="fp32")


def read(opened, text: np.ndarray) -> np.ndarray:
    loaded = engine.load(opened, 1, max_rows=opened.chunk)
    try:
        session, rows = Session(loaded), []
        while session.position < text.size:
            block = text[session.position : session.position + session.room]
            rows.append(session.step(block).copy())
            session.commit(block.size)
        return np.concatenate(rows)
    finally:
        loaded.close()


def test_same_model_while_nothing_is_evicted_and_another_after(source, tmp_path):
    made = replan(source, tmp_path / "heavy", HEAVY, parse_budget("96tok"))
    text = np.random.default_rng(0).integers(0, 256, 160)
    before, after = read(source, text), read(made, text)
    room = made.layers[0]["params"]["body_slots"]
    assert np.abs(before[:room] - after[:room]).max() < 0.05  # the new cache stores half precision
    assert np.abs(before[room + 16 :] - after[room + 16 :]).max() > 0.5


def test_what_the_manifest_says(source, tmp_path):
    made = replan(source, tmp_path / "heavy", HEAVY, parse_budget("96tok"))
    params = made.layers[0]["params"]
    assert (params["keep"], params["tail_slots"], params["body_slots"]) == (layout.KEEPS["heavy"], 16, 80)
    assert params["fused_rotary"] == 1 and geometries(made) == geometries(source)
    assert made.manifest["policy"]["budget"] == "96tok" and made.manifest["memory"]["arena"] == made.arena_bytes
    assert made.chunk == 16
    bundle.open_bundle(made.folder)  # every hash is right


def test_weights_are_shared(source, tmp_path):
    made = replan(source, source.folder.parent / "beside", HEAVY, parse_budget("96tok"))
    assert os.path.samefile(made.folder / "model.onnx.data", source.folder / "model.onnx.data")


@pytest.mark.parametrize("element, kept", [("fp32", {"tokens": 384}), ("fp16", None)])
def test_parity_figures_hold_only_for_the_precision_they_were_measured_with(tmp_path, element, kept):
    first = tiny_bundle.make(tmp_path / "a", keep="full", kept=128, element="fp32", change=lambda m: m.update(parity={"tokens": 384}))
    policy = CachePolicy(keep="window", positions="cache", boundary=16, element=element)
    assert replan(first, tmp_path / "b", policy, parse_budget("64tok")).manifest["parity"] == kept


def test_a_graph_that_does_not_fit_its_states_is_refused(source, tmp_path, monkeypatch):
    from edgekv.export import graph

    real = graph.set_cache

    def wrong_scale(model, params, tables):
        real(model, [{**p, "scale": p["scale"] * 3} for p in params], tables)

    monkeypatch.setattr(graph, "set_cache", wrong_scale)
    with pytest.raises(UserError, match="does not run"):
        replan(source, tmp_path / "wrong", HEAVY, parse_budget("96tok"))
    assert not (tmp_path / "wrong").exists() and list(tmp_path.iterdir()) == []


def test_command(source, tmp_path):
    from click.testing import CliRunner

    from edgekv.cli.export import command

    arguments = [str(source.folder), "-o", str(tmp_path / "new"), "--keep", "window", "--positions", "cache", "--kv-budget", "64tok"]
    done = CliRunner().invoke(command, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    manifest = json.loads((tmp_path / "new" / "manifest.json").read_text())
    assert manifest["policy"]["keep"] == "window"
    with pytest.raises(UserError, match="leave out --weights and --context"):
        CliRunner().invoke(command, [*arguments, "--force", "--weights", "int4"], catch_exceptions=False, standalone_mode=False)
