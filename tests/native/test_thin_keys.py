"""Steps that store a projection of their keys: the library against the oracle, which is given queries and keys projected already."""

import numpy as np
import pytest
from cache_cases import Runner, Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st
from one_node import finish, open_session, run
from onnx import helper

from edgekv import layout, native
from edgekv.errors import NativeError
from edgekv.layout import StateView
from edgekv.reference.projection import project
from edgekv.reference.rotary import rotate
from edgekv.reference.self_index.cache import SelfIndexCache


pytestmark = pytest.mark.usefixtures("instruction_set")


@st.composite
def thin_params(draw):
    keep = draw(st.sampled_from(["full", "window", "heavy"]))
    head = draw(st.sampled_from([8, 24, 64]))
    more = {"head_dim": head, "key_dim": draw(st.integers(1, head)), "value_dim": draw(st.sampled_from([6, 40])), "sinks": 0 if keep == "full" else 3}
    more["q_heads"], more["kv_heads"] = draw(st.sampled_from([(4, 2), (3, 1), (2, 2)]))
    if keep == "heavy":
        more |= {"window": 8, "observe": draw(st.sampled_from([0, 5])), "score_normalise": 1}
    rotary = draw(st.sampled_from([0, 6, head]))
    more |= {"rotary_dim": rotary, "rotary_interleaved": draw(st.integers(0, 1)), "fused_rotary": int(rotary > 0)}
    return make_params(keep, 192 if keep == "full" else 32, 16, draw(st.sampled_from(["fp16", "fp32"])), **more)


class Given:
    """What a layer gives of a text, its maps and rotation tables, and the same as the oracle takes it."""

    def __init__(self, params: dict, n: int, seed: int):
        random = np.random.default_rng(seed)
        head, thin = params["head_dim"], params["key_dim"]
        self.given = Text({**params, "key_dim": head}, n, seed)
        self.query_map, self.key_map = (
            (random.standard_normal((params[heads], head, thin)) * head**-0.5).astype(layout.element_dtype(params["element"])) for heads in ("q_heads", "kv_heads")
        )
        inv_freq = (1.0 / 50.0 ** (np.arange(params["rotary_dim"] // 2) / max(params["rotary_dim"] // 2, 1))).astype(np.float32)
        angle = np.arange(n, dtype=np.float32)[:, None] * inv_freq
        self.cos, self.sin = (np.cos(angle), np.sin(angle)) if params["fused_rotary"] else (None, None)
        q, k = self.given.q, self.given.k
        if params["fused_rotary"]:
            q, k = (
                rotate(x.transpose(1, 0, 2), np.arange(n), inv_freq, params["rotary_dim"], bool(params.get("rotary_interleaved", 0))).transpose(1, 0, 2)
                for x in (q, k)
            )
        self.q, self.k, self.v = project(q, self.query_map), project(k, self.key_map), self.given.v

    def step(self, part: slice) -> dict:
        tables = {"cos": self.cos[part], "sin": self.sin[part]} if self.cos is not None else {}
        return {"q": self.given.q[part], "k": self.given.k[part], "v": self.v[part], "query_map": self.query_map, "key_map": self.key_map, **tables}


class Lockstep(Runner):
    """Every step of the oracle repeated by the library from the same bytes."""

    def __init__(self, params: dict, text: Given):
        super().__init__({**params, "rotary_dim": 0})
        self.params, self.text, self.fields = params, text, native.LayerParams(**params)
        self.cache = type(self.cache)(params)
        self.twin = native.new_state(self.fields)

    def speculate(self, text, rows):
        part = slice(self.position, self.position + rows)
        self.twin[:] = self.cache.state.block
        given = self.text.step(part)
        y = native.attend(self.fields, given.pop("q"), given.pop("k"), given.pop("v"), self.position, self.twin, **given)
        want = super().speculate(text, rows)
        np.testing.assert_allclose(y, want, atol=2e-5)
        got, expected = StateView(self.params, self.twin), self.cache.state
        tolerance = 1e-6 if self.params["element"] == 0 else 4e-3  # the rotation may differ in the last bit
        for name in ("tail_k", "tail_v", "tail_q"):
            np.testing.assert_allclose(getattr(got, name), getattr(expected, name), atol=tolerance, err_msg=name)
        return want


@given(thin_params(), st.integers(1, 150), st.integers(1, 16), st.integers(0, 5))
@settings(max_examples=40)
def test_steps_equal_the_oracle(params, n, block, seed):
    text = Given(params, n, seed)
    Lockstep(params, text).feed(text, n, block)


@given(st.sampled_from([4, 12, 32]), st.sampled_from([2, 4]), st.integers(0, 5))
@settings(max_examples=15)
def test_a_compressed_body_of_thin_keys_is_searched_as_the_oracle_does(thin, key_bits, seed):
    params = make_params(
        "full", 128, 32, "fp16", q_heads=4, kv_heads=2, head_dim=32, key_dim=thin, value_dim=32, sinks=16, format=layout.FORMATS["selfindex"],
        key_bits=key_bits, value_bits=4, intervals=8, rotary_dim=32, fused_rotary=1,
    )  # fmt: skip
    n = 150
    text = Given(params, n, seed)
    fields, oracle = native.LayerParams(**params), SelfIndexCache(params, retrieve=9)
    state = native.new_state(fields)
    for position in range(0, n, 32):
        part = slice(position, min(position + 32, n))
        state[:] = oracle.block
        header = StateView(params, state).header
        header["retrieve"] = 9
        given = text.step(part)
        slots = native.retrieve(
            fields, given["q"], position, state, cos=given["cos"], sin=given["sin"], query_map=text.query_map
        )
        y = native.attend(fields, given.pop("q"), given.pop("k"), given.pop("v"), position, state, slots=slots, **given)
        want = oracle.attend(text.q[part], text.k[part], text.v[part], position)
        if position:
            assert slots.shape[2] == 9
        np.testing.assert_allclose(y, want, atol=2e-3)
        if part.stop - position == 32:
            oracle.compact(part.stop)


@pytest.mark.parametrize("element", ["fp16", "fp32"])
def test_the_op_takes_maps_in_a_session_and_refuses_wrong_ones(element):
    params = make_params(element=element, head_dim=8, key_dim=5, rotary_dim=0, fused_rotary=0)
    fields, text = native.LayerParams(**params), Given(params, 4, 0)
    names = ("q", "k", "v", "position", "state", "", "", "", "query_map", "key_map")
    attributes = {name: getattr(fields, name) for name, _ in fields._fields_}

    def session(used, half=text.query_map.dtype == np.float16):
        node = helper.make_node("BoundedCacheAttention", list(used), ["y", "state.out"], domain="edgekv", **attributes)
        return open_session(finish([node], [name for name in used if name], native.state_bytes(fields), half=names[8:] if half else ()))

    inputs = {
        "q": np.ascontiguousarray(text.given.q.transpose(1, 0, 2))[None], "k": np.ascontiguousarray(text.given.k.transpose(1, 0, 2))[None],
        "v": np.ascontiguousarray(text.v.transpose(1, 0, 2))[None], "position": np.zeros(1, np.int64),
        "query_map": text.query_map, "key_map": text.key_map,
    }  # fmt: skip
    state = native.new_state(fields)
    y = run(session(names), state, **inputs)
    want = native.attend(fields, text.given.q, text.given.k, text.v, 0, native.new_state(fields), query_map=text.query_map, key_map=text.key_map)
    np.testing.assert_array_equal(y.reshape(want.shape), want)
    with pytest.raises(Exception, match=r"key_map must have the shape \[2, 8, 5\]"):
        run(session(names), native.new_state(fields), **{**inputs, "key_map": text.key_map[:, :7]})
    other = np.float32 if params["element"] == layout.ELEMENTS["fp16"] else np.float16
    with pytest.raises(Exception, match=r"query_map must hold float(16|32) numbers, as the cache does; export the model again"):
        run(session(names, other is np.float16), native.new_state(fields), **inputs | {name: inputs[name].astype(other) for name in names[8:]})
    with pytest.raises(Exception, match=r"query_map must have the shape \[4, 8, 5\]"):
        run(session(names[:5]), native.new_state(fields), **{k: inputs[k] for k in ("q", "k", "v", "position")})


def test_maps_that_are_missing_are_refused():
    params = make_params(head_dim=8, key_dim=5)
    text = Text({**params, "key_dim": 8}, 2)
    fields = native.LayerParams(**params)
    with pytest.raises(NativeError, match="query_map and key_map"):
        native.attend(fields, text.q, text.k, text.v, 0, native.new_state(fields))


@pytest.mark.parametrize(
    "wrong, sentence",
    [({"head_dim": 4}, "head_dim must be 0 or between"), ({"positions": "cache", "keep": "window"}, "projected keys cannot be turned"), ({"rotary_dim": 10}, "rotary_dim")],
)
def test_parameters_are_checked_alike(wrong, sentence):
    params = make_params(**{"head_dim": 8, "key_dim": 5, **wrong})
    assert sentence in layout.check_params(params)
    assert native.check(native.LayerParams(**params)) == layout.check_params(params)


class TurnedByHead:
    """What a layer gives of a text whose kv heads turn at their own frequencies, and the same rotated, as the oracle takes it."""

    def __init__(self, params: dict, n: int, seed: int):
        text, kv_heads, half = Text(params, n, seed), params["kv_heads"], params["rotary_dim"] // 2
        random = np.random.default_rng(seed)
        inv_freq = random.uniform(0.01, 1.0, (kv_heads, half)).astype(np.float32)
        angle = (np.arange(n, dtype=np.float32)[:, None, None] * inv_freq).reshape(n, -1)
        self.given, self.cos, self.sin, self.v = text, np.cos(angle), np.sin(angle), text.v

        def turned(x: np.ndarray) -> np.ndarray:
            of_kv_head = x.reshape(n, kv_heads, -1, x.shape[2])
            heads = [
                rotate(of_kv_head[:, h].transpose(1, 0, 2), np.arange(n), inv_freq[h], 2 * half, bool(params["rotary_interleaved"])).transpose(1, 0, 2)
                for h in range(kv_heads)
            ]
            return np.concatenate(heads, 1)

        self.q, self.k = turned(text.q), turned(text.k)

    def step(self, part: slice) -> dict:
        return {"q": self.given.q[part], "k": self.given.k[part], "v": self.v[part], "cos": self.cos[part], "sin": self.sin[part]}


@given(
    st.sampled_from([("full", "fp32"), ("window", "fp16"), ("heavy", "fp32")]), st.sampled_from([(8, 6), (12, 12), (32, 32)]), st.integers(0, 1),
    st.integers(1, 120), st.integers(1, 16), st.integers(0, 5),
)  # fmt: skip
@settings(max_examples=30)
def test_every_kv_head_may_turn_at_frequencies_of_its_own(kinds, sizes, interleaved, n, block, seed):
    keep, element = kinds
    dim, rotary = sizes
    more = {"window": 8, "observe": 5, "score_normalise": 1} if keep == "heavy" else {}
    params = make_params(
        keep, 192 if keep == "full" else 32, 16, element, key_dim=dim, value_dim=24, rotary_dim=rotary, rotary_interleaved=interleaved,
        fused_rotary=layout.BY_HEAD, head_dim=0, sinks=0 if keep == "full" else 3, **more,
    )  # fmt: skip
    text = TurnedByHead(params, n, seed)
    Lockstep(params, text).feed(text, n, block)


def test_a_compressed_body_of_keys_that_turn_by_head_is_searched_as_the_oracle_does():
    params = make_params(
        "full", 128, 32, "fp16", q_heads=4, kv_heads=2, key_dim=12, value_dim=32, sinks=16, format=layout.FORMATS["selfindex"],
        key_bits=2, value_bits=4, intervals=8, rotary_dim=12, rotary_interleaved=0, fused_rotary=layout.BY_HEAD,
    )  # fmt: skip
    text = TurnedByHead(params, 128, 0)
    fields, oracle = native.LayerParams(**params), SelfIndexCache(params, retrieve=9)
    state = native.new_state(fields)
    for position in range(0, 128, 32):
        part = slice(position, position + 32)
        state[:] = oracle.block
        header = StateView(params, state).header
        header["retrieve"] = 9
        given = text.step(part)
        slots = native.retrieve(fields, given["q"], position, state, cos=given["cos"], sin=given["sin"])
        y = native.attend(fields, given.pop("q"), given.pop("k"), given.pop("v"), position, state, slots=slots, **given)
        np.testing.assert_allclose(y, oracle.attend(text.q[part], text.k[part], text.v[part], position), atol=2e-3)
        oracle.compact(part.stop)


def test_tables_that_are_not_for_every_kv_head_are_refused():
    params = make_params(rotary_dim=8, fused_rotary=layout.BY_HEAD)
    fields, text = native.LayerParams(**params), Text(params, 2)
    with pytest.raises(NativeError, match="cos and sin have 4 columns; 2 kv heads with rotary_dim 8 need 8"):
        native.attend(fields, text.q, text.k, text.v, 0, native.new_state(fields), cos=np.ones((2, 4)), sin=np.ones((2, 4)))
    for change, sentence in (({"positions": 1}, "keys that turn by head"), ({"latent": 3}, "all heads turn alike"), ({"fused_rotary": 3}, "must be 0, 1 or 2")):
        assert sentence in layout.check_params(params | change) and sentence in native.check(native.LayerParams(**params | change))
