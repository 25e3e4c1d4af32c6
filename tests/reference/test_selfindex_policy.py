"""Plans of compressed caches: budgets to the byte, sinks, sliding windows, what is refused, and retrieval as people say it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgekv.budget import Budget
from edgekv.cache_policy import DEFAULT_KEY_BITS, DEFAULT_VALUE_BITS
from edgekv.errors import UserError
from edgekv.layout import FORMATS, KEEPS, LANES, bytes_by_owner, held_tokens, state_bytes
from edgekv.policy import CachePolicy, LayerGeometry, layer_body_slots, layer_params, plan, round_up
from edgekv.retrieval import LEAST, Retrieval, candidates_for, parse_retrieval

WIDE = LayerGeometry(9, 3, 64, 64, 0.125, rotary_dim=64, inv_freq=(0.5,) * 32)
ODD = LayerGeometry(4, 1, 44, 48, 0.2)
LOCAL = LayerGeometry(4, 1, 32, 48, 0.2, sliding_window=100)
FAR = LayerGeometry(4, 1, 32, 48, 0.2, sliding_window=1500)
MODEL = [WIDE, ODD, LOCAL, FAR]
CONTEXT = 2048

policies = st.builds(
    CachePolicy,
    keep=st.just("heavy"),
    sinks=st.none() | st.integers(0, 90),
    window=st.none() | st.integers(0, 90),
    observe=st.none() | st.integers(0, 16),
    element=st.sampled_from(["fp16", "fp32"]),
    boundary=st.sampled_from([None, 32, 64, 256]),
    format=st.just("selfindex"),
    key_bits=st.sampled_from([None, 2, 4]),
    value_bits=st.sampled_from([None, 2, 4, 8]),
) | st.builds(
    CachePolicy,
    keep=st.sampled_from(["full", "window"]),
    sinks=st.none() | st.integers(0, 90),
    boundary=st.sampled_from([None, 32, 48, 256]),
    format=st.just("selfindex"),
)


def test_a_budget_is_spent_where_more_tokens_take_fewer_bytes():
    """With 1,521 to 1,552 tokens the layer of the widest sliding window still keeps sinks and scores, with 1,553 it does not."""
    policy = CachePolicy(keep="heavy", sinks=49, observe=0, element="fp32", format="selfindex", key_bits=4)
    made = [plan(policy, MODEL, Budget(bytes=count), CONTEXT) for count in (1_002_751, 1_002_752, 1_004_800)]
    assert [p.held for p in made] == [1457, 1553, 1553] and made[1].arena_bytes == made[2].arena_bytes == 1_002_752


def smallest_of(error: UserError) -> tuple[int, int]:
    words = str(error).split()
    return int(words[words.index("bytes") - 1]), int(words[-1].removesuffix("tok."))


@given(policies, st.integers(1, 3_000_000))
def test_bytes_bound_the_arena_and_more_would_not_fit(policy, count):
    try:
        made = plan(policy, MODEL, Budget(bytes=count), CONTEXT)
    except UserError as error:
        smallest = smallest_of(error)[0]
        assert smallest > count
        assert plan(policy, MODEL, Budget(bytes=smallest), CONTEXT).arena_bytes <= smallest
        with pytest.raises(UserError):
            plan(policy, MODEL, Budget(bytes=smallest - 1), CONTEXT)
        return
    assert made.arena_bytes <= count
    assert made.arena_bytes == sum(map(state_bytes, made.layers)) == sum(sum(bytes_by_owner(p).values()) for p in made.layers)
    # a little more at the same boundary interval would not fit, or would hold nothing the context can bring
    held = made.held + (made.boundary if policy.keep == "full" else 64)
    resolved = policy.resolve(held, made.boundary)
    more = sum(state_bytes(layer_params(resolved, g, 0, layer_body_slots(resolved, g, held), context=CONTEXT)) for g in MODEL)
    assert more > count or held + (0 if policy.keep == "full" else made.boundary) > CONTEXT


@given(policies, st.integers(1, CONTEXT))
def test_tokens_asked_are_tokens_held(policy, count):
    try:
        made = plan(policy, MODEL, Budget(tokens=count), CONTEXT)
    except UserError as error:
        smallest = smallest_of(error)[1]
        assert smallest > count
        assert plan(policy, MODEL, Budget(tokens=smallest), CONTEXT).capacity == smallest
        return
    assert made.capacity <= count
    if policy.keep == "full":
        assert count - made.boundary < made.capacity == made.max_position
    else:  # whole blocks of 32 beside the sinks
        assert count - 32 - LANES < made.capacity


@given(policies)
def test_every_layer_stores_what_the_policy_says(policy):
    made = plan(policy, MODEL, None if policy.keep == "full" else Budget(tokens=1024), CONTEXT)
    wide, odd, local, far = made.layers
    for p in (wide, odd):
        assert p["format"] == FORMATS["selfindex"] and p["body_slots"] % 32 == 0 and (p["key_bits"], p["value_bits"]) == (policy.key_bits or DEFAULT_KEY_BITS, policy.value_bits or DEFAULT_VALUE_BITS)
        assert p["intervals"] == round_up(CONTEXT, made.boundary) // made.boundary
        assert p["keep"] == KEEPS[policy.keep] and p["sinks"] == (64 if policy.sinks is None and policy.keep != "heavy" else p["sinks"])
    if policy.keep == "full":  # every token of the context has a place, in every layer
        assert held_tokens(wide) + made.boundary >= CONTEXT
    # a short window of the model's own stays as it is, a long one is compressed
    assert local.get("format", 0) == FORMATS["dense"] and local["keep"] == KEEPS["window"] and local["body_slots"] == 112
    assert far["format"] == FORMATS["selfindex"] and far["body_slots"] <= 1504


def test_sinks_are_fewer_in_a_small_cache():
    sinks = {n: plan(CachePolicy("window", format="selfindex", boundary=32), [WIDE], Budget(tokens=n), CONTEXT).policy.sinks for n in (64, 160, 288, 1024)}
    assert sinks == {64: 0, 160: 32, 288: 64, 1024: 64}


def test_a_full_cache_of_a_short_context_serves_short_windows_too():
    """A sliding-window layer that is dense must hold every token as well, though it has no planes for sinks."""
    made = plan(CachePolicy(format="selfindex", boundary=64), [WIDE, LayerGeometry(4, 1, 32, 48, 0.2, sliding_window=1024)], None, 512)
    assert made.layers[0]["body_slots"] + made.layers[0]["sinks"] == 512 == made.layers[1]["body_slots"]
    assert made.capacity == 576 and made.max_position == 512


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"positions": "cache", "keep": "window"}, "compressed keys cannot be turned"),
        ({"key_bits": 3}, "key bits must be 2 or 4, not 3"),
        ({"key_bits": 8}, "key bits must be 2 or 4"),
        ({"value_bits": 3}, "value bits must be 2, 4 or 8"),
        ({"value_bits": True}, "value bits must be 2, 4 or 8"),
        ({"retrieve": "0"}, "takes a number of tokens"),
        ({"retrieve": 96}, "takes a number of tokens"),
        ({"boundary": 16}, "boundary of at least 32"),
        ({"rerank": 0}, "rerank must be"),
        ({"rerank": 65}, "rerank must be at most 64"),
        ({"format": "packed"}, "cache must be one of dense, selfindex"),
    ],
)
def test_what_makes_no_sense_is_refused(fields, words):
    with pytest.raises(UserError, match=words):
        CachePolicy(**{"format": "selfindex", **fields})


@given(st.integers(0, 1 << 20), st.none() | st.integers(1, 64))
def test_512_more_than_are_retrieved_are_ranked_again(retrieved, rerank):
    ranked = candidates_for(retrieved, rerank)
    assert ranked == ((retrieved * rerank if rerank else retrieved + 512))


@pytest.mark.parametrize("option", [{"key_bits": 4}, {"value_bits": 4}, {"retrieve": "7.5%"}, {"rerank": 2}])
def test_options_of_a_compressed_cache_are_refused_for_a_dense_one(option):
    with pytest.raises(UserError, match="belongs to cache 'selfindex'"):
        CachePolicy(**option)


def test_keys_that_do_not_come_in_fours_are_refused_by_name():
    with pytest.raises(UserError, match="layer 1 have 10 numbers"):
        plan(CachePolicy(format="selfindex"), [WIDE, LayerGeometry(2, 2, 10, 10, 0.3)], None, CONTEXT)


@given(st.builds(CachePolicy, format=st.just("selfindex"), retrieve=st.sampled_from([None, "96", "7.5%", "all"]), rerank=st.none() | st.integers(1, 64)))
def test_policies_survive_their_json(policy):
    assert CachePolicy.from_json(policy.to_json()) == policy
    resolved = policy.resolve(512, 64)
    assert CachePolicy.from_json(resolved.to_json()) == resolved == resolved.resolve(512, 64)


@pytest.mark.parametrize(
    ("text", "found"),
    [("96", Retrieval(tokens=96)), (" 7.5% ", Retrieval(percent=7.5)), ("100%", Retrieval(percent=100)), ("ALL", Retrieval()), ("1", Retrieval(tokens=1))],
)
def test_retrieval_as_people_write_it(text, found):
    assert parse_retrieval(text) == found and parse_retrieval(str(found)) == found


@pytest.mark.parametrize("text", ["", "0", "0%", "-3", "1.5", "101%", "nan%", "1e3", "٣", None, 96, True, ["96"], "9" * 40])
def test_other_retrievals_are_refused(text):
    with pytest.raises(UserError, match="takes a number of tokens"):
        parse_retrieval(text)


@given(st.integers(0, 1 << 20), st.integers(1, 1 << 20), st.floats(0.01, 100))
def test_what_a_retrieval_comes_to(held, tokens, percent):
    assert Retrieval().resolve(held) == 0
    assert Retrieval(tokens=tokens).resolve(held) == (tokens if tokens < held else 0)
    wanted = Retrieval(percent=percent).resolve(held)
    assert wanted == 0 and max(LEAST, held * percent / 100) >= held - 1 or LEAST <= wanted < held and wanted >= held * percent / 100
