"""Compressed caches through the real engine, against the NumPy oracle: what is generated, what is read, what is refused."""

import dataclasses
import itertools

import numpy as np
import pytest
import tiny_bundle
from oracle import OracleModel

from edgekv import engine, layout, policy
from edgekv.errors import CacheFullError, UserError
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.ngram import NgramDrafter
from edgekv.generation.drafters.self_window import SelfWindowDrafter
from edgekv.generation.adaptive import FixedLength
from edgekv.generation.generate import Answer, generate
from edgekv.generation.report import Report
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation
from edgekv.generation.text import load_tokenizer
from edgekv.retrieval import Retrieval

TEXT = np.random.default_rng(5).integers(0, 256, 3000)
END = 290  # tokens of the texts that are compared with the oracle token by token
KEEPS = {
    "full": {"keep": "full", "kept": 480, "context": 512},
    "window": {"keep": "window", "kept": 96},
    "heavy": {"keep": "heavy", "kept": 96},
    "heavy-8-bit": {"keep": "heavy", "score": "keys", "kept": 64, "key_bits": 2, "value_bits": 8, "boundary": 64, "chunk": 64},
    "window-2-bit-fp32": {"keep": "window", "kept": 64, "key_bits": 2, "value_bits": 2, "element": "fp32", "sinks": 0},
    "sliding": {"keep": "window", "kept": 96, "sliding_window": 70},
}


@pytest.fixture(autouse=True)
def even_short_windows_are_compressed(monkeypatch):
    monkeypatch.setattr(policy, "DENSE_WINDOW", 0)


def made_of(folder, name, retrieve="24", **more):
    options = {"boundary": 32, "chunk": 32, "sinks": 20, "cache": "selfindex", "retrieve": retrieve, **KEEPS[name], **more}
    return tiny_bundle.make(folder / name, **options)


def agrees(logits, wanted, tolerance=4e-3):
    assert np.abs(logits - wanted).max() <= tolerance * np.abs(wanted).max()


@pytest.mark.parametrize(("name", "rerank"), [*((name, 4) for name in KEEPS), ("full", 1), ("full", None)])
def test_generated_text_is_the_oracles(tmp_path, name, rerank):
    """A prompt of several intervals, read dense; then rows that retrieve, in blocks of random sizes with rejected tokens."""
    made = made_of(tmp_path, name, rerank=rerank)
    oracle, session = OracleModel(made), Session(engine.load(made, threads=1, max_rows=64))
    agrees(session.feed(TEXT[:201]), oracle.read(TEXT[:201]))
    rng = np.random.default_rng(1)
    while session.position < END:
        room = session.room
        committed = min(int(rng.integers(1, room + 1)), END - session.position)
        rejected = int(rng.integers(0, room - committed + 1))
        block = np.concatenate([TEXT[session.position : session.position + committed], rng.integers(0, 256, rejected)])
        logits = session.step(block).copy()
        session.commit(committed)
        for row in range(committed):
            agrees(logits[row], oracle.feed(int(block[row])))
    cache, params = session.engine.occupancy(END), made.layers[0]["params"]
    assert cache.kept == min(layout.held_tokens(params), END // made.boundary * made.boundary) + END % made.boundary
    assert cache.evicted == END - cache.kept
    whole = 32 * (4 if params["element"] == 0 else 2)
    in_full = params["sinks"] + END % made.boundary
    assert cache.used == 2 * 2 * ((cache.kept - in_full) * layout.token_bytes(params) + in_full * whole)


@pytest.mark.parametrize("name", KEEPS)
def test_the_state_does_not_depend_on_how_a_prompt_was_cut(tmp_path, name):
    """Blocks of any size, single tokens at the end included, leave the same bytes, and so does a prompt fed in two parts."""
    made = made_of(tmp_path, name)
    size = 333
    hashes = set()
    for cuts in ([], [332], [1, 331], list(range(1, 333)), [100, 200], [31, 33, 64, 320, 321]):
        session = Session(engine.load(made, threads=1))
        for start, end in itertools.pairwise([0, *cuts, size]):
            session.feed(TEXT[start:end])
        hashes.add(session.engine.state_hash(size))
    assert len(hashes) == 1
    session = Session(engine.load(made, threads=1))
    for token in TEXT[:size]:  # generated tokens are another matter: they saw less
        session.step([token], np.zeros(1, np.int64))
        session.commit(1)
    assert session.engine.state_hash(size) not in hashes


def test_rejected_tokens_leave_no_trace(tmp_path):
    made = made_of(tmp_path, "heavy")
    straight, other = Session(engine.load(made, threads=1)), Session(engine.load(made, threads=1, max_rows=64))
    straight.feed(TEXT[:150]), other.feed(TEXT[:150])
    rng = np.random.default_rng(3)
    while other.position < 400:
        room = other.room
        other.step(rng.integers(0, 256, room))
        other.commit(0)
        count = min(int(rng.integers(1, room + 1)), 400 - other.position)
        for token in TEXT[other.position : other.position + count]:
            other.step([token, *rng.integers(0, 256, other.room - 1)])
            other.commit(1)
    while straight.position < 400:
        straight.step(TEXT[straight.position : straight.position + 1], np.zeros(1, np.int64))
        straight.commit(1)
    assert straight.engine.state_hash(400) == other.engine.state_hash(400)


@pytest.mark.parametrize("keep", ["full", "heavy"])
def test_retrieval_goes_on_for_thousands_of_tokens(tmp_path, keep):
    """Sinks and tail never use up what is retrieved: after 2,000 generated tokens a step still reads as many records."""
    made = made_of(tmp_path, keep, retrieve="40", kept=2496, context=2560, rerank=1)
    session = Session(engine.load(made, threads=1))
    session.feed(TEXT[:300])
    for at in range(300, 2400):
        before = session.engine.reads()
        session.step(TEXT[at : at + 1], np.zeros(1, np.int64))
        more = session.engine.reads().since(before)
        session.commit(1)
        p = made.layers[0]["params"]
        used = sum(layout.record_parts(p))
        assert more.steps == 1 and more.retrieved == 40
        assert more.payload_bytes == 2 * 2 * 40 * used, at
    assert more.compressed == at // 32 * 32 - 20


def test_speculation_gives_the_text_of_plain_decoding(tmp_path):
    made = made_of(tmp_path, "full", kept=992, context=1024)
    loaded = engine.load(made, threads=1, max_rows=17)

    def take(decoder):
        session, sampler = Session(loaded), Sampler(SamplingOptions(), loaded.vocab, 1)
        produced = decoder(session, sampler, session.feed(TEXT[:190]))
        tokens = list(itertools.islice(produced, 400))
        produced.close()
        return tokens, session.position

    wanted, _ = take(plain)
    for drafter in (NgramDrafter(), SelfWindowDrafter(loaded, 8)):
        for gamma in (1, 3, 8):
            decoder = Speculation(drafter, FixedLength(gamma), loaded.vocab)
            tokens, _ = take(decoder)
            assert tokens == wanted
        assert decoder.tally.accepted > 0
    assert loaded.retrieval == Retrieval(tokens=24)


def test_drafting_with_itself_retrieves_less_and_leaves_nothing_behind(tmp_path):
    session = Session(engine.load(made_of(tmp_path, "full")))
    session.feed(TEXT[:333])
    loaded, row = session.engine, np.zeros(1, np.int64)
    whole = loaded.step(TEXT[333:334], 333, row).copy()
    loaded.look(8)
    before = loaded.reads()
    narrow = loaded.step(TEXT[333:334], 333, row).copy()
    part = loaded.reads().since(before).payload_bytes
    loaded.look(None)
    before = loaded.reads()
    assert np.array_equal(loaded.step(TEXT[333:334], 333, row), whole) and not np.array_equal(narrow, whole)
    assert loaded.reads().since(before).payload_bytes > part == 2 * 2 * 8 * sum(layout.record_parts(loaded.bundle.layers[0]["params"]))


def test_retrieval_may_change_at_any_time(tmp_path):
    """All, more than there are, and a percentage below its least: each equals the oracle told the same."""
    made = made_of(tmp_path, "full")
    session = Session(engine.load(made, threads=1))
    session.feed(TEXT[:333])
    oracle = OracleModel(made)
    oracle.read(TEXT[:333])
    for amount in (Retrieval(), Retrieval(tokens=16), Retrieval(percent=1), Retrieval(tokens=1000), Retrieval(percent=40)):
        session.engine.retrieve(amount)
        oracle.retrieval = amount
        token = int(TEXT[session.position])
        agrees(session.step([token])[0], oracle.feed(token))
        session.commit(1)


def test_the_report_tells_what_was_read(tmp_path):
    made = made_of(tmp_path, "full", follows=tiny_bundle.follow("abc", then=ord("a")))
    session, answer = Session(engine.load(made, threads=1)), Answer()
    sampler = Sampler(SamplingOptions(), session.engine.vocab, 0)
    for _ in generate(session, sampler, load_tokenizer(made), TEXT[:300].tolist(), answer, max_tokens=50):
        pass
    report = Report.of(session, [answer])
    p, index = made.layers[0]["params"], report.index
    assert index.token_bytes == 2 * 2 * layout.token_bytes(p) and index.token_bytes_fp16 == 2 * 2 * 64
    assert (index.retrieve, index.tokens_retrieved) == ("24", 24) and index.tokens_compressed == session.tail_base - 20
    assert index.index_bytes_per_step > 2 * 2 * 268 * 2 and index.payload_bytes_per_step > 2 * 2 * 24 * 8
    assert report.to_json()["index"]["tokens_retrieved"] == 24 and any("retrieved" in line for line in report.lines("length"))
    for size, change in ((index.token_bytes_fp16 * 2, "+100%"), (index.token_bytes_fp16 // 2, "-50%")):
        assert f"(fp16: {index.token_bytes_fp16}, {change})" in dataclasses.replace(index, token_bytes=size).line()
    dense = tiny_bundle.make(tmp_path / "dense")
    assert "index" not in Report.of(Session(engine.load(dense)), []).to_json()


def test_a_full_cache_ends_where_it_says(tmp_path):
    made = made_of(tmp_path, "full", kept=96, sinks=32)  # 128 tokens and an interval
    assert made.capacity == 160
    session = Session(engine.load(made, threads=1))
    session.feed(TEXT[:160])
    with pytest.raises(CacheFullError):
        session.step([1])


def test_a_dense_cache_has_nothing_to_retrieve(tmp_path):
    loaded = engine.load(tiny_bundle.make(tmp_path / "b"))
    assert loaded.retrieval is None
    with pytest.raises(UserError, match="--cache selfindex"):
        loaded.retrieve(Retrieval(tokens=8))


@pytest.mark.parametrize("field, value", [("retrieve", "0%"), ("retrieve", None), ("retrieve", 7), ("rerank", 0), ("rerank", "4"), ("rerank", True)])
def test_damaged_manifests_are_refused(tmp_path, field, value):
    from edgekv.errors import BundleError

    with pytest.raises(BundleError, match=f"policy.{field}"):
        made_of(tmp_path, "full", change=lambda manifest: manifest["policy"].update({field: value}))
