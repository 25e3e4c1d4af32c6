"""Texts that share the reading of the weights are the texts that each would have been alone."""

import itertools
import sys
from pathlib import Path

import pytest
import tiny_bundle

from edgekv import engine
from edgekv.generation.adaptive import FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.ngram import NgramDrafter
from edgekv.generation.drafters.self_window import SelfWindowDrafter
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import lockstep  # noqa: E402

PROMPTS = [list(b"It is a truth"), list(b"universally acknowledged, that a single man"), list(b"x"), list(b"in possession")]
COUNTS = [200, 90, 150, 260]  # texts end at different times, and the others go on


def text(loaded, prompt, count, decoder=plain):
    session = Session(loaded)
    produced = decoder(session, Sampler(SamplingOptions(), loaded.vocab), session.feed(prompt))
    tokens = list(itertools.islice(produced, count))
    produced.close()
    return tokens, loaded.occupancy(session.position)


def drafting(kind, loaded):
    drafter = {"ngram": NgramDrafter, "self": lambda: SelfWindowDrafter(loaded, 16)}[kind]()
    return Speculation(drafter, FixedLength(3), loaded.vocab)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": "full", "kept": 480, "positions": "original"},
        {"keep": "window", "kept": 48, "positions": "cache"},
        {"keep": "heavy", "kept": 64, "positions": "original"},
        {"keep": "full", "kept": 480, "positions": "original", "cache": "selfindex", "retrieve": "24"},
    ],
    ids=lambda options: options.get("cache", options["keep"]),
)
def test_texts_in_lockstep_are_those_of_engines_of_their_own(options, tmp_path):
    made = tiny_bundle.make(tmp_path / "bundle", **options)
    alone = engine.load(made, threads=1, max_rows=4)
    wanted = [text(alone, *both) for both in zip(PROMPTS, COUNTS, strict=True)]
    alone.close()
    table = lockstep.Table(made, len(PROMPTS), max_rows=4)
    kinds = [None, "ngram", "self", None]
    texts = [
        lambda seat, prompt=prompt, count=count, kind=kind: text(seat, prompt, count, drafting(kind, seat) if kind else plain)
        for prompt, count, kind in zip(PROMPTS, COUNTS, kinds, strict=True)
    ]
    found = lockstep.run(table, texts)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
    assert [found[i][1] for i in (0, 3)] == [wanted[i][1] for i in (0, 3)]
    assert list(tmp_path.iterdir()) == [made.folder]  # nothing is left behind


def test_a_text_that_fails_is_reported_and_does_not_stop_the_others(tmp_path):
    made = tiny_bundle.make(tmp_path / "bundle")
    table, done = lockstep.Table(made, 2, max_rows=1), []

    def failing(seat):
        raise ArithmeticError("here")

    with pytest.raises(ArithmeticError, match="here"):
        lockstep.run(table, [failing, lambda seat: done.append(text(seat, PROMPTS[0], 20))])
    assert len(done[0][0]) == 20
