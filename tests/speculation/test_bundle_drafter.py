"""How much of a text a bundle reads before it drafts, and what happens when it breaks down."""

from array import array

import numpy as np
import pytest
from table_engine import TableEngine, random_laws

from edgekv.errors import NativeError
from edgekv.generation.adaptive import FixedLength
from edgekv.generation.drafters.bundle import BundleDrafter, first_look
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation
from edgekv.generation.speculation_report import SpeculationReport

VOCAB = 6
LAWS = random_laws(VOCAB, seed=1)
GREEDY = Sampler(SamplingOptions(), VOCAB)


def drafter_of(laws=LAWS, newest=8, **engine):
    return BundleDrafter(TableEngine(laws, boundary=64, chunk=64, **engine), VOCAB, newest=newest)


def watched(drafter):
    """A list that gets the number of tokens of every piece of text that the drafter reads."""
    pieces, feed = [], drafter.session.feed

    def counted(tokens):
        pieces.append(len(tokens))
        return feed(tokens)

    drafter.session.feed = counted
    return pieces


def draft(drafter, text, gamma=4):
    length = FixedLength(gamma)
    length.start(gamma)
    drafter.follow(array("i", text[:-1]))
    return drafter.draft(array("i", text[:-1]), text[-1], length, GREEDY).tokens


def test_a_draft_begins_behind_the_last_tokens_of_a_prompt():
    text = list(np.random.default_rng(0).integers(0, VOCAB, 200))
    drafter = drafter_of()
    drafter.follow(array("i", text[:-1]), anew=True)
    assert len(drafter.session.tokens) == 0  # nothing was earned
    draft(drafter, text)
    assert list(drafter.session.tokens)[:8] == text[-8:]


@pytest.mark.parametrize("right", [2, 3])
def test_right_guesses_earn_the_reading_of_the_rest_when_some_are_wrong(right):
    text = list(np.random.default_rng(0).integers(0, VOCAB, 40))
    drafter = drafter_of(newest=16)
    drafter.follow(array("i", text[:-1]), anew=True)
    whole, paid, earned = False, 0, 0
    while not whole and len(text) < 500:
        guesses = draft(drafter, text)  # shorter ones before its boundaries
        whole = list(drafter.session.tokens)[:40] == text[:40]
        assert whole == (earned >= len(text) - 1)
        earned = paid  # the guesses of a round are judged in the next one
        paid += 2 * min(right, len(guesses))  # a right one pays for two
        text += [*guesses[:right], (guesses[right] + 1) % VOCAB if len(guesses) > right else 0]
    assert whole and drafter._right <= right


def test_a_draft_that_is_right_more_often_than_three_times_in_four_reads_no_more():
    text = list(np.random.default_rng(0).integers(0, VOCAB, 40))
    drafter = drafter_of(newest=16)
    drafter.follow(array("i", text[:-1]), anew=True)
    for i in range(40):
        guesses = draft(drafter, text)
        text += guesses if i % 2 else [*guesses[:3], (guesses[3] + 1) % VOCAB if len(guesses) > 3 else 0]
        assert list(drafter.session.tokens)[:40] != text[:40]
    assert drafter._right * 2 > len(text) and drafter._wrong > 10


@pytest.mark.parametrize("right", [0, 4])
def test_guesses_that_are_all_right_or_all_wrong_earn_nothing(right):
    text = list(np.random.default_rng(0).integers(0, VOCAB, 100))
    drafter = drafter_of()
    drafter.follow(array("i", text[:-1]), anew=True)
    for _ in range(40):
        guesses = draft(drafter, text)
        text += [*guesses[:right], 0 if right == 4 else (guesses[0] + 1) % VOCAB]
    assert list(drafter.session.tokens)[:8] == text[92:100]


@pytest.mark.parametrize("idle", [8, 9, 40])
def test_what_is_missed_while_idle_is_not_read_again(idle):
    text = list(np.random.default_rng(0).integers(0, VOCAB, 100))
    drafter = drafter_of()
    drafter._right, drafter._wrong = 10_000, 5_000
    drafter.follow(array("i", text[:-1]), anew=True)
    draft(drafter, text)
    for _ in range(3):
        text += list(np.random.default_rng(1).integers(0, VOCAB, idle))
        pieces = watched(drafter)
        draft(drafter, text)
        assert sum(pieces) <= 8


@pytest.mark.parametrize("right,wrong,read", [(0, 0, 16), (2, 2, 16), (29, 10, 16), (30, 9, 16), (30, 10, 61), (50, 20, 61)])
def test_a_new_prompt_is_read_when_it_was_earned_and_else_its_end(right, wrong, read):
    drafter = drafter_of(newest=16)
    drafter._right, drafter._wrong = right, wrong
    pieces = watched(drafter)
    text = list(np.random.default_rng(0).integers(0, VOCAB, 61))
    drafter.follow(array("i", text[:-1]), anew=True)
    draft(drafter, text, gamma=1)
    assert sum(pieces) == read and drafter._right == (0 if read == 61 else right)


@pytest.mark.parametrize("target,draft,tokens", [(100, 100, 8), (100, 200, 8), (300, 100, 24), (100, 1, 64)])
def test_a_small_draft_may_look_at_more(target, draft, tokens):
    assert first_look(target, draft) == tokens


@pytest.mark.parametrize("seed", range(20))
def test_what_the_draft_has_read_is_always_a_part_of_the_text(seed):
    rng = np.random.default_rng(seed)
    drafter = drafter_of(capacity=None if seed % 2 else 96)
    text = list(rng.integers(0, VOCAB, rng.integers(1, 60)))
    anew = True
    for _ in range(60):
        drafter.follow(array("i", text[:-1]), anew=anew)
        anew = False
        length = FixedLength(int(rng.integers(0, 5)))
        length.start(16)
        guesses = drafter.draft(array("i", text[:-1]), text[-1], length, GREEDY).tokens
        if guesses:
            own = list(drafter.session.tokens)
            read = own[: len(own) - (len(guesses) - 1)]
            new = read[drafter._joint :]  # what lies before has a gap behind it
            assert new and new == text[len(text) - len(new) :] == text[drafter._origin + drafter._joint :]
        text += [*guesses[: rng.integers(0, 5)], int(rng.integers(0, VOCAB))]
        if rng.random() < 0.1:  # another conversation
            text = list(rng.integers(0, VOCAB, rng.integers(1, 60)))
            anew = True


class Broken(TableEngine):
    """Works for so many steps."""

    def __init__(self, steps, logits=None):
        super().__init__(LAWS, boundary=64, chunk=64)
        self.left, self.instead = steps, logits

    def step(self, tokens, position, rows):
        out = super().step(tokens, position, rows)
        self.left -= 1
        if self.left >= 0:
            return out
        if self.instead is None:
            raise NativeError("the draft has run out of luck")
        return np.full_like(out, self.instead)


@pytest.mark.parametrize("logits,words", [(None, "run out of luck"), (np.nan, "not numbers")])
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_draft_that_breaks_down_is_told_of_and_the_target_goes_on(steps, logits, words):
    drafter = BundleDrafter(Broken(steps, logits), VOCAB)
    decoder = Speculation(drafter, FixedLength(4), VOCAB)
    session = Session(TableEngine(LAWS))
    produced = decoder(session, GREEDY, session.feed([1, 2, 3]))
    assert len([next(produced) for _ in range(50)]) == 50
    report = SpeculationReport.of(decoder, 1000, 4)
    assert words in report.failure and any("broke down" in line and words in line for line in report.lines())


def test_nothing_is_drafted_behind_the_last_token_that_is_wanted():
    for wanted in range(1, 12):
        drafter = drafter_of()
        decoder = Speculation(drafter, FixedLength(4), VOCAB)
        session = Session(TableEngine(LAWS))
        produced = decoder(session, GREEDY, session.feed([1, 2, 3]), wanted)
        assert len([next(produced) for _ in range(wanted)]) == wanted
        assert decoder.tally.accepted == decoder.tally.drafted <= wanted - 1  # a draft that is always right
