"""Latent keys in a compressed cache: the library against the oracle, rows alone against blocks, rollback, and what is refused."""

import numpy as np
import pytest
from cache_cases import Runner, Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_cases import Latent, packed_latent_params

from edgekv import layout, native
from edgekv.errors import NativeError
from edgekv.layout import StateView
from edgekv.memory.traffic import compaction_traffic
from edgekv.reference.attention import visible
from edgekv.reference.self_index import latents

pytestmark = pytest.mark.usefixtures("instruction_set")

SHAPE = dict(q_heads=4, kv_heads=2, key_dim=64, value_dim=32, latent=48, rotary_dim=64, fused_rotary=1, format=1, intervals=16, sinks=4)


class PackedRunner(Runner):
    """Runner with the oracle of a compressed latent cache."""

    def __init__(self, params: dict, maps: Latent, retrieve: int | None = None):
        self.params, self.maps, self.cache, self.position = params, maps, maps.packed_oracle(retrieve), 0

    def compact(self):
        if self.params["keep"] or self.position <= layout.held_tokens(self.params):
            self.cache.compact(self.position)


def native_step(fields, maps, text, position, rows, state, threads=1):
    """Retrieval and attention: (slots, y)."""
    part, inputs = slice(position, position + rows), maps.inputs(position, rows)
    tables = {name: inputs[name] for name in ("cos", "sin") if name in inputs}
    slots = native.retrieve(fields, text.q[part], position, state, threads=threads, **tables)
    return slots, native.attend(fields, text.q[part], text.k[part], text.v[part], position, state, slots=slots, threads=threads, **inputs)


class Lockstep(PackedRunner):
    """Every step and compaction of the oracle repeated by the library from the same bytes."""

    def __init__(self, params, maps, retrieve, threads=1):
        super().__init__(params, maps, retrieve or None)
        self.fields, self.threads = native.LayerParams(**params), threads
        self.twin = native.new_state(self.fields)
        self.cache.state.header["retrieve"], self.cache.state.header["candidates"] = retrieve, 3 * retrieve
        self.tolerance = 1e-4 if params["element"] == 0 else 4e-3

    def speculate(self, text, rows):
        self.twin[:] = self.cache.state.block
        slots, y = native_step(self.fields, self.maps, text, self.position, rows, self.twin, self.threads)
        if slots.size:  # rotated queries may differ in the last bit: the oracle attends to what the library chose, which must be its own choice
            chosen = iter(slots.transpose(1, 0, 2))
            own = self.cache.retrieved_slots

            def taken(query, seen):
                given = [head[head >= 0] for head in next(chosen)]
                for got, want in zip(given, own(query, seen), strict=True):
                    assert len(got) == len(want) and len(set(got.tolist()) ^ set(want.tolist())) <= 2
                return given

            self.cache.retrieved_slots = taken
        want = super().speculate(text, rows)
        self.cache.__dict__.pop("retrieved_slots", None)
        np.testing.assert_allclose(y, want, atol=self.tolerance)
        got = StateView(self.params, self.twin)
        self.compare_latents(got.tail_z, self.cache.state.tail_z)
        np.testing.assert_array_equal(got.tail_v, self.cache.state.tail_v)
        np.testing.assert_allclose(got.tail_k, self.cache.state.tail_k, atol=1e-5 if self.params["element"] == 0 else 4e-3)
        return want

    def compare_latents(self, got, want):
        """Keys that are turned back may differ in the last bit, and with it a code that lay between two."""
        numbers = []
        for records in (got, want):
            codes, pairs = latents.unpack(records, self.params["latent"])
            numbers.append((pairs[..., :1] + pairs[..., 1:] * codes, pairs[..., 1:]))
        difference = np.abs(numbers[0][0] - numbers[1][0])
        assert (difference <= 1.01 * np.maximum(numbers[0][1], numbers[1][1]) + 0.02).all() and (difference > 0.02).mean() < 0.01

    def compact(self):
        if self.params["keep"] == 0 and self.position > layout.held_tokens(self.params):
            return
        self.twin[:] = self.cache.state.block
        got, want = StateView(self.params, self.twin), self.cache.state
        before, counted = want.body_pos[:, : self.cache.count].tolist(), got.header["traffic"].copy()
        native.compact(self.fields, self.twin, self.position, threads=self.threads)
        super().compact()
        count = self.cache.count
        for name in ("body_pos", "index", "mean", "codebook", "code_seen", "sink_k", "sink_v"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name), err_msg=name)
        np.testing.assert_array_equal(got.payload[:, :count], want.payload[:, :count])
        np.testing.assert_array_equal(got.body_z[:count], want.body_z[:count])
        names = [layout.TRAFFIC.index(n) for n in ("compact_read", "compact_write")]
        moved = tuple((got.header["traffic"] - counted)[names].tolist())
        assert moved == compaction_traffic(self.params, before, want.body_pos[:, :count].tolist(), self.position)


@given(packed_latent_params(), st.integers(30, 200), st.integers(3, 16), st.sampled_from([0, 1, 9, 40]), st.integers(1, 3), st.integers(0, 5))
@settings(max_examples=25)
def test_steps_and_compactions_equal_the_oracle(params, n, block, retrieve, threads, seed):
    text = Text(params, n, seed)
    Lockstep(params, Latent(params, seed), retrieve, threads).feed(text, n, block)


@given(packed_latent_params(), st.integers(60, 150), st.sampled_from([5, 40]), st.integers(0, 5))
@settings(max_examples=15)
def test_the_slots_are_the_oracles_for_queries_of_the_same_bits(params, n, retrieve, seed):
    """Without a rotation nothing rounds differently before the scan."""
    params |= {"rotary_dim": 0, "fused_rotary": 0}
    maps, text = Latent(params, seed), Text(params, n + 1, seed)
    runner = PackedRunner(params, maps)
    runner.feed(text, n, 16)
    cache = runner.cache
    cache.state.header["retrieve"] = cache.retrieve = retrieve
    state = native.new_state(native.LayerParams(**params))
    state[:] = cache.block
    slots = native.retrieve(native.LayerParams(**params), text.q[n : n + 1], n, state)
    seen = visible(cache.state.body_pos[:, : cache.count], n, params["sliding_window"])
    for got, want in zip(slots[:, 0], cache.retrieved_slots(text.q[n].reshape(params["kv_heads"], -1, params["key_dim"]), seen), strict=True):
        np.testing.assert_array_equal(got[got >= 0], want)


@given(packed_latent_params(), st.integers(70, 170), st.integers(2, 15), st.sampled_from([0, 5, 40]), st.integers(0, 3))
@settings(max_examples=20)
def test_rows_of_a_block_are_bit_for_bit_rows_alone(params, n, rows, retrieve, seed):
    text, maps = Text(params, n + rows, seed), Latent(params, seed)
    fields = native.LayerParams(**params)
    runner = PackedRunner(params, maps)
    runner.feed(text, n, 16)
    runner.cache.state.header["retrieve"] = retrieve
    rows = min(rows, params["tail_slots"] - (n - runner.cache.tail_base))
    block, alone = (native.new_state(fields) for _ in range(2))
    block[:] = alone[:] = runner.cache.state.block
    slots, y = native_step(fields, maps, text, n, rows, block, threads=2)
    for row in range(rows):
        single, z = native_step(fields, maps, text, n + row, 1, alone)
        np.testing.assert_array_equal(single[:, 0], slots[:, row])
        np.testing.assert_array_equal(z[0], y[row])
    assert native.state_hash(fields, block, n + rows) == native.state_hash(fields, alone, n + rows)


def test_rejected_rows_leave_the_hash_alone_and_every_plane_is_in_it():
    params = make_params("full", 64, 16, "fp16", **SHAPE)
    maps, fields, text = Latent(params), native.LayerParams(**params), Text(params, 40)
    runner = PackedRunner(params, maps)
    runner.feed(text, 19)
    state = native.new_state(fields)
    state[:] = runner.cache.state.block
    before = native.state_hash(fields, state, 19)
    native_step(fields, maps, text, 19, 9, state)
    assert native.state_hash(fields, state, 19) == before
    view = StateView(params, state)
    for plane, at in ((view.body_z, (3, 5)), (view.payload, (1, 2, 3))):
        plane[at] ^= 1
        assert native.state_hash(fields, state, 19) != before
        plane[at] ^= 1
    view.tail_z[3, 0] ^= 1  # of tokens that are not all there yet
    assert native.state_hash(fields, state, 19) == before
    native_step(fields, maps, text, 19, 13, state)
    before = native.state_hash(fields, state, 32)
    view.tail_z[3, 0] ^= 1
    assert native.state_hash(fields, state, 32) != before


@given(st.integers(1, 130), st.integers(0, 9))
def test_records_hold_what_quantising_gives(count, seed):
    random = np.random.default_rng(seed)
    z = random.standard_normal((5, count)).astype(np.float32)
    records = latents.pack(z)
    assert records.shape == (5, layout.latent_bytes(make_params(format=1, latent=count)))
    codes, pairs = latents.unpack(records, count)
    stored = latents.spread((pairs[..., :1] + pairs[..., 1:] * codes).reshape(5, -1)[:, :count])
    assert np.abs(stored - z).max() < 1
    assert ((stored - z) ** 2).sum() < 0.02 * (z**2).sum()
    assert not codes.reshape(5, -1)[:, count:].any()


def test_levels_rebuild_what_the_decoder_does():
    random = np.random.default_rng(0)
    z, decoder = random.standard_normal((40, 96)).astype(np.float32), random.standard_normal((3, 97, 64)).astype(np.float32)
    records = latents.pack(z)
    codes, pairs = latents.unpack(records, 96)
    stored = latents.spread((pairs[..., :1] + pairs[..., 1:] * codes).reshape(40, 96))
    want = stored @ decoder[:, :-1] + decoder[:, -1:]
    got = latents.rebuild(records, 96, latents.levels_of(decoder))
    assert np.abs(got - want).max() < 0.02 * np.abs(want).max()


def test_scores_are_refused():
    params = make_params("full", 64, 16, "fp16", **SHAPE)
    maps, fields, text = Latent(params), native.LayerParams(**params), Text(params, 40)
    runner = PackedRunner(params, maps)
    runner.feed(text, 32)
    state = native.new_state(fields)
    state[:] = runner.cache.state.block
    state[:256].view(layout.HEADER)[0]["retrieve"] = 5
    tables = {name: maps.inputs(32, 1)[name] for name in ("cos", "sin")}
    with pytest.raises(NativeError, match="not ranked again"):
        native.retrieve(fields, text.q[32:33], 32, state, scored=True, **tables)
    with pytest.raises(NativeError, match="without scores"):
        native.attend(fields, text.q[32:33], text.k[32:33], text.v[32:33], 32, state, slots=np.zeros((2, 1, 3, 5), np.int32), **maps.inputs(32, 1))
