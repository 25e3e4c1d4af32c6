"""The ONNX Runtime engine against the NumPy oracle, and what it refuses."""

import json

import numpy as np
import onnxruntime as ort
import psutil
import pytest
import tiny_bundle
from oracle import OracleModel

from edgekv import bundle, engine, machine, native
from edgekv.engine.onnxruntime import session_options
from edgekv.errors import BundleError, NativeError, UserError
from edgekv.generation.session import Session

TEXT = np.random.default_rng(5).integers(0, 256, 400)


def agrees(logits, wanted):
    assert np.abs(logits - wanted).max() <= 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("element", ["fp16", "fp32"])
@pytest.mark.parametrize(
    "keep, positions, kept, boundary",
    [("full", "original", 128, 32), ("window", "original", 48, 32), ("window", "cache", 48, 32), ("heavy", "original", 64, 16),
     ("heavy", "cache", 48, 32), ("window", "cache", 16, 64)],
)  # fmt: skip
def test_logits_are_the_oracles(tmp_path, keep, positions, kept, boundary, element):
    """A text several times the cache, in blocks of random sizes, with rejected tokens in between."""
    made = tiny_bundle.make(tmp_path / "b", keep, kept, boundary, positions=positions, element=element, chunk=16)
    oracle, session = OracleModel(made), Session(engine.load(made, max_rows=16))
    rng = np.random.default_rng(1)
    end = 160 if keep == "full" else 300
    while session.position < end:
        room = session.room
        committed = min(int(rng.integers(1, room + 1)), end - session.position)
        rejected = int(rng.integers(0, room - committed + 1))
        block = np.concatenate([TEXT[session.position : session.position + committed], rng.integers(0, 256, rejected)])
        logits = session.step(block).copy()
        session.commit(committed)
        for row in range(committed):
            agrees(logits[row], oracle.feed(int(block[row])))
    cache = session.engine.occupancy(end)
    assert cache.kept == min(end, kept + (end - session.tail_base)) and cache.evicted == end - cache.kept
    assert cache.used == cache.kept * 2 * 2 * 32 * (2 if element == "fp16" else 4)
    assert list(session.tokens) == TEXT[:end].tolist()


def test_pain_13_sliding_window_layers_keep_their_own_window(tmp_path):
    """Two layers with a window of 24 inside a streaming cache: the logits stay those of the oracle long past the shift."""
    made = tiny_bundle.make(tmp_path / "b", kept=48, boundary=16, sliding_window=24)
    assert made.layers[0]["params"]["sliding_window"] == 24
    oracle, session = OracleModel(made), Session(engine.load(made))
    for token in TEXT[:250]:
        agrees(session.feed([token]), oracle.feed(int(token)))


@pytest.mark.parametrize("keep", ["window", "heavy"])
def test_pain_15_prompt_of_many_times_the_cache_streams_through_it(tmp_path, keep):
    """The text is fed whole, in chunks larger than the body, and gives the bits that feeding one token at a time gives."""
    made = tiny_bundle.make(tmp_path / "b", keep, kept=16, boundary=64, chunk=64)
    whole, single = Session(engine.load(made)), Session(engine.load(made))
    assert whole.engine.chunk == 64 > 16
    logits = whole.feed(TEXT)
    for token in TEXT:
        last = single.feed([token])
    assert np.array_equal(logits, last)
    assert whole.engine.state_hash(TEXT.size) == single.engine.state_hash(TEXT.size)


@pytest.mark.parametrize("keep, kept", [("window", 16), ("window", 48), ("heavy", 48), ("full", 256)])
def test_pain_23_empty_slots_are_no_tokens_and_chunks_may_exceed_the_body(tmp_path, keep, kept):
    """A short text in a large cache gives the logits of the same text in a cache that it fills, and -1 stands in empty slots."""
    made = tiny_bundle.make(tmp_path / "b", keep, kept, boundary=64, chunk=64, positions="original")
    oracle, session = OracleModel(made), Session(engine.load(made, max_rows=1))
    state = session.engine._states[0]
    positions = state[256 : 256 + 2 * kept * 4].view(np.int32)
    assert np.all(positions == -1)
    agrees(session.feed(TEXT[:70]), oracle.read(TEXT[:70]))
    filled = min(64, kept)
    assert np.all(positions.reshape(2, kept)[:, filled:] == -1) and np.all(positions.reshape(2, kept)[:, :filled] >= 0)


@pytest.mark.parametrize("keep", ["window", "heavy"])
def test_pain_24_writes_into_a_full_cache_change_nothing_committed(tmp_path, keep):
    """Rejected blocks of every length, at every fill of the tail, leave the committed bytes alone."""
    made = tiny_bundle.make(tmp_path / "b", keep, kept=48, boundary=32, chunk=32)
    session = Session(engine.load(made, max_rows=32))
    session.feed(TEXT[:200])
    rng = np.random.default_rng(0)
    while session.position < 270:
        before = session.engine.state_hash(session.position)
        for length in (1, session.room):
            session.step(rng.integers(0, 256, length))
            assert session.engine.state_hash(session.position) == before
        session.commit(0)
        session.feed([TEXT[session.position]])
        assert session.engine.state_hash(session.position) != before


def test_threads_do_not_change_the_bits(tmp_path):
    made = tiny_bundle.make(tmp_path / "b", "heavy", kept=48)
    one, two = (Session(engine.load(made, threads=n)) for n in (1, 2))
    assert np.array_equal(one.feed(TEXT), two.feed(TEXT))
    assert one.engine.state_hash(TEXT.size) == two.engine.state_hash(TEXT.size)


def test_reset_starts_over_in_the_same_memory(tmp_path):
    session = Session(engine.load(tiny_bundle.make(tmp_path / "b")))
    address, first = session.engine.arena.ctypes.data, session.feed(TEXT).copy()
    hashed = session.engine.state_hash(TEXT.size)
    assert address % 256 == 0
    session.reset()
    assert session.engine.occupancy(0).kept == 0
    assert np.array_equal(session.feed(TEXT), first)
    assert session.engine.state_hash(TEXT.size) == hashed and session.engine.arena.ctypes.data == address


def test_pain_20_capacity_of_a_full_cache_is_what_was_asked_for(tmp_path):
    from edgekv.errors import CacheFullError

    session = Session(engine.load(tiny_bundle.make(tmp_path / "b", "full", kept=64, boundary=32)))
    assert session.engine.capacity == 96
    session.feed(TEXT[:96])
    assert session.room == 0
    with pytest.raises(CacheFullError, match="holds 96 tokens"):
        session.step([1])


# -------------------------------------------------------------------------------------------------------- pain 10: memory


def test_pain_10_a_cache_that_does_not_fit_is_refused_before_allocating(tmp_path):
    """A budget of 64 GiB and more: a sentence with the figures, at once, and not one page touched."""
    made = tiny_bundle.make(tmp_path / "b", "full", kept=1 << 27, layers=2)
    assert made.arena_bytes > psutil.virtual_memory().total
    before = machine.rss()
    with pytest.raises(UserError, match=r"needs [\d,]+ MiB of memory .* KV cache [\d,]+ MiB.* are available; .*--kv-budget"):
        engine.load(made)
    assert machine.rss() - before < 64 << 20


def test_pain_10_memory_follows_the_budget_not_the_context(tmp_path):
    small, large = (tiny_bundle.make(tmp_path / f"{c}", kept=48, context=c) for c in (128, 1 << 20))
    assert small.arena_bytes == large.arena_bytes == engine.load(large).arena.nbytes


def test_pain_10_a_refused_allocation_is_a_sentence(tmp_path, monkeypatch):
    def refuse(*args):
        raise MemoryError

    made = tiny_bundle.make(tmp_path / "b")
    monkeypatch.setattr(native, "aligned_bytes", refuse)
    with pytest.raises(UserError, match="system refused .* for the KV cache"):
        engine.load(made)


# ------------------------------------------------------------------------------------------------------- pain 11: sharing


def run(session, states, outputs, tokens, position):
    """One step with the given arrays bound as states and as their outputs."""
    binding = session.io_binding()
    inputs = {"input_ids": tokens[None], "position": [position], "rows": [len(tokens) - 1], "shift": [0]}
    inputs = {name: np.array(array, np.int64) for name, array in inputs.items()}  # ONNX Runtime 1.23 does not keep them alive
    for name, array in inputs.items():
        binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
    for i, (state, output) in enumerate(zip(states, outputs, strict=True)):
        binding.bind_ortvalue_input(f"state.{i}", ort.OrtValue.ortvalue_from_numpy(state.view(np.int8)))
        binding.bind_ortvalue_output(f"state.{i}.out", ort.OrtValue.ortvalue_from_numpy(output.view(np.int8)))
    binding.bind_output("logits")
    session.run_with_iobinding(binding)
    return binding.get_outputs()[-1].numpy()[0, 0]


def test_pain_11_states_are_shared_between_steps_and_never_silently_copied(tmp_path):
    """Aliased, two steps give the logits of one; not aliased, the operator refuses instead of losing the cache."""
    made = tiny_bundle.make(tmp_path / "b")
    session = ort.InferenceSession(str(made.graph_path), session_options(1))
    params = [native.LayerParams(**layer["params"]) for layer in made.layers]
    shared, others = ([native.new_state(p) for p in params] for _ in range(2))
    before = shared[0].copy()
    run(session, shared, shared, TEXT[:5], 0)
    assert not np.array_equal(shared[0], before)
    second = run(session, shared, shared, TEXT[5:10], 5)
    agrees(second, OracleModel(made).read(TEXT[:10]))

    fresh = [native.new_state(p) for p in params]
    with pytest.raises(Exception, match="updated in place"):
        run(session, fresh, others, TEXT[:5], 0)


# --------------------------------------------------------------------------------------------------- graphs that do not fit


def reseal(folder, **sections):
    manifest = json.loads((folder / "manifest.json").read_text())
    return bundle.seal(folder, {**manifest, **sections})


def test_pain_14_sinks_that_fill_the_body_do_not_loop(tmp_path):
    """As many sinks as body slots: the cache keeps them and the tail, and a long text still ends."""
    made = tiny_bundle.make(tmp_path / "b", kept=16, sinks=16, boundary=16)
    oracle, session = OracleModel(made), Session(engine.load(made))
    agrees(session.feed(TEXT[:200]), oracle.read(TEXT[:200]))
    assert session.engine.occupancy(200).kept == 16 + 8


def test_pain_14_more_sinks_than_body_slots_are_refused_when_opened(tmp_path):
    made = tiny_bundle.make(tmp_path / "b", kept=16)
    made.layers[0]["params"]["sinks"] = 17
    with pytest.raises(BundleError, match="sinks must fit the body"):
        reseal(made.folder, layers=made.layers)


def test_graph_and_manifest_must_agree(tmp_path):
    made = tiny_bundle.make(tmp_path / "b", layers=2)
    one = reseal(made.folder, model={**made.model, "layers": 1}, layers=made.layers[:1])
    with pytest.raises(BundleError, match="inputs and outputs that its manifest describes"):
        engine.load(one)


def test_graph_that_is_no_graph(tmp_path):
    made = tiny_bundle.make(tmp_path / "b")
    import onnx

    model = onnx.load(made.graph_path, load_external_data=False)
    model.graph.node[-1].op_type = "NoSuchOperator"
    made.graph_path.write_bytes(model.SerializeToString())
    with pytest.raises(BundleError, match="cannot load .*NoSuchOperator"):
        engine.load(reseal(made.folder))


def test_parameters_of_graph_and_manifest_must_agree(tmp_path):
    """Another keep rule of the same size: the state's fingerprint differs from the graph's attributes."""
    made = tiny_bundle.make(tmp_path / "b")
    for layer in made.layers:
        layer["params"]["sinks"] = 5
    with pytest.raises(BundleError, match="describe different caches; export the bundle again"):
        Session(engine.load(reseal(made.folder, layers=made.layers))).feed(TEXT[:3])


@pytest.mark.parametrize("tokens, position, rows", [([], 0, [0]), ([1] * 33, 0, [0]), ([1], 0, [0, 0]), ([1], 32, [0]), ([1], -1, [0]), ([1, 1], 31, [0])])
def test_steps_that_cannot_be_are_refused(tmp_path, tokens, position, rows):
    loaded = engine.load(tiny_bundle.make(tmp_path / "b"))
    with pytest.raises(NativeError):
        loaded.step(np.array(tokens, np.int64), position, np.array(rows, np.int64))


def test_token_ids_outside_the_vocabulary_are_an_error_not_a_crash(tmp_path):
    session = Session(engine.load(tiny_bundle.make(tmp_path / "b")))
    with pytest.raises(NativeError):
        session.feed([10**6])
    agrees(session.feed(TEXT[:5]), OracleModel(session.engine.bundle).read(TEXT[:5]))
