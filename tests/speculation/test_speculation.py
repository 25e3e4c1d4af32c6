"""Whole speculative decoding over a model that is a table: same tokens, same law, same cache as plain decoding."""

import itertools

import numpy as np
import pytest
from statistics_of import chi_square_p
from table_engine import TableEngine, random_laws

from edgekv.generation.adaptive import AdaptiveLength, FixedLength
from edgekv.generation.decoders import plain
from edgekv.generation.drafters.bundle import BundleDrafter
from edgekv.generation.drafters.ngram import NgramDrafter
from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.session import Session
from edgekv.generation.speculation import Speculation

VOCAB = 6
LAWS = random_laws(VOCAB, seed=1)
BETTER = 0.7 * LAWS + 0.3 * random_laws(VOCAB, seed=2)  # a draft that is right more often than not
WORSE = random_laws(VOCAB, seed=3)


def take(count, session, sampler, decoder, prompt=(1, 2, 3)):
    """`count` tokens behind the prompt."""
    sampler.observe(prompt)
    produced = decoder(session, sampler, session.feed(prompt))
    tokens = list(itertools.islice(produced, count))
    produced.close()
    return tokens


def drafter_of(kind, boundary=32, capacity=None):
    if kind == "ngram":
        return NgramDrafter()
    laws = {"same": LAWS, "better": BETTER, "worse": WORSE}[kind]
    return BundleDrafter(TableEngine(laws, boundary=boundary, chunk=16, capacity=capacity, max_rows=1), VOCAB)


def speculation(kind="better", gamma=4, **options):
    drafter = drafter_of(kind, **options)
    return Speculation(drafter, AdaptiveLength(drafter) if gamma is None else FixedLength(gamma), VOCAB)


def greedy(decoder, count=600, **engine):
    session = Session(TableEngine(LAWS, **engine))
    tokens = take(count, session, Sampler(SamplingOptions(), VOCAB), decoder)
    return tokens, session


# A greedy table soon runs in circles; laws that change with the place keep every draft honest.
@pytest.mark.parametrize("kind", ["same", "better", "worse", "ngram"])
@pytest.mark.parametrize("gamma", [1, 2, 3, 4, 5, 6, 7, 8, 16, None])
def test_greedy_tokens_and_cache_are_those_of_plain_decoding(kind, gamma):
    for boundary, draft_boundary in ((16, 32), (32, 32), (48, 16)):
        wanted, plainly = greedy(plain, boundary=boundary)
        tokens, session = greedy(speculation(kind, gamma, boundary=draft_boundary), boundary=boundary)
        assert tokens == wanted
        assert list(session.tokens) == list(plainly.tokens)
        assert session.engine.state_hash(session.position) == plainly.engine.state_hash(plainly.position)
        assert session.engine.compactions == plainly.engine.compactions


@pytest.mark.parametrize("kind", ["same", "worse", "ngram"])
def test_answers_that_end_anywhere_leave_the_cache_of_plain_decoding(kind):
    for count in range(1, 80):
        wanted, plainly = greedy(plain, count, boundary=16)
        tokens, session = greedy(speculation(kind, 5, boundary=16), count, boundary=16)
        assert tokens == wanted and list(session.tokens) == list(plainly.tokens)
        assert session.engine.state_hash(session.position) == plainly.engine.state_hash(plainly.position)


@pytest.mark.parametrize("kind", ["same", "better", "ngram"])
def test_a_full_cache_ends_the_text_where_plain_decoding_ends_it(kind):
    wanted, plainly = greedy(plain, 500, boundary=16, capacity=96)
    assert len(wanted) < 500
    tokens, session = greedy(speculation(kind, 6, boundary=16), 500, boundary=16, capacity=96)
    assert tokens == wanted and list(session.tokens) == list(plainly.tokens)


def test_a_draft_whose_cache_is_full_starts_over_and_goes_on_drafting():
    decoder = speculation("same", 4, boundary=16, capacity=64)
    wanted, _ = greedy(plain)
    tokens, _ = greedy(decoder)
    assert tokens == wanted
    assert decoder.tally.accepted / decoder.tally.drafted > 0.9  # restarts cost the table two tokens of context, no more


def test_a_rejected_round_leaves_the_committed_state_unchanged():
    engine = TableEngine(LAWS, boundary=32)
    session = Session(engine)
    session.feed([1, 2, 3, 4])
    before, tokens = engine.state_hash(session.position), list(session.tokens)
    session.step([5, 0, 1, 2, 3])
    session.commit(0)
    assert engine.state_hash(session.position) == before and list(session.tokens) == tokens
    assert session.room == 28


def test_blocks_end_at_boundaries():
    sizes = []

    class Watching(TableEngine):
        def step(self, tokens, position, rows):
            sizes.append((position, len(tokens)))
            return super().step(tokens, position, rows)

    session = Session(Watching(LAWS, boundary=16, chunk=16))
    take(300, session, Sampler(SamplingOptions(), VOCAB), speculation("same", 8))
    assert max(size for _, size in sizes) == 9
    assert all(position // 16 == (position + size - 1) // 16 for position, size in sizes)


def test_the_draft_reads_two_tokens_after_a_round_in_which_all_were_accepted():
    sizes = []

    class Watching(TableEngine):
        def step(self, tokens, position, rows):
            sizes.append(len(tokens))
            return super().step(tokens, position, rows)

    drafter = BundleDrafter(Watching(LAWS, boundary=512, chunk=64, max_rows=1), VOCAB)
    decoder = Speculation(drafter, FixedLength(3), VOCAB)
    session = Session(TableEngine(LAWS, boundary=512, chunk=64))
    take(40, session, Sampler(SamplingOptions(), VOCAB), decoder)
    # the prompt with the first token behind it, and two single steps; then the last draft token and the bonus token, and two single steps
    assert sizes[:6] == [4, 1, 1, 2, 1, 1]
    assert decoder.tally.accepted == decoder.tally.drafted


def transitions(tokens, vocab):
    counts = np.zeros((vocab,) * 3)
    np.add.at(counts, (tokens[:-2], tokens[1:-1], tokens[2:]), 1)
    return counts


def law_p(tokens, options):
    """Chi-square of all transitions against the laws that the sampler's processing makes of the table."""
    table, counts = TableEngine(LAWS).logits, transitions(np.array(tokens), VOCAB)
    sampler = Sampler(options, VOCAB, seed=0)
    return min(
        chi_square_p(counts[a, b], sampler.distribution(table[a, b])) * VOCAB**2  # Bonferroni: as many tests as contexts
        for a, b in itertools.product(range(VOCAB), repeat=2)
        if counts[a, b].sum() > 200
    )


@pytest.mark.parametrize(
    "kind,gamma,options",
    [
        ("better", 3, SamplingOptions(temperature=1.0)),
        ("worse", 4, SamplingOptions(temperature=0.7, top_p=0.8)),
        ("ngram", 5, SamplingOptions(temperature=1.3, top_k=4)),
        ("better", None, SamplingOptions(temperature=1.0, min_p=0.1)),
        ("same", 2, SamplingOptions(temperature=0.9, top_k=5, top_p=0.9, min_p=0.05)),
    ],
)
def test_sampled_text_has_the_law_of_the_target(kind, gamma, options):
    decoder = speculation(kind, gamma)
    session = Session(TableEngine(LAWS, boundary=32))
    tokens = take(200_000, session, Sampler(options, VOCAB, seed=5), decoder)
    assert law_p(tokens, options) > 1e-3
    if gamma is not None:
        assert decoder.tally.drafted > 100_000
    if kind == "same":
        assert decoder.tally.accepted == decoder.tally.drafted


def test_repetition_penalty_is_part_of_both_laws():
    """Joint law of three tokens, of which each makes itself less likely afterwards."""
    options, prompt = SamplingOptions(temperature=1.0, repetition_penalty=2.0), (1, 2)
    table = TableEngine(LAWS).logits
    counts, joint = np.zeros((VOCAB,) * 3), np.zeros((VOCAB,) * 3)
    for text in itertools.product(range(VOCAB), repeat=3):
        probability = 1.0
        for place in range(3):
            judge = Sampler(options, VOCAB, seed=0)
            judge.observe(prompt + text[:place])
            context = (prompt + text)[place : place + 2]
            probability *= judge.distribution(table[context])[text[place]]
        joint[text] = probability
    decoder, session = speculation("better", 3), Session(TableEngine(LAWS))
    sampler = Sampler(options, VOCAB, seed=6)
    for _ in range(70_000):
        session.reset()
        sampler.forget()
        counts[tuple(take(3, session, sampler, decoder, prompt))] += 1
    assert chi_square_p(counts.ravel(), joint.ravel()) > 1e-3


def test_acceptance_is_the_overlap_of_both_laws():
    decoder = speculation("better", 1)
    session = Session(TableEngine(LAWS, boundary=32))
    tokens = take(200_000, session, Sampler(SamplingOptions(temperature=1.0), VOCAB, seed=9), decoder)
    share = transitions(np.array(tokens), VOCAB).sum(axis=2) / (len(tokens) - 2)  # how often each context occurs
    overlap = (share * np.minimum(LAWS, BETTER).sum(axis=2)).sum()
    assert abs(decoder.tally.accepted / decoder.tally.drafted - overlap) < 0.01


def test_a_conversation_may_rewind_or_replace_the_text_between_answers():
    session, sampler = Session(TableEngine(LAWS, boundary=32)), Sampler(SamplingOptions(), VOCAB)
    decoder = speculation("same", 4)
    take(45, session, sampler, decoder)
    assert session.rewind(40)
    again = take(30, session, sampler, decoder, prompt=(5, 5, 0))
    session.reset()
    third = take(30, session, sampler, decoder, prompt=(4, 0, 2))
    assert decoder.tally.accepted == decoder.tally.drafted  # the draft never kept a token of another text
    fresh = Session(TableEngine(LAWS, boundary=32))
    assert third == take(30, fresh, Sampler(SamplingOptions(), VOCAB), plain, prompt=(4, 0, 2))
    assert len(again) == 30


def test_a_draft_that_breaks_down_does_not_end_the_answer():
    class Broken(TableEngine):
        def step(self, tokens, position, rows):
            out = super().step(tokens, position, rows)
            if position > 50:
                out[:] = np.nan
            return out

    wanted, _ = greedy(plain)
    decoder = Speculation(BundleDrafter(Broken(LAWS, max_rows=1), VOCAB), FixedLength(4), VOCAB)
    assert greedy(decoder)[0] == wanted


def test_a_draft_that_knows_only_some_tokens_drafts_those():
    known = np.array([0, 2, 3])
    few = LAWS[np.ix_(known, known, known)]
    few = few / few.sum(axis=-1, keepdims=True)

    class Few(TableEngine):  # reads the target's ids, gives logits for the tokens it knows
        def step(self, tokens, position, rows):
            return super().step(np.searchsorted(known, np.clip(tokens, 0, 3)), position, rows)

    options = SamplingOptions(temperature=1.0)
    decoder = Speculation(BundleDrafter(Few(few, max_rows=1), VOCAB, known), FixedLength(3), VOCAB)
    tokens = take(60_000, Session(TableEngine(LAWS)), Sampler(options, VOCAB, seed=1), decoder)
    assert law_p(tokens, options) > 1e-3 and set(tokens) == set(range(VOCAB))
