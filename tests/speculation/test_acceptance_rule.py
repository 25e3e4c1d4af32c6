"""The acceptance rule against the target's law, over 200,000 draws and more per case."""

import numpy as np
import pytest
from statistics_of import chi_square_p

from edgekv.generation.sampling import Sampler, SamplingOptions
from edgekv.generation.speculation_rule import AcceptanceRule, probability

DRAWS = 200_000


def dense(law):
    """A law over the whole vocabulary, as candidates of it: in random order, without what is impossible."""
    ids = np.random.default_rng(5).permutation(np.flatnonzero(law))
    return ids, law[ids]


def drawn(sampler, law):
    return int(law[0][sampler.draw(law[1])])


def random_law(rng, vocab, support):
    law = np.zeros(vocab)
    ids = rng.choice(vocab, support, replace=False)
    law[ids] = rng.dirichlet(np.full(support, 0.7))
    return law


def cases():
    rng = np.random.default_rng(1)
    yield "overlapping", random_law(rng, 8, 6), random_law(rng, 8, 6)
    yield "peaked draft", random_law(rng, 6, 6), np.array([0.97, 0.03, 0, 0, 0, 0])
    yield "disjoint", np.array([0.2, 0.5, 0.3, 0, 0]), np.array([0, 0, 0, 0.4, 0.6])
    yield "draft inside target", np.array([0.1, 0.2, 0.3, 0.4]), np.array([0, 0.5, 0.5, 0])
    yield "target inside draft", np.array([0, 0.5, 0.5, 0]), np.array([0.1, 0.2, 0.3, 0.4])
    yield "certain draft", np.array([0.25, 0.35, 0.4]), np.array([0, 1.0, 0])
    yield "certain target", np.array([0, 1.0, 0]), np.array([0.25, 0.35, 0.4])


@pytest.mark.parametrize("name,p,q", list(cases()), ids=[case[0] for case in cases()])
def test_first_token_has_the_law_of_the_target_and_acceptance_is_the_overlap(name, p, q):
    sampler = Sampler(SamplingOptions(temperature=1.0), p.size, seed=11)
    rule, target, draft = AcceptanceRule(p.size), dense(p), dense(q)
    counts, accepted = np.zeros(p.size), 0
    for _ in range(DRAWS):
        token = drawn(sampler, draft)
        verdict = rule.verify([token], [draft], lambda place: target, sampler)
        counts[token if verdict.accepted else verdict.token] += 1
        accepted += verdict.accepted
    assert chi_square_p(counts, p) > 1e-3
    overlap = np.minimum(p, q).sum()
    assert abs(accepted / DRAWS - overlap) <= 4 * np.sqrt(overlap * (1 - overlap) / DRAWS) + 1e-12


def test_proposals_without_a_law_are_certain():
    p = np.array([0.25, 0.35, 0.4])
    sampler, rule, target = Sampler(SamplingOptions(temperature=1.0), 3, seed=2), AcceptanceRule(3), dense(p)
    counts, accepted = np.zeros(3), 0
    for _ in range(DRAWS):
        verdict = rule.verify([2], [None], lambda place: target, sampler)
        counts[2 if verdict.accepted else verdict.token] += 1
        accepted += verdict.accepted
    assert chi_square_p(counts, p) > 1e-3
    assert abs(accepted / DRAWS - 0.4) < 4 * np.sqrt(0.24 / DRAWS)


def test_identical_laws_are_always_accepted():
    rng = np.random.default_rng(3)
    p = random_law(rng, 30, 30)
    sampler, rule, law = Sampler(SamplingOptions(temperature=1.0), 30, seed=4), AcceptanceRule(30), dense(p)
    for _ in range(2000):
        tokens = [drawn(sampler, law) for _ in range(4)]
        assert rule.verify(tokens, [law] * 4, lambda place: law, sampler).accepted == 4


def test_three_places_and_the_bonus_have_the_joint_law():
    """All of (x1, x2, x3, x4) in a Markov chain: places after a rejection are filled by the target alone."""
    rng = np.random.default_rng(7)
    vocab = 3
    target = rng.dirichlet(np.ones(vocab), size=vocab)
    drafter = rng.dirichlet(np.ones(vocab) * 0.5, size=vocab)
    sampler, rule = Sampler(SamplingOptions(temperature=1.0), vocab, seed=8), AcceptanceRule(vocab)
    ids = np.arange(vocab)
    counts = np.zeros((vocab,) * 4)
    for _ in range(DRAWS):
        text, laws = [0], []
        for _ in range(3):
            laws.append((ids, drafter[text[-1]]))
            text.append(drawn(sampler, laws[-1]))
        verdict = rule.verify(text[1:], laws, lambda place: (ids, target[text[place]]), sampler)
        made = text[: verdict.accepted + 1] + [verdict.token]
        while len(made) < 5:
            made.append(drawn(sampler, (ids, target[made[-1]])))
        counts[tuple(made[1:5])] += 1
    joint = np.einsum("a,ab,bc,cd->abcd", target[0], target, target, target)
    assert chi_square_p(counts.ravel(), joint.ravel()) > 1e-3


def test_a_wrong_rule_is_caught():
    """The tests above have the power to see the usual mistake: resampling from p instead of the residual."""
    p, q = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.3, 0.4])
    sampler, target, draft = Sampler(SamplingOptions(temperature=1.0), 3, seed=11), dense(p), dense(q)
    counts = np.zeros(3)
    for _ in range(DRAWS):
        token = drawn(sampler, draft)
        kept = sampler.rng.random() * q[token] < p[token]
        counts[token if kept else drawn(sampler, target)] += 1
    assert chi_square_p(counts, p) < 1e-3


def test_greedy_laws_accept_equal_tokens_only():
    sampler, rule = Sampler(SamplingOptions(), 5, seed=1), AcceptanceRule(5)
    sure = [(np.array([token]), np.ones(1)) for token in range(5)]
    verdict = rule.verify([1, 2, 4], [sure[1], sure[2], sure[4]], lambda place: sure[[1, 2, 3, 0][place]], sampler)
    assert verdict == (2, 3)
    verdict = rule.verify([1, 2, 4], [None] * 3, lambda place: sure[[1, 2, 4, 0][place]], sampler)
    assert verdict == (3, 0)


def test_rounding_alone_never_leaves_an_empty_residual():
    p = np.array([0.5, 0.5])
    law = (np.arange(2), p)
    rest = AcceptanceRule(2).residual(law, (np.arange(2), p * (1 + 1e-16)), 0)
    assert rest[1].sum() > 0


def test_probability_finds_tokens_in_sparse_laws():
    law = (np.array([7, 0, 2]), np.array([0.5, 0.3, 0.2]))
    assert [probability(law, token) for token in (0, 1, 2, 7, 9)] == [0.3, 0.0, 0.2, 0.5, 0.0]
