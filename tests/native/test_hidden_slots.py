"""Steps that look at a part of the body only, as drafting with the target's own cache does."""

import numpy as np
import pytest
from cache_cases import Text, bounded_params, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from test_against_oracle import Lockstep

from edgekv import layout, native
from edgekv.errors import NativeError


def hide(runner: Lockstep, first: int, end: int) -> None:
    runner.cache.state.header["hidden_from"], runner.cache.state.header["hidden_to"] = first, end


@given(bounded_params() | st.just(make_params(body=192)) | st.just(make_params(body=1600, tail=16)), st.data())
@settings(max_examples=25)
def test_hidden_slots_are_not_attended_and_nothing_else_changes(params, data):
    count = data.draw(st.integers(33, 190)) if params["body_slots"] < 1600 else 1500
    runner, text = Lockstep(params, 2), Text(params, count + 5, 1)
    runner.feed(text, count)
    blocks = runner.cache.count // 16
    first = data.draw(st.integers(0, blocks))
    end = data.draw(st.integers(first, blocks))
    rows = min(5, params["tail_slots"] - count % params["tail_slots"])
    everything = runner.speculate(text, rows)
    hide(runner, first * 16, end * 16)
    part = runner.speculate(text, rows)
    if first < end and not params.get("sliding_window"):
        assert not np.array_equal(part, everything)
    hide(runner, 0, 0)
    np.testing.assert_array_equal(runner.speculate(text, rows), everything)


def test_reading_less_is_counted():
    params = make_params(body=1600)
    fields, text = native.LayerParams(**params), Text(params, 801)
    state = native.new_state(fields)
    for start in range(0, 800, 16):
        part = slice(start, start + 16)
        native.attend(fields, text.q[part], text.k[part], text.v[part], start, state)
        native.compact(fields, state, start + 16, start + 16)
    header = state[: layout.HEADER.itemsize].view(layout.HEADER)[0]
    read = []
    for hidden in (0, 768):
        header["hidden_from"], header["hidden_to"] = (16, hidden) if hidden else (0, 0)
        before = int(header["traffic"][0])
        native.attend(fields, text.q[800:], text.k[800:], text.v[800:], 800, state)
        read.append(int(header["traffic"][0]) - before)
    assert read[1] == read[0] * 48 // 800


@pytest.mark.parametrize("first,end", [(-16, 16), (16, 0), (0, 8), (0, 64)])
def test_ranges_that_make_no_sense_are_refused(first, end):
    params = make_params()
    fields, text = native.LayerParams(**params), Text(params, 33)
    state = native.new_state(fields)
    for start in (0, 16):
        part = slice(start, start + 16)
        native.attend(fields, text.q[part], text.k[part], text.v[part], start, state)
        native.compact(fields, state, start + 16, start + 16)
    header = state[: layout.HEADER.itemsize].view(layout.HEADER)[0]
    header["hidden_from"], header["hidden_to"] = first, end
    with pytest.raises(NativeError, match="cannot be hidden"):
        native.attend(fields, text.q[32:], text.k[32:], text.v[32:], 32, state)
