"""Latent keys: the library against the oracle, rows alone against blocks, rollback, and what is refused."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from latent_cases import Latent, LatentRunner, latent_params
from one_node import finish, open_session, run
from onnx import helper

from edgekv import layout, native
from edgekv.errors import NativeError
from edgekv.layout import StateView

PLANES = ("tail_k", "tail_v", "tail_z")


pytestmark = pytest.mark.usefixtures("instruction_set")


def attend(fields, maps, text, position, rows, state):
    part = slice(position, position + rows)
    return native.attend(fields, text.q[part], text.k[part], text.v[part], position, state, **maps.inputs(position, rows))


class Lockstep(LatentRunner):
    """Every step and compaction of the oracle repeated by the library from the same bytes."""

    def __init__(self, params, maps):
        super().__init__(params, maps)
        self.fields = native.LayerParams(**params)
        self.twin = native.new_state(self.fields)
        self.tolerance = 2e-5 if params["element"] == 0 else 2e-3

    def speculate(self, text, rows):
        self.twin[:] = self.cache.state.block
        y = attend(self.fields, self.maps, text, self.position, rows, self.twin)
        want = super().speculate(text, rows)
        np.testing.assert_allclose(y, want, atol=self.tolerance)
        got = StateView(self.params, self.twin)
        for name in PLANES:
            loose = 0 if name == "tail_v" else 1e-5 if self.params["element"] == 0 else 4e-3  # the rotation may differ in the last bit
            np.testing.assert_allclose(getattr(got, name), getattr(self.cache.state, name), atol=0 if name == "tail_z" else loose, err_msg=name)
        return want

    def compact(self):
        if self.params["keep"] == 0 and self.position > self.params["body_slots"]:
            return
        self.twin[:] = self.cache.state.block
        native.compact(self.fields, self.twin, self.position)
        super().compact()
        got, want = StateView(self.params, self.twin), self.cache.state
        count = int(want.header["body_count"])
        np.testing.assert_array_equal(got.body_pos, want.body_pos)
        np.testing.assert_array_equal(got.body_v[:, :count], want.body_v[:, :count])
        np.testing.assert_array_equal(*(layout.read_keys(s.body_z[None], 0, count) for s in (got, want)))


@given(latent_params(), st.integers(1, 170), st.integers(1, 16), st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_steps_and_compactions_equal_the_oracle(params, n, block, seed):
    text = Text(params, n, seed)
    Lockstep(params, Latent(params, seed)).feed(text, n, block)


@given(latent_params(), st.integers(0, 5))
@settings(max_examples=25, deadline=None)
def test_a_body_far_from_the_beginning_of_a_text_equals_the_oracle(params, seed):
    """Positions of a later part of a text, as an evicting cache has them: beyond the first two tables of rotations."""
    params |= {"keep": layout.KEEPS["window"], "window": 0, "score": 0, "body_slots": 48}
    maps, random = Latent(params, seed), np.random.default_rng(seed)
    fields, cache = native.LayerParams(**params), maps.oracle()
    view, end = cache.state, int(random.integers(1 << 10, 1 << 18)) * 16
    view.body_z[:] = random.standard_normal(view.body_z.shape)
    view.body_v[:] = random.standard_normal(view.body_v.shape)
    view.body_pos[:] = np.sort(random.choice(end, 48, replace=False))
    view.header["body_count"], view.header["tail_base"], view.header["rank_base"], view.header["evicted"] = 48, end, end, end - 48
    text = Text(params, 5, seed)
    state = native.new_state(fields)
    state[:] = view.block
    inputs = maps.inputs(end, 5)
    if params["fused_rotary"]:  # angles in single precision are off by half a radian there: the tables of the step as exact as those of the body
        angle = (end + np.arange(5))[:, None] * maps.inv_freq.astype(np.float64)
        inputs |= {"cos": np.cos(angle).astype(np.float32), "sin": np.sin(angle).astype(np.float32)}
        cache.rotated = lambda x, where: exact(x, where, maps.inv_freq, params)
    y = native.attend(fields, text.q, text.k, text.v, end, state, **inputs)
    np.testing.assert_allclose(y, cache.attend(text.q, text.k, text.v, end), atol=5e-5 if params["element"] == 0 else 3e-3)


def exact(x, positions, inv_freq, params):
    """The rotation with angles in double precision."""
    half, turned = params["rotary_dim"] // 2, x.astype(np.float64)
    angle = np.asarray(positions, np.float64)[:, None] * inv_freq.astype(np.float64)
    first, second = (slice(0, 2 * half, 2), slice(1, 2 * half, 2)) if params["rotary_interleaved"] else (slice(0, half), slice(half, 2 * half))
    a, b = x[..., first].astype(np.float64), x[..., second].astype(np.float64)
    turned[..., first], turned[..., second] = a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)
    return turned.astype(np.float32)


@given(latent_params(), st.integers(17, 100), st.integers(2, 15), st.integers(0, 3))
@settings(max_examples=25, deadline=None)
def test_rows_of_a_block_are_bit_for_bit_rows_alone(params, n, rows, seed):
    text, maps = Text(params, n + rows, seed), Latent(params, seed)
    fields = native.LayerParams(**params)
    runner = LatentRunner(params, maps)
    runner.feed(text, n, 16)
    rows = min(rows, 16 - n % 16)
    block, alone = (native.new_state(fields) for _ in range(2))
    block[:] = alone[:] = runner.cache.state.block
    y = attend(fields, maps, text, n, rows, block)
    for row in range(rows):
        np.testing.assert_array_equal(attend(fields, maps, text, n + row, 1, alone)[0], y[row])
    views = [StateView(params, state) for state in (block, alone)]
    for name in PLANES:
        np.testing.assert_array_equal(*(getattr(view, name) for view in views))
    assert native.state_hash(fields, block, n + rows) == native.state_hash(fields, alone, n + rows)


def test_threads_and_the_plan_change_no_bit():
    params = make_params("full", 2048, 256, "fp16", q_heads=9, kv_heads=3, key_dim=64, value_dim=64, latent=96, rotary_dim=64, fused_rotary=1)
    maps, fields = Latent(params), native.LayerParams(**params)
    text = Text(params, 1300)
    states = [native.new_state(fields) for _ in range(2)]
    results = []
    for threads, state in zip((1, 3), states, strict=True):
        y = []
        for position in range(0, 1300, 256):
            part = slice(position, min(position + 256, 1300))
            y.append(native.attend(fields, text.q[part], text.k[part], text.v[part], position, state, threads=threads, **maps.inputs(position, part.stop - position)))
            if part.stop % 256 == 0:
                native.compact(fields, state, part.stop, threads=threads)
        results.append(np.concatenate(y))
    np.testing.assert_array_equal(*results)
    np.testing.assert_array_equal(states[0][256:], states[1][256:])


def test_rejected_rows_leave_the_hash_alone():
    params = make_params("full", 64, 16, "fp16", latent=5, rotary_dim=6, fused_rotary=1)
    maps, fields, text = Latent(params), native.LayerParams(**params), Text(params, 40)
    state = native.new_state(fields)
    attend(fields, maps, text, 0, 16, state)
    native.compact(fields, state, 16)
    attend(fields, maps, text, 16, 3, state)
    before = native.state_hash(fields, state, 19)
    attend(fields, maps, text, 19, 9, state)
    assert native.state_hash(fields, state, 19) == before
    StateView(params, state).tail_z[0, 2, 1] += 1
    assert native.state_hash(fields, state, 19) != before
    StateView(params, state).tail_z[0, 2, 1] -= 1
    StateView(params, state).body_z[0, 2, 1] += 1
    assert native.state_hash(fields, state, 19) != before


def test_full_rank_is_the_dense_cache():
    """The identity as maps, with a mean to take off and add again: attention to the same keys, read back from single precision."""
    shape = dict(q_heads=4, kv_heads=2, key_dim=16, value_dim=16, rotary_dim=16, fused_rotary=1)
    dense, latent = make_params("full", 128, 32, "fp32", **shape), make_params("full", 128, 32, "fp32", latent=32, **shape)
    maps, text = Latent(latent), Text(latent, 100)
    maps.encoder = np.eye(32, dtype=np.float32)
    maps.decoder[:, :-1] = np.eye(32, dtype=np.float32).reshape(32, 2, 16).transpose(1, 0, 2)
    fields = [native.LayerParams(**p) for p in (dense, latent)]
    states = [native.new_state(f) for f in fields]
    for position in range(0, 100, 20):
        inputs = maps.inputs(position, 20)
        for start in range(position, position + 20):
            part, tables = slice(start, start + 1), {name: inputs[name][start - position : start - position + 1] for name in ("cos", "sin")}
            more = {name: inputs[name] for name in ("key_encode", "key_decode", "inv_freq")}
            y = [native.attend(f, text.q[part], text.k[part], text.v[part], start, s, **tables, **given) for f, s, given in zip(fields, states, ({}, more), strict=True)]
            np.testing.assert_allclose(*y, atol=2e-6)
            if (start + 1) % 32 == 0:
                for f, s in zip(fields, states, strict=True):
                    native.compact(f, s, start + 1)


def test_the_op_takes_latent_maps_in_a_session_and_refuses_wrong_ones():
    params = make_params(latent=5, rotary_dim=6, fused_rotary=1)
    maps, fields, text = Latent(params), native.LayerParams(**params), Text(params, 4)
    names = ("q", "k", "v", "position", "state", "cos", "sin", "", "", "", "key_encode", "key_decode")
    attributes = {name: getattr(fields, name) for name, _ in fields._fields_} | {"inv_freq": maps.inv_freq.tolist()}

    def session(used, without=None):
        given = {name: value for name, value in attributes.items() if name != without}
        node = helper.make_node("BoundedCacheAttention", list(used), ["y", "state.out"], domain="edgekv", **given)
        return open_session(finish([node], [name for name in used if name], native.state_bytes(fields)))

    given = maps.inputs(0, 4)
    inputs = {name: np.ascontiguousarray(getattr(text, name)[:4].transpose(1, 0, 2))[None] for name in "qkv"} | {
        "position": np.zeros(1, np.int64), "cos": given["cos"][None], "sin": given["sin"][None],
        "key_encode": maps.encoder, "key_decode": maps.decoder,
    }  # fmt: skip
    y = run(session(names), native.new_state(fields), **inputs)
    np.testing.assert_array_equal(y.reshape(4, 4, 6), attend(fields, maps, text, 0, 4, native.new_state(fields)))
    with pytest.raises(Exception, match=r"key_encode must have the shape \[16, 5\]"):
        run(session(names), native.new_state(fields), **{**inputs, "key_encode": maps.encoder[:15]})
    with pytest.raises(Exception, match=r"key_decode must have the shape \[2, 6, 8\]"):
        run(session(names), native.new_state(fields), **{**inputs, "key_decode": maps.decoder[:, :5]})
    with pytest.raises(Exception, match="attribute inv_freq"):
        run(session(names, without="inv_freq"), native.new_state(fields), **inputs)


def test_maps_that_are_missing_are_refused():
    params = make_params(latent=5)
    fields, maps, text = native.LayerParams(**params), Latent(params), Text(params, 2)
    for missing in ("key_encode", "key_decode"):
        with pytest.raises(NativeError, match="key_encode and key_decode"):
            native.attend(fields, text.q, text.k, text.v, 0, native.new_state(fields), **{**maps.inputs(0, 2), missing: None})


@pytest.mark.parametrize(
    "wrong, sentence",
    [
        ({"latent": -1}, "latent must be between 0"), ({"latent": 17}, "latent must be between 0"), ({"head_dim": 8}, "head_dim 0"),
        ({"positions": "cache", "keep": "window"}, "latent keys cannot be turned"),
        ({"keep": "heavy", "window": 4}, "ranked by attention"), ({"keep": "heavy", "window": 4, "score": 1, "format": 1, "intervals": 4}, "cannot be ranked"), ({"rotary_dim": 6}, "fused_rotary"),
        ({"q_heads": 40, "kv_heads": 40, "key_dim": 128}, "at most 4096"),
    ],
)  # fmt: skip
def test_parameters_are_checked_alike(wrong, sentence):
    params = make_params(**{"latent": 5, **wrong})
    assert sentence in layout.check_params(params)
    assert native.check(native.LayerParams(**params)) == layout.check_params(params)
