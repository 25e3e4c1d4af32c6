"""Budgets, plans and the options that are refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.budget import Budget, parse_budget
from edgekv.errors import UserError
from edgekv.layout import KEEPS, SCORES
from edgekv.policy import CachePolicy, LayerGeometry, layer_body_slots, layer_params, plan, round_up, state_bytes

ROTARY = LayerGeometry(9, 3, 64, 64, 0.125, rotary_dim=64, inv_freq=(0.5,) * 32)
LOCAL = LayerGeometry(4, 1, 32, 48, 0.2, sliding_window=100, rotary_dim=32, inv_freq=(0.5,) * 16)
ABSOLUTE = LayerGeometry(4, 4, 16, 16, 0.25)
MODEL = [ROTARY, LOCAL] * 3


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("2MiB", Budget(bytes=2 << 20)),
        ("1.5 mib", Budget(bytes=3 << 19)),
        ("700kB", Budget(bytes=700_000)),
        ("512B", Budget(bytes=512)),
        ("1024tok", Budget(tokens=1024)),
        ("96 tokens", Budget(tokens=96)),
        ("25%", Budget(percent=25)),
        ("7.5%", Budget(percent=7.5)),
    ],
)
def test_budgets_as_people_write_them(text, budget):
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["", "2", "MiB", "-1MiB", "0tok", "1.5tok", "0%", "101%", "2TiBB", "nan%", "1e9tok", "٣tok", "0.1B"])
def test_other_budgets_are_refused(text):
    with pytest.raises(UserError, match="write bytes"):
        parse_budget(text)


policies = st.builds(
    CachePolicy,
    keep=st.just("heavy"),
    score=st.just("attention"),
    sinks=st.none() | st.integers(0, 40),
    window=st.none() | st.integers(0, 90),
    observe=st.none() | st.integers(0, 16),
    element=st.sampled_from(["fp16", "fp32"]),
    positions=st.sampled_from(["original", "cache"]),
    boundary=st.sampled_from([None, 16, 64, 256]),
) | st.builds(CachePolicy, keep=st.sampled_from(["full", "window", "heavy"]), boundary=st.sampled_from([None, 16, 48, 256]))


@given(policies, st.integers(1, 6_000_000))
def test_bytes_bound_the_arena_and_the_named_smallest_budget_fits(policy, count):
    try:
        made = plan(policy, MODEL, Budget(bytes=count), 2048)
    except UserError as error:
        words = str(error).split()
        smallest = int(words[words.index("bytes") - 1])
        assert smallest > count
        assert plan(policy, MODEL, Budget(bytes=smallest), 2048).arena_bytes <= smallest
        with pytest.raises(UserError):
            plan(policy, MODEL, Budget(bytes=smallest - 1), 2048)
        return
    assert made.arena_bytes <= count
    # One more unit of body at the same boundary interval would not fit, or would hold nothing the context can bring.
    body = max(made.body_slots) + (made.boundary if policy.keep == "full" else 16)
    resolved = policy.resolve(body, made.boundary)
    more = sum(state_bytes(layer_params(resolved, g, 0, layer_body_slots(resolved, g, body))) for g in MODEL)
    context = 2048 if policy.positions == "cache" else round_up(2048, made.boundary)
    assert more > count or body + (0 if policy.keep == "full" else made.boundary) > context


@given(policies, st.integers(1, 2048))
def test_tokens_asked_are_tokens_held(policy, count):
    try:
        made = plan(policy, MODEL, Budget(tokens=count), 2048)
    except UserError as error:
        smallest = int(str(error).rsplit(" ", 1)[1].removesuffix("tok."))
        assert smallest > count
        assert plan(policy, MODEL, Budget(tokens=smallest), 2048).capacity == smallest
        return
    unit = made.boundary if policy.keep == "full" else 16
    assert count - unit < made.capacity <= count
    if policy.keep == "full":
        assert made.max_position == made.capacity
        if policy.boundary is None:
            assert made.capacity >= (count - 16) * 15 // 16


def test_percent_is_of_the_context():
    assert plan(CachePolicy("window"), MODEL, parse_budget("25%"), 2048).capacity == 512


def test_full_without_a_budget_holds_the_context():
    made = plan(CachePolicy(), [ROTARY], None, 2000)
    assert (made.body_slots, made.boundary, made.max_position) == ((2048,), 256, 2000)


def test_boundary_follows_the_budget():
    chosen = {n: plan(CachePolicy("window"), [ROTARY], Budget(tokens=n), 1 << 16).boundary for n in (64, 416, 1024, 4096, 32768)}
    assert chosen == {64: 16, 416: 64, 1024: 128, 4096: 256, 32768: 256}


@pytest.mark.parametrize("keep", ["full", "window", "heavy"])
def test_a_sliding_window_layer_holds_its_window_and_nothing_more(keep):
    made = plan(CachePolicy(keep), MODEL, Budget(tokens=1024), 2048)
    local = made.layers[1]
    assert local["body_slots"] == 112 and local["keep"] == KEEPS["window"] and local["sinks"] == 0 and local["observe"] == 0
    assert made.layers[0]["keep"] == KEEPS[keep]
    small = plan(CachePolicy(keep), MODEL, Budget(tokens=96), 2048)
    assert small.layers[1]["keep"] == KEEPS[keep] and small.body_slots[0] == small.body_slots[1]


def test_positions_end_where_the_model_or_the_cache_ends():
    tokens = Budget(tokens=512)
    assert plan(CachePolicy("window"), MODEL, tokens, 2048).max_position == 2048
    made = plan(CachePolicy("window", positions="cache"), MODEL, tokens, 2048)
    assert made.max_position is None
    assert made.capacity <= 2048  # the newest rotary position lies inside the trained range
    assert plan(CachePolicy(), MODEL, tokens, 2048).max_position == 512


@pytest.mark.parametrize(("score", "window", "observe"), [("attention", 448, 32), ("keys", 224, 0), (None, 448, 32)])
def test_default_heavy_protects_a_share_of_the_body(score, window, observe):
    made = plan(CachePolicy("heavy", score=score), [ROTARY], Budget(tokens=1024), 8192)
    assert (made.policy.window, made.policy.observe, made.policy.sinks) == (window, observe, 4)
    params = made.layers[0]
    assert (params["window"], params["observe"], params["score"]) == (window, observe, SCORES[score or "attention"])
    assert params["score_normalise"] == (score != "keys")


def test_ranking_by_keys_takes_no_bytes():
    """With the same budget in bytes a cache ranked by keys holds as many tokens as a window; scores by attention cost some."""
    size = Budget(bytes=4 << 20)
    window, keys, attention = (
        plan(p, [ROTARY], size, 8192).capacity
        for p in (CachePolicy("window"), CachePolicy("heavy", score="keys"), CachePolicy("heavy", score="attention"))
    )
    assert window == keys > attention


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"keep": "all"}, "keep must be one of"),
        ({"keep": "full", "positions": "cache"}, "needs a bounded cache"),
        ({"keep": "full", "sinks": 4}, "sinks belong to"),
        ({"keep": "window", "window": 64}, "the size of a window cache is its budget"),
        ({"keep": "window", "observe": 4}, "observe belongs to keep 'heavy'"),
        ({"keep": "full", "score_decay": 0.5}, "score decay belongs to keep 'heavy'"),
        ({"keep": "window", "score": "keys"}, "score belongs to keep 'heavy'"),
        ({"keep": "heavy", "score": "values"}, "score must be"),
        ({"keep": "heavy", "score": "keys", "observe": 8}, "observe belongs to score 'attention'"),
        ({"keep": "heavy", "score": "keys", "score_normalise": True}, "score normalise belongs to score 'attention'"),
        ({"keep": "heavy", "score": "attention", "observe": 32, "boundary": 16}, "must not exceed the boundary interval"),
        ({"keep": "heavy", "boundary": 20}, "multiple of 16"),
        ({"keep": "heavy", "boundary": 0}, "at least 16"),
        ({"keep": "heavy", "sinks": -1}, "at least 0"),
        ({"keep": "heavy", "sinks": True}, "whole number"),
        ({"keep": "heavy", "score_decay": float("nan")}, "between 0 and 1"),
        ({"element": "int8"}, "element must be one of"),
    ],
)
def test_options_without_meaning_are_refused(options, sentence):
    with pytest.raises(UserError, match=sentence):
        CachePolicy(**options)


@pytest.mark.parametrize(
    ("policy", "budget", "sentence"),
    [
        (CachePolicy("window"), None, "needs a KV budget"),
        (CachePolicy("window", positions="cache"), "1024tok", "needs rotary positions"),
        (CachePolicy("window"), "4096tok", "more than the model's context"),
        (CachePolicy("window", sinks=1000), "512tok", "smallest that fits is .* or 1024tok"),
        (CachePolicy("heavy", sinks=10, window=500), "50%", "smallest that fits"),
        (CachePolicy("heavy"), "1KiB", "smallest that fits"),
    ],
)
def test_budgets_that_cannot_be_met_are_refused(policy, budget, sentence):
    with pytest.raises(UserError, match=sentence):
        plan(policy, [ROTARY, ABSOLUTE], parse_budget(budget) if budget else None, 1024)


def test_positions_cache_needs_room_below_the_context():
    with pytest.raises(UserError, match="beyond the model's context of 64 tokens"):
        plan(CachePolicy("window", sinks=60, positions="cache"), MODEL, Budget(bytes=1 << 30), 64)


def test_policies_and_geometries_survive_json():
    made = plan(CachePolicy("heavy", positions="cache"), MODEL, Budget(tokens=512), 2048)
    assert CachePolicy.from_json(made.policy.to_json()) == made.policy
    for keep in ("full", "window"):
        resolved = plan(CachePolicy(keep), MODEL, Budget(tokens=512), 2048).policy
        assert CachePolicy.from_json(resolved.to_json()) == resolved
    assert LayerGeometry.from_json(LOCAL.to_json()) == LOCAL


@pytest.mark.parametrize(
    ("cls", "obj", "sentence"),
    [
        (CachePolicy, [], "must be an object"),
        (CachePolicy, {"keeps": "full"}, "unknown fields: keeps"),
        (CachePolicy, {"keep": ["full"]}, "keep must be one of"),
        (CachePolicy, {"boundary": "16"}, "whole number"),
        (LayerGeometry, {"q_heads": 1}, "lacks kv_heads"),
        (LayerGeometry, LOCAL.to_json() | {"kv_heads": 0}, "at least 1"),
        (LayerGeometry, LOCAL.to_json() | {"kv_heads": 3}, "cannot share"),
        (LayerGeometry, LOCAL.to_json() | {"inv_freq": 3}, "list of numbers"),
        (LayerGeometry, LOCAL.to_json() | {"inv_freq": [1.0]}, "rotary_dim/2"),
        (LayerGeometry, LOCAL.to_json() | {"scale": "x"}, "finite numbers"),
        (LayerGeometry, LOCAL.to_json() | {"rotary_dim": 99}, "rotary_dim must be even"),
    ],
)
def test_untrusted_descriptions_are_refused(cls, obj, sentence):
    with pytest.raises(UserError, match=sentence):
        cls.from_json(obj)


def test_the_policy_in_words():
    words = plan(CachePolicy("heavy"), [ROTARY], Budget(tokens=1024), 8192).describe()
    for part in ("first 4 tokens", "newest 448", "444 others", "mean attention", "every 128 tokens", "half precision"):
        assert part in words
