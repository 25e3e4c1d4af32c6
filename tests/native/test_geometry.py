"""Real head shapes and caches of several splits: every instruction set against a direct computation, and its bits against themselves."""

import numpy as np
import pytest
from cache_cases import Text, dense_attention, make_params, repeat_heads
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import native


pytestmark = pytest.mark.usefixtures("instruction_set")


def shapes():
    return st.builds(
        lambda groups, kv_heads, key_dim, value_dim, tail, element, window, cap: make_params(
            body=4096, tail=tail, element=element, q_heads=groups * kv_heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim,
            scale=key_dim**-0.5, sliding_window=window, softcap=cap,
        ),
        st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13]), st.sampled_from([1, 2, 3]), st.sampled_from([16, 33, 64, 80, 96, 128, 256]),
        st.sampled_from([16, 47, 64, 80, 96, 128, 256]), st.sampled_from([64, 256, 1024]), st.sampled_from(["fp16", "fp32"]),
        st.sampled_from([0, 0, 1, 100, 700]), st.sampled_from([0.0, 0.0, 20.0]),
    )  # fmt: skip


def fill(params: native.LayerParams, text: Text, n: int) -> np.ndarray:
    """A state that holds the first n tokens of the text."""
    state, end = native.new_state(params), params.tail_slots
    for start in range(0, n, end):
        part = slice(start, min(start + end, n))
        native.attend(params, text.q[part], text.k[part], text.v[part], start, state)
        if part.stop % end == 0:
            native.compact(params, state, part.stop)
    return state


@given(shapes(), st.integers(0, 2100), st.integers(1, 40), st.integers(0, 9))
@settings(max_examples=25)
def test_a_step_equals_the_definition_and_its_rows_stand_alone(fields, n, rows, seed):
    params = native.LayerParams(**fields)
    rows = min(rows, params.tail_slots - n % params.tail_slots)
    text = Text(fields, n + rows, seed)
    for x in (text.k, text.v):
        x[:] = x.astype(np.float16)  # so that the state holds what the definition sees
    state, new = fill(params, text, n), slice(n, n + rows)
    y = native.attend(params, text.q[new], text.k[new], text.v[new], n, state, threads=2)
    keys, values = repeat_heads(fields, text.k), repeat_heads(fields, text.v)
    want = dense_attention(fields, text.q[new], keys, values, np.arange(n, n + rows), np.arange(n + rows))
    np.testing.assert_allclose(y, want, rtol=2e-5, atol=2e-5)
    for row in (0, rows // 2, rows - 1):
        one = slice(n + row, n + row + 1)
        alone = native.attend(params, text.q[one], text.k[one], text.v[one], n + row, state)
        np.testing.assert_array_equal(alone[0], y[row])


@pytest.mark.parametrize("element", ["fp16", "fp32"])
def test_a_long_block_that_takes_its_splits_in_turn_has_the_bits_of_single_rows(element):
    """Many rows go through another plan (splits one after the other) than few (splits side by side, merged afterwards)."""
    fields = make_params(body=2048, tail=512, element=element, q_heads=6, kv_heads=2, key_dim=32, value_dim=32, scale=0.2)
    params, text = native.LayerParams(**fields), Text(fields, 2048)
    state = fill(params, text, 1536)
    block = slice(1536, 2048)
    results = [native.attend(params, text.q[block], text.k[block], text.v[block], 1536, state, threads=t) for t in (1, 2, 5)]
    for y in results[1:]:
        np.testing.assert_array_equal(y, results[0])
    for row in range(0, 512, 31):
        one = slice(1536 + row, 1537 + row)
        alone = native.attend(params, text.q[one], text.k[one], text.v[one], one.start, state)
        np.testing.assert_array_equal(alone[0], results[0][row])


def test_large_scores_neither_overflow_nor_vanish():
    fields = make_params(body=1024, tail=128, key_dim=16, value_dim=4, scale=1.0)
    params, text = native.LayerParams(**fields), Text(fields, 900)
    text.q *= 100
    state = fill(params, text, 899)
    y = native.attend(params, text.q[899:], text.k[899:], text.v[899:], 899, state)
    want = dense_attention_stable(fields, text)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(y[0], want, atol=1e-3)


def dense_attention_stable(fields: dict, text: Text) -> np.ndarray:
    """The last row of a text in float64, each row's own largest score subtracted."""
    scores = np.einsum("hd,nhd->hn", text.q[-1].astype(np.float64), repeat_heads(fields, text.k))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return np.einsum("hn,nhd->hd", weights / weights.sum(1, keepdims=True), repeat_heads(fields, text.v).astype(np.float64))
