"""Speculation over the real engine and cache: every policy, drafter and length, across boundaries and evictions."""

import itertools

import numpy as np
import pytest
import tiny_bundle

from edgekv import engine
from edgekv.generation.adaptive import AdaptiveLength, FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.bundle import BundleDrafter
from edgekv.generation.drafters.ngram import NgramDrafter
from edgekv.generation.drafters.self_window import SelfWindowDrafter
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation

PROMPT = list(b"It is a truth universally acknowledged")
POLICIES = {
    "full": {"keep": "full", "kept": 480, "context": 512},
    "window": {"keep": "window", "kept": 48},
    "window-original": {"keep": "window", "kept": 64, "positions": "original"},
    "heavy": {"keep": "heavy", "kept": 64},
    "heavy-fp32": {"keep": "heavy", "kept": 96, "element": "fp32", "positions": "original"},
    "heavy-by-keys": {"keep": "heavy", "kept": 64, "score": "keys"},
    "sliding": {"keep": "heavy", "kept": 64, "sliding_window": 40},
}


class RowByRow:
    """An engine that computes blocks one row at a time, so that no matrix product rounds differently for a block."""

    def __init__(self, inner):
        self._inner = inner
        self._out = np.empty((inner.max_rows, inner.vocab), np.float32)

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def step(self, tokens, position, rows):
        wanted = {int(row): index for index, row in enumerate(rows)}
        for row in range(len(tokens)):
            logits = self._inner.step(tokens[row : row + 1], position + row, np.zeros(1, np.int64))
            if row in wanted:
                self._out[wanted[row]] = logits[0]
        return self._out[: len(rows)]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundles")
    made = {name: tiny_bundle.make(folder / name, boundary=32, **options) for name, options in POLICIES.items()}
    # the same weights in another cache: a draft that is often right, with boundaries elsewhere
    made["draft"] = tiny_bundle.make(folder / "draft", keep="window", kept=32, boundary=48, chunk=48)
    return made


@pytest.fixture(scope="module")
def engines(bundles):
    loaded = {name: engine.load(bundle, threads=1, max_rows=17) for name, bundle in bundles.items()}
    yield loaded
    for one in loaded.values():
        one.close()


def drafter_of(kind, target, engines):
    # a random model says other things behind a part of a text than behind all of it
    return {"ngram": NgramDrafter, "self": lambda: SelfWindowDrafter(target, 16),
            "bundle": lambda: BundleDrafter(engines["draft"], target.vocab, newest=1000)}[kind]()  # fmt: skip


class Resting(FixedLength):
    """Makes so many plain steps between two rounds, as an adaptive length does while nothing pays."""

    def __init__(self, gamma, steps):
        super().__init__(gamma)
        self.told, self._steps, self._resting = [], steps, False

    def rest(self):
        self._resting = not self._resting
        return self._steps if self._resting else 0

    def rested(self, seconds):
        assert min(seconds) > 0
        self.told.append(len(seconds))


def take(count, target, decoder, options=SamplingOptions(), seed=1):
    session, sampler = Session(target), Sampler(options, target.vocab, seed)
    sampler.observe(PROMPT)
    produced = decoder(session, sampler, session.feed(PROMPT))
    tokens = list(itertools.islice(produced, count))
    produced.close()
    return tokens, session


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["bundle", "ngram", "self"])
def test_greedy_text_is_that_of_plain_decoding(policy, kind, engines):
    target = engines[policy]
    wanted, session = take(400, target, plain)
    kept = session.engine.occupancy(session.position)
    for gamma in (1, 2, 3, 4, 5, 6, 7, 8, None):
        drafter = drafter_of(kind, target, engines)
        length = AdaptiveLength(drafter) if gamma is None else FixedLength(gamma)
        decoder = Speculation(drafter, length, target.vocab)
        tokens, session = take(400, target, decoder)
        assert tokens == wanted
        assert session.engine.occupancy(session.position) == kept
        if gamma is not None and kind != "ngram":
            assert decoder.tally.accepted > 20 and decoder.tally.accepted < decoder.tally.drafted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", ["bundle", "self"])
def test_pain_29_every_byte_of_the_cache_is_that_of_plain_decoding(policy, kind, engines):
    target = RowByRow(engines[policy])
    hashes = {}
    for count in (57, 200, 331):
        _, session = take(count, target, plain)
        hashes[count] = target.state_hash(session.position)
        for length in (FixedLength(1), FixedLength(3), FixedLength(8), Resting(3, 5)):
            decoder = Speculation(drafter_of(kind, target, engines), length, target.vocab)
            _, session = take(count, target, decoder)
            assert target.state_hash(session.position) == hashes[count]


def test_plain_steps_between_rounds_are_counted_to_the_last_one(engines):
    target, length = engines["window"], Resting(2, 7)
    wanted, _ = take(200, target, plain)
    decoder = Speculation(drafter_of("bundle", target, engines), length, target.vocab)
    for count in (1, 2, 5, 9, 60, 200):  # some end while it rests
        before, told = decoder.tally.emitted, len(length.told)
        tokens, _ = take(count, target, decoder)
        assert tokens == wanted[:count] and decoder.tally.emitted - before == count - 1
        assert all(steps == 7 for steps in length.told[told:-1])
    assert 0 < sum(length.told) < decoder.tally.steps == sum(decoder.tally.lengths.values())


@pytest.mark.parametrize("policy", POLICIES)
def test_pain_29_rejected_rounds_leave_no_trace(policy, engines):
    target = engines[policy]
    session = Session(target)
    session.feed(PROMPT * 4)
    before = target.state_hash(session.position)
    for block in ([1, 2, 3], [200] * 8, [7]):
        target.look(16)
        target.step(np.array(block[:1]), session.position, np.zeros(1, np.int64))
        target.look(None)
        session.step(block)
        session.commit(0)
        assert target.state_hash(session.position) == before


def test_a_window_wider_than_the_cache_drafts_exactly(engines):
    target = engines["window"]
    drafter = SelfWindowDrafter(target, 1 << 16)
    decoder = Speculation(drafter, FixedLength(4), target.vocab)
    take(200, target, decoder)
    assert decoder.tally.accepted == decoder.tally.drafted


def test_an_exception_while_drafting_with_a_window_restores_the_full_view(engines, monkeypatch):
    target = engines["heavy"]
    drafter, session = SelfWindowDrafter(target, 16), Session(target)
    session.feed(PROMPT * 4)
    before = target.state_hash(session.position)
    monkeypatch.setattr(drafter, "engine", type("Failing", (), {"look": target.look, "step": lambda *_: 1 / 0})())
    length = FixedLength(3)
    length.start(3)
    with pytest.raises(ZeroDivisionError):
        drafter.draft(session.tokens, 1, length, Sampler(SamplingOptions(), target.vocab))
    assert target.state_hash(session.position) == before


def test_sampling_with_a_real_engine_gives_varied_text_of_the_same_length(engines):
    target = engines["heavy"]
    options = SamplingOptions(temperature=1.0, top_k=20, repetition_penalty=1.2)
    texts = [
        take(150, target, Speculation(SelfWindowDrafter(target, 16), FixedLength(4), target.vocab), options, seed)[0]
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2] and all(len(text) == 150 for text in texts)
