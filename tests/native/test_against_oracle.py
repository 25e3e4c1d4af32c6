"""The native library against the NumPy oracle: the same layout byte for byte, the same numbers within rounding.

Oracle and library run in lockstep from the oracle's state, so that one rounding difference cannot grow through later steps.
"""

import numpy as np
import pytest
from cache_cases import INV_FREQ, Runner, Text, bounded_params, make_params
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout, native
from edgekv.errors import CacheFullError, NativeError
from edgekv.layout import StateView



pytestmark = pytest.mark.usefixtures("instruction_set")


def all_params():
    full = st.builds(
        make_params,
        element=st.sampled_from(["fp16", "fp32"]), tail=st.sampled_from([16, 48]), body=st.just(192),
        key_dim=st.sampled_from([8, 13, 64]), value_dim=st.sampled_from([1, 6, 40]), sliding_window=st.sampled_from([0, 9]),
    )  # fmt: skip
    return bounded_params() | full


class Lockstep(Runner):
    """A Runner whose every step and compaction the native library repeats from the same bytes."""

    def __init__(self, params: dict, threads: int):
        super().__init__(params)
        self.threads = threads
        self.fields = native.LayerParams(**params)
        self.twin = native.new_state(self.fields)
        np.testing.assert_array_equal(self.twin, self.cache.state.block)

    def speculate(self, text: Text, rows: int) -> np.ndarray:
        part = slice(self.position, self.position + rows)
        self.twin[:] = self.cache.state.block
        y = native.attend(
            self.fields, text.q[part], text.k[part], text.v[part], self.position, self.twin, threads=self.threads
        )
        want = super().speculate(text, rows)
        np.testing.assert_allclose(y, want, atol=1e-5)
        self.expect_equal_states()
        return want

    def compact(self) -> None:
        self.twin[:] = self.cache.state.block
        super().compact()
        rank_base = int(self.cache.state.header["rank_base"])
        inv_freq = np.array(INV_FREQ, np.float32) if self.params.get("rotary_dim") else None
        native.compact(self.fields, self.twin, self.position, rank_base, inv_freq, threads=self.threads)
        self.expect_equal_states()

    def expect_equal_states(self) -> None:
        got, want = StateView(self.params, self.twin), self.cache.state
        committed = layout.COMMITTED_HEADER_BYTES
        np.testing.assert_array_equal(got.block[:committed], want.block[:committed])
        count = self.cache.count
        for name in ("body_pos", "tail_k", "tail_v", "tail_q"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        np.testing.assert_array_equal(got.body_v[:, :count], want.body_v[:, :count])
        for name in ("body_score", "body_seen"):
            np.testing.assert_allclose(getattr(got, name)[:, :count], getattr(want, name)[:, :count], atol=1e-4, err_msg=name)
        keys = [layout.read_keys(view.body_k, 0, count) for view in (got, want)]
        if self.params["positions"]:  # both turn keys in float32 and round; the last bit may differ
            np.testing.assert_allclose(*keys, atol=1e-5 if self.params["element"] == 0 else 4e-3)
        else:
            np.testing.assert_array_equal(*keys)


@given(all_params(), st.integers(1, 190), st.integers(1, 48), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=60)
def test_steps_and_compactions_equal_the_oracle(params, n, block, threads, seed):
    Lockstep(params, threads).feed(Text(params, n, seed), n, block)


@given(all_params(), st.integers(1, 170), st.integers(1, 48), st.sampled_from([1, 2, 3]))
@settings(max_examples=40)
def test_blocks_and_threads_do_not_change_a_bit(params, n, block, threads):
    """One row at a time on one thread, and blocks on several: identical outputs and identical committed hashes."""
    fields, text = native.LayerParams(**params), Text(params, n)
    runs = []
    for rows, workers in ((1, 1), (block, threads)):
        runner = NativeRunner(params, fields, workers)
        runs.append((runner.feed(text, n, rows), native.state_hash(fields, runner.state, n)))
    np.testing.assert_array_equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


class NativeRunner(Runner):
    """A Runner on the native library alone."""

    def __init__(self, params: dict, fields: native.LayerParams, threads: int = 1):
        super().__init__(params)
        self.fields, self.threads, self.state = fields, threads, native.new_state(fields)

    def speculate(self, text: Text, rows: int) -> np.ndarray:
        part = slice(self.position, self.position + rows)
        return native.attend(self.fields, text.q[part], text.k[part], text.v[part], self.position, self.state, threads=self.threads)

    def compact(self) -> None:
        cached = self.params["positions"]
        rank_base = min(self.position, self.params["body_slots"]) if cached else self.position
        inv_freq = np.array(INV_FREQ, np.float32) if cached else None
        native.compact(self.fields, self.state, self.position, rank_base, inv_freq, threads=self.threads)


@given(bounded_params(), st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30)), min_size=1, max_size=12))
@settings(max_examples=40)
def test_rejected_rows_leave_no_trace(params, rounds):
    fields = native.LayerParams(**params)
    text, wrong = Text(params, 400, 0), Text(params, 400, 1)
    plain, speculating = NativeRunner(params, fields), NativeRunner(params, fields)
    for committed, rejected in rounds:
        room = params["tail_slots"] - speculating.position % params["tail_slots"]
        if rejected:
            before = native.state_hash(fields, speculating.state, speculating.position)
            speculating.speculate(wrong, min(rejected, room))
            assert native.state_hash(fields, speculating.state, speculating.position) == before
        np.testing.assert_array_equal(speculating.feed(text, committed), plain.feed(text, committed))
        hashes = [native.state_hash(fields, run.state, run.position) for run in (plain, speculating)]
        assert hashes[0] == hashes[1]


def test_the_hash_sees_every_committed_plane_and_nothing_else():
    params = make_params("heavy", 32, 16, "fp16", sinks=2, window=8, observe=12)
    fields, text = native.LayerParams(**params), Text(params, 60)
    runner = NativeRunner(params, fields)
    runner.feed(text, 58)  # ten tail rows, six of them observed queries
    view = StateView(params, runner.state)
    before = native.state_hash(fields, runner.state, 58)
    committed = [
        view.body_pos[1, 31:], view.body_score[0, 3:], view.body_seen[0, 3:], view.body_k[1, 1, 7, 15:], view.body_v[0, 5, 2:],
        view.tail_k[1, 0, 2, 9:], view.tail_v[1, 9, 5:], view.tail_q[3, 5, 7:],
    ]  # fmt: skip
    free = [view.tail_k[1, 0, 2, 10:], view.tail_v[1, 10, 5:], view.tail_q[3, 6, 7:], view.header["traffic"]]
    for place in committed + free:
        kept = place.flat[0]
        place.flat[0] = kept + 1
        changed = native.state_hash(fields, runner.state, 58) != before
        assert changed == any(place is one for one in committed)
        place.flat[0] = kept
    assert native.state_hash(fields, runner.state, 58) == before


def test_what_the_oracle_refuses_the_library_refuses():
    params = make_params("window", 32, sinks=4)
    fields, text = native.LayerParams(**params), Text(params, 64)
    state = native.new_state(fields)
    untouched = state.copy()
    for rows, position in ((17, 0), (1, 17), (1, -1)):
        with pytest.raises(NativeError):
            native.attend(fields, text.q[:rows], text.k[:rows], text.v[:rows], position, state)
    for position in (5, -16):
        with pytest.raises(NativeError):
            native.compact(fields, state, position)
    other = native.LayerParams(**(params | {"sinks": 3}))
    with pytest.raises(NativeError):
        native.attend(other, text.q[:1], text.k[:1], text.v[:1], 0, state)
    np.testing.assert_array_equal(state, untouched)


def test_a_full_cache_refuses_to_lose_a_token():
    params = make_params(body=32)
    fields, text = native.LayerParams(**params), Text(params, 48)
    runner = NativeRunner(params, fields)
    runner.feed(text, 47)
    before = native.state_hash(fields, runner.state, 47)
    with pytest.raises(CacheFullError):
        runner.feed(text, 1)
    assert native.state_hash(fields, runner.state, 47) == before


@given(all_params())
@settings(max_examples=50)
def test_layout_and_fingerprint_equal_the_mirror(params):
    fields = native.LayerParams(**params)
    assert tuple(native.layout(fields).values()) == layout.state_layout(params)
    assert native.params_hash(fields) == layout.params_hash(params)
    assert native.check(fields) is None


@pytest.mark.parametrize("threads", [1, 3])
def test_layers_compacted_together_equal_layers_compacted_one_by_one(threads):
    cached = {"positions": "cache", "rotary_dim": 6}
    kinds = [
        make_params("window", 32, 16, "fp16", sinks=2, **cached), make_params("full", 96, 16, **cached),
        make_params("heavy", 48, 16, sinks=2, window=8, observe=8, **cached), make_params("window", 16, 16, **cached),
    ]  # fmt: skip
    fields = [native.LayerParams(**params) for params in kinds]
    table = np.array(INV_FREQ, np.float32)
    together, apart = ([native.new_state(p) for p in fields] for _ in range(2))
    compact = native.Compactor(fields, together, [table] * 4)
    texts = [Text(params, 112, seed) for seed, params in enumerate(kinds)]

    def append(end):
        part = slice(end - 16, end)
        for p, text, *states in zip(fields, texts, together, apart):
            for state in states:
                native.attend(p, text.q[part], text.k[part], text.v[part], part.start, state)

    for end in range(16, 112, 16):
        append(end)
        compact(end, min(end, 96), threads)
        for p, state in zip(fields, apart):
            native.compact(p, state, end, min(end, 96), table)
        for one, other in zip(together, apart):
            np.testing.assert_array_equal(one, other)
    with pytest.raises(NativeError, match="compaction is for boundaries"):
        compact(96, 96, threads)
    append(112)
    with pytest.raises(CacheFullError, match="112 tokens do not fit 96 slots"):
        compact(112, 96, threads)
