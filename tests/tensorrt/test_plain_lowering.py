"""Without the plugin: a ring of slots and a mask give exactly the attention that compaction gives, and the graph computes it."""

import numpy as np
import onnxruntime as ort
import pytest
from cache_cases import Runner, Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from lowering_models import tiny

from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.engine.ring import Ring
from edgekv.errors import UserError
from edgekv.export.to_tensorrt_plain import lower_plain


@given(st.sampled_from(["full", "window"]), st.sampled_from([16, 32, 80]), st.integers(0, 16), st.sampled_from([0, 9, 50]), st.integers(1, 400))
@settings(max_examples=60)
def test_the_mask_shows_what_the_cache_keeps(keep, body, sinks, window, position):
    params = make_params(keep, 400 if keep == "full" else body, 16, sliding_window=window, **({} if keep == "full" else {"sinks": sinks}))
    ring, runner, rows = Ring(params), Runner(params), 16 - position % 16
    text = Text(params, position)
    runner.feed(text, position)
    where = ring.positions(position)
    mask = ring.mask(position, rows)
    held = runner.cache.positions(position - runner.cache.tail_base)[0]
    for row in range(rows):
        seen = sorted(where[mask[row]].tolist())
        kept = [*held.tolist(), *range(position, position + row + 1)]
        assert seen == sorted(p for p in kept if not window or position + row - p < window)
    written = ring.slot(position)
    np.testing.assert_array_equal(where[written : written + rows], position + np.arange(rows))
    assert written + rows <= ring.slots


def test_slots_cost_at_most_two_intervals_more():
    for sinks in (0, 4):
        params = make_params("window", 128, 16, sinks=sinks)
        assert params["body_slots"] + params["tail_slots"] <= Ring(params).slots <= params["body_slots"] + 3 * params["tail_slots"]


@pytest.mark.parametrize(
    ("change", "sentence"), [({"keep": 2}, "Heavy hitters"), ({"positions": 1}, "--positions original"), ({"keep": 1, "sinks": 20}, "at most 16 sinks"),
     ({"format": 1}, "Compressed caches"), ({"head_dim": 64}, "thin keys")],
)
def test_policies_that_need_the_plugin_are_refused(change, sentence):
    with pytest.raises(UserError, match=sentence):
        Ring(make_params("window", 128, 16) | change)


@pytest.mark.parametrize(("name", "keep"), [("llama", "window"), ("gemma3_text", "full")])
def test_the_graph_computes_the_same_as_the_bundle(tmp_path, name, keep):
    bundle = tiny(tmp_path, name, "fp32", keep)
    made = lower_plain(bundle, tmp_path, half=False)
    session = ort.InferenceSession(str(made.graph), providers=["CPUExecutionProvider"])
    rings = [Ring(layer["params"]) for layer in bundle.layers]
    kinds = list(dict.fromkeys(ring.key() for ring in rings))
    caches = {i.name: np.zeros(i.shape, np.float32) for i in session.get_inputs() if i.name[:2] in ("k.", "v.")}
    engine = OnnxRuntimeEngine(bundle, threads=1, max_rows=32)
    tokens, position = np.random.default_rng(0).integers(0, 256, 300), 0
    names = [o.name for o in session.get_outputs()]
    while position < 300:
        rows = min(32 - position % 32, 300 - position, int(np.random.default_rng(position).integers(1, 20)))
        feeds = {
            "input_ids": tokens[None, position : position + rows], "position": np.array([position]), "rows": np.arange(rows),
            "shift": np.array([0]),
        }  # fmt: skip
        for index, key in enumerate(kinds):
            ring = next(r for r in rings if r.key() == key)
            feeds |= {f"slot.{index}": np.array([ring.slot(position)]), f"mask.{index}": ring.mask(position, rows)[None, None]}
        wanted = {i.name for i in session.get_inputs()}
        out = dict(zip(names, session.run(None, {k: v for k, v in (feeds | caches).items() if k in wanted})))
        caches = {n: out[f"{n}.out"] for n in caches}
        want = engine.step(tokens[position : position + rows], position, np.arange(rows))
        np.testing.assert_allclose(out["logits"][0], want, atol=2e-2, rtol=1e-3)  # the bundle stores float16, this graph float32
        position += rows
        if position % 32 == 0:
            engine.compact(position)
    engine.close()
