"""What each keep rule keeps, and that heavy hitters are those of the papers."""

import numpy as np
import pytest
from cache_cases import Runner, Text, make_params, repeat_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv.layout import SCORES
from edgekv.reference.keep.heavy import choose


@given(st.integers(0, 16), st.sampled_from([16, 32, 64]), st.integers(1, 300))
def test_window_keeps_exactly_sinks_and_newest(sinks, body, n):
    params = make_params("window", body, sinks=sinks)
    runner = Runner(params)
    runner.feed(Text(params, n), n)
    boundary = n // 16 * 16
    if boundary > body:
        want = np.append(np.arange(sinks), np.arange(boundary - (body - sinks), boundary))
    else:
        want = np.arange(boundary)
    np.testing.assert_array_equal(runner.cache.state.body_pos[:, : len(want)], np.tile(want, (2, 1)))
    assert runner.cache.count == len(want)


@given(st.integers(0, 99), st.integers(0, 4), st.integers(0, 20), st.integers(25, 48))
def test_heavy_choice_is_a_sorted_brute_force_choice(seed, sinks, window, n):
    """Against the definition: rank all unprotected candidates by (score descending, position ascending)."""
    score = np.random.default_rng(seed).integers(0, 4, (2, n)).astype(np.float32)  # many ties
    kept = choose({"sinks": sinks, "window": window, "body_slots": 24}, score)
    for head in range(2):
        others = sorted(range(sinks, n - window), key=lambda i: (-score[head, i], i))[: 24 - sinks - window]
        want = sorted([*range(sinks), *others, *range(n - window, n)])
        assert kept[head].tolist() == want


def attention_matrix(params: dict, text: Text, n: int) -> np.ndarray:
    """Causal softmax attention of the first n tokens in float64: [q_heads, n, n]."""
    scores = params["scale"] * np.einsum("thd,nhd->htn", text.q[:n].astype(np.float64), repeat_heads(params, text.k[:n]))
    if params.get("softcap"):
        scores = params["softcap"] * np.tanh(scores / params["softcap"])
    seen = np.tril(np.ones((n, n), bool))
    if params.get("sliding_window"):
        seen &= np.subtract.outer(np.arange(n), np.arange(n)) < params["sliding_window"]
    weights = np.where(seen, np.exp(scores), 0)
    return weights / weights.sum(-1, keepdims=True)


@given(st.integers(0, 16), st.sampled_from([0, 20]), st.sampled_from([0.0, 2.0]), st.sampled_from([1.0, 0.75]))
@settings(max_examples=20)
def test_scores_are_column_sums_of_the_attention_matrix(observe, sliding_window, softcap, decay):
    """While nothing is evicted, compaction's scores are H2O's: column sums over observed rows of the full attention matrix,
    summed over the query heads of a kv head, although no step ever kept that matrix."""
    params = make_params(
        "heavy", 64, observe=observe, sliding_window=sliding_window, softcap=softcap, score_decay=decay
    )  # fmt: skip
    text, n = Text(params, 64), 64
    runner = Runner(params)
    runner.feed(text, n)
    matrix = attention_matrix(params, text, n)
    score, seen = np.zeros((2, n)), np.zeros((2, n))
    for boundary in range(16, n + 1, 16):
        rows = slice(boundary - observe, boundary)
        score = score * decay + matrix[:, rows].sum(1).reshape(2, 2, n).sum(1)
        seen = seen * decay + (matrix[:, rows] > 0).sum(1).reshape(2, 2, n).sum(1)
    np.testing.assert_allclose(runner.cache.state.body_score, score, atol=1e-5)
    np.testing.assert_allclose(runner.cache.state.body_seen, seen, rtol=1e-6)


def h2o(params: dict, text: Text, n: int) -> list[list[int]]:
    """Heavy hitters as the paper runs them, with the eviction interval as its only change: a masked attention matrix over the
    whole text; evicted columns weigh nothing for later rows. Positions kept per kv head at the end."""
    sinks, window, slots, observe = (params[name] for name in ("sinks", "window", "body_slots", "observe"))
    kept = []
    for head in range(2):
        logits = params["scale"] * text.q[:n, 2 * head : 2 * head + 2].astype(np.float64).transpose(1, 0, 2) @ text.k[:n, head].T
        alive, score, seen = np.ones(n, bool), np.zeros(n), np.zeros(n)
        for boundary in range(16, n + 1, 16):
            for row in range(boundary - observe, boundary):
                mask = alive & (np.arange(n) <= row)
                weights = np.where(mask, np.exp(logits[:, row]), 0)
                score += (weights / weights.sum(-1, keepdims=True)).sum(0)
                seen += 2 * mask
            candidates = np.flatnonzero(alive[:boundary])
            if len(candidates) > slots:
                value = score / np.maximum(seen, 1e-30) if params["score_normalise"] else score
                others = candidates[sinks : len(candidates) - window]
                order = sorted(others, key=lambda i: (-value[i], i))[: slots - sinks - window]
                keep = {*candidates[:sinks], *order, *candidates[len(candidates) - window :]}
                alive[[i for i in candidates if i not in keep]] = False
        kept.append(np.flatnonzero(alive[: n // 16 * 16]).tolist())
    return kept


@pytest.mark.parametrize("normalise", [0, 1])
@pytest.mark.parametrize(("sinks", "window"), [(4, 16), (0, 0), (2, 30)])
def test_heavy_keeps_what_h2o_on_the_whole_matrix_keeps(normalise, sinks, window):
    params = make_params("heavy", 48, sinks=sinks, window=window, observe=16, score_normalise=normalise)
    text = Text(params, 320)
    runner = Runner(params)
    runner.feed(text, 320)
    assert [row.tolist() for row in runner.cache.state.body_pos] == h2o(params, text, 320)


@pytest.mark.parametrize(("normalise", "decay", "changes"), [(1, 1.0, True), (1, 0.9, True), (0, 1.0, False), (0, 0.5, True)])
def test_the_kept_set_keeps_changing_during_decode(normalise, decay, changes):
    """Tokens born long after the start still become heavy hitters, with scores per observation (the default) or with a fast
    decay. Plain sums favour old tokens: where attention is even, as here, they freeze the set, which is why they are no
    default."""
    params = make_params("heavy", 64, sinks=4, window=16, observe=16, score_normalise=normalise, score_decay=decay)
    text = Text(params, 1600)
    runner, joined = Runner(params), []
    previous = set()
    for _ in range(100):
        runner.feed(text, 16)
        positions = runner.cache.state.body_pos[:, : runner.cache.count]
        heavy = {(h, int(p)) for h in range(2) for p in positions[h] if 4 <= p < runner.position - 32}
        joined.append(len(heavy - previous))
        previous = heavy
    assert sum(count > 0 for count in joined[50:]) >= 40 if changes else sum(joined[50:]) < 10


def keydiff(keys: np.ndarray, body: int, sinks: int, window: int) -> list[int]:
    """KeyDiff from its definition in float64, over the text of one kv head: positions kept at the end; keys [n, key_dim]."""
    alive: list[int] = []
    for boundary in range(16, len(keys) + 1, 16):
        alive += range(boundary - 16, boundary)
        if len(alive) > body:
            unit = keys[alive].astype(np.float64)
            unit /= np.linalg.norm(unit, axis=1, keepdims=True)
            anchor = unit.mean(0)
            cosine = unit @ anchor / np.linalg.norm(anchor)
            others = sorted(range(sinks, len(alive) - window), key=lambda i: (cosine[i], i))[: body - sinks - window]
            alive = [alive[i] for i in sorted([*range(sinks), *others, *range(len(alive) - window, len(alive))])]
    return alive


@pytest.mark.parametrize(("sinks", "window"), [(4, 16), (0, 0), (2, 30)])
def test_ranked_by_keys_it_keeps_what_keydiff_keeps(sinks, window):
    params = make_params("heavy", 48, sinks=sinks, window=window, score=SCORES["keys"])
    text = Text(params, 320)
    text.k += 0.5  # keys of a real head share a direction
    runner = Runner(params)
    runner.feed(text, 320)
    want = [keydiff(text.k[:, head], 48, sinks, window) for head in range(2)]
    assert [row.tolist() for row in runner.cache.state.body_pos] == want


def test_ranked_by_keys_the_kept_set_keeps_changing_during_decode():
    params = make_params("heavy", 64, sinks=4, window=16, score=SCORES["keys"])
    runner, text, joined, previous = Runner(params), Text(params, 1600), [], set()
    for _ in range(100):
        runner.feed(text, 16)
        positions = runner.cache.state.body_pos[:, : runner.cache.count]
        heavy = {(h, int(p)) for h in range(2) for p in positions[h] if 4 <= p < runner.position - 32}
        joined.append(len(heavy - previous))
        previous = heavy
    assert sum(count > 0 for count in joined[50:]) >= 40


def test_a_token_unlike_the_others_survives():
    """One old token whose key points away from all others stays; with the direction of the others it goes."""
    for sign, stays in ((-1.0, True), (1.0, False)):
        params = make_params("heavy", 32, window=8, score=SCORES["keys"])
        text = Text(params, 320)
        text.k = 0.3 * text.k + 1.0
        text.k[5] = sign
        runner = Runner(params)
        runner.feed(text, 320)
        assert [5 in row for row in runner.cache.state.body_pos] == [stays, stays]


@pytest.mark.parametrize("options", [{"observe": 8}, {"score": SCORES["keys"]}])
def test_nothing_protected_still_evicts(options):
    """sinks = 0 and window = 0: the body stays at its size and holds the best-ranked tokens alone."""
    params = make_params("heavy", 16, **options)
    runner = Runner(params)
    runner.feed(Text(params, 160), 160)
    assert runner.cache.count == 16 and runner.cache.state.header["evicted"] == 144


def test_an_attended_token_survives_where_a_window_loses_it():
    """One old token whose key every query points at stays in the heavy body and leaves the window body."""
    params = make_params("heavy", 32, sinks=0, window=8, observe=16, score_normalise=1)
    text = Text(params, 320)
    text.k[5] = 3.0
    text.q += 1.0
    for keep, stays in ((params, True), (make_params("window", 32), False)):
        runner = Runner(keep)
        runner.feed(text, 320)
        assert [5 in row for row in runner.cache.state.body_pos] == [stays, stays]
