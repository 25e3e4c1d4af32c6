"""The compressed cache: its parts from their definitions, and the properties every cache has."""

import numpy as np
import pytest
from cache_cases import Text, make_params
from hypothesis import given, settings
from hypothesis import strategies as st

from edgekv import layout
from edgekv.errors import CacheFullError, UserError
from edgekv.reference.self_index import SelfIndexCache, index_plane, signs
from edgekv.reference.self_index.quantise import dequantise, pack, quantise, unbiased, unpack
from edgekv.reference.self_index.transform import hadamard


def make(keep="full", body=256, tail=16, retrieve=None, candidates=0, **more) -> SelfIndexCache:
    params = make_params(keep, body, tail, **({"format": 1, "sinks": 4, "intervals": 64, "value_bits": 4, "key_dim": 32, "value_dim": 32} | more))
    return SelfIndexCache(params, retrieve, candidates)


def feed(cache: SelfIndexCache, text: Text, n: int, start: int = 0, block: int = 1 << 30) -> np.ndarray:
    """Commit tokens start..start+n-1 in blocks that end at boundaries: y float32 [n, q_heads, value_dim]."""
    out, position = [], start
    while position < start + n:
        rows = min(block, start + n - position, cache.params["tail_slots"] - position % cache.params["tail_slots"])
        part = slice(position, position + rows)
        out.append(cache.attend(text.q[part], text.k[part], text.v[part], position))
        position += rows
        if position % cache.params["tail_slots"] == 0:
            cache.compact(position)
    return np.concatenate(out)


def committed(cache: SelfIndexCache, position: int) -> bytes:
    """Everything committed: header without traffic, all planes but the tail, and its committed rows."""
    rows, s = position - cache.tail_base, cache.state
    queries = max(rows - (cache.params["tail_slots"] - cache.params["observe"]), 0)
    planes = [getattr(s, name) for name in layout.planes(cache.params) if not name.startswith("tail")]
    tail = [s.tail_k[:, :, :, :].transpose(0, 1, 3, 2).reshape(len(s.tail_v), -1, cache.params["key_dim"])[:, :rows]]
    return cache.block[:128].tobytes() + b"".join(x.tobytes() for x in [*planes, *tail, s.tail_v[:, :rows], s.tail_q[:, :queries]])


# ---- parts


@pytest.mark.parametrize("dim", [4, 64, 80, 96, 128])
def test_the_transform_is_sylvesters_and_its_own_inverse(dim):
    block = dim & -dim
    index = np.arange(block)
    matrix = (-1.0) ** np.vectorize(lambda n: bin(n).count("1"))(index[:, None] & index) / np.sqrt(block)
    x = np.random.default_rng(0).standard_normal((3, dim)).astype(np.float32)
    want = (x.reshape(3, -1, block) @ matrix).reshape(3, dim)
    np.testing.assert_allclose(hadamard(x), want, atol=1e-5)
    np.testing.assert_allclose(hadamard(hadamard(x)), x, atol=1e-5)


@given(st.sampled_from([2, 4, 8]), st.integers(1, 70), st.integers(0, 99))
def test_codes_survive_packing_and_numbers_come_back_within_a_step(bits, dim, seed):
    x = np.random.default_rng(seed).standard_normal((5, dim)).astype(np.float32)
    codes, pairs = quantise(x, bits)
    assert codes.max() < 2**bits
    np.testing.assert_array_equal(unpack(pack(codes, bits), bits), codes)
    assert pack(codes, bits).shape == (5, codes.shape[1] * 4 * bits)
    step = np.repeat(pairs[..., 1].astype(np.float32), 32, axis=-1)[:, :dim]
    inside = np.abs(dequantise(codes, pairs, dim) - x) <= 0.5 * step + 2e-3
    ends = np.take_along_axis(codes.reshape(5, -1)[:, :dim], np.tile(np.arange(dim), (5, 1)), 1)
    assert (inside | (ends == 0) | (ends == 2**bits - 1)).all()  # the refit may leave the extremes outside


def test_the_refit_lowers_the_error_of_the_published_quantiser():
    x = np.abs(np.random.default_rng(0).standard_normal((500, 64))).astype(np.float32)
    codes, pairs = quantise(x, 2)
    y = x.reshape(500, 2, 32)
    zero, scale = y.min(-1, keepdims=True), (y.max(-1, keepdims=True) - y.min(-1, keepdims=True)) / 3
    published = (zero + scale * np.rint((y - zero) / scale)).reshape(x.shape)
    assert ((dequantise(codes, pairs, 64) - x) ** 2).mean() < 0.8 * ((published - x) ** 2).mean()


def test_unbiased_pairs_keep_the_product_of_a_group_with_itself():
    x = np.abs(np.random.default_rng(0).standard_normal((500, 64))).astype(np.float32)
    codes, pairs = quantise(x, 2)
    square = (x * x).reshape(500, 2, 32).sum(-1)

    def along(pairs):
        return (x * dequantise(codes, pairs, 64)).reshape(500, 2, 32).sum(-1) / square

    assert along(pairs).mean() < 0.98  # what is looked for would lose this much of its score
    np.testing.assert_allclose(along(unbiased(x, codes, pairs)), 1, atol=2e-3)


@pytest.mark.parametrize("group", [np.zeros(32), np.full(32, 1e-30), np.full(32, 1.5), np.full(32, np.nan), np.full(7, 0.25)], ids=lambda x: f"{x[0]}x{x.size}")
def test_a_group_without_a_product_stays_as_it_is(group):
    x = group[None].astype(np.float32)
    codes, pairs = quantise(x, 2)
    np.testing.assert_array_equal(unbiased(x, codes, pairs), pairs)


def test_a_constant_group_has_scale_zero_and_comes_back():
    codes, pairs = quantise(np.full((1, 32), 1.5, np.float32), 2)
    assert not codes.any() and pairs[0, 0].tolist() == [1.5, 0.0]
    assert (dequantise(codes, pairs, 32) == 1.5).all()


def test_the_sign_of_zero_is_plus_in_codes_and_back():
    codes = signs.sign_codes(np.array([[0.0, -1.0, -0.0, 2.0]], np.float32))
    assert codes.tolist() == [[0b1101]] and signs.signs_of(codes).tolist() == [[1, -1, 1, 1]]


def test_the_codebook_is_the_mean_of_each_cluster():
    x = np.random.default_rng(1).standard_normal((400, 8)).astype(np.float32) + 0.3
    codes = signs.sign_codes(x)
    book, seen = np.zeros((2, 16, 4), np.float32), np.zeros((2, 16), np.float32)
    for part in (slice(0, 130), slice(130, 400)):
        signs.learn(book, seen, x[part], codes[part])
    for group in range(2):
        for code in range(16):
            members = x[codes[:, group] == code, 4 * group : 4 * group + 4]
            assert seen[group, code] == len(members)
            np.testing.assert_allclose(book[group, code], members.mean(0) if len(members) else 0, atol=1e-5)


@given(st.integers(0, 99), st.sampled_from([8, 64, 128]))
def test_table_scores_are_centroid_products_up_to_a_constant_and_half_a_step_per_group(seed, dim):
    random = np.random.default_rng(seed)
    x, query = random.standard_normal((200, dim)).astype(np.float32), random.standard_normal(dim).astype(np.float32)
    codes, book = signs.sign_codes(x), random.standard_normal((dim // 4, 16, 4)).astype(np.float32)
    table, step = signs.score_table(query, book)
    assert table.max() == signs.LEVELS
    exact = (book[np.arange(dim // 4), codes].reshape(200, dim) * query).sum(1)
    error = signs.scan(table, codes) * step - exact
    assert np.ptp(error) <= step * dim / 4 + 1e-4
    brute = [sum(int(table[g, code]) for g, code in enumerate(token)) for token in codes]
    assert signs.scan(table, codes).tolist() == brute


def test_ties_go_to_the_lowest_index():
    assert signs.best(np.array([1, 5, 5, 0, 5]), 2).tolist() == [1, 2]


def test_bytes_per_token_are_those_published():
    shape = {"format": layout.FORMATS["selfindex"], "key_dim": 128, "value_dim": 128, "value_bits": 2}
    assert layout.token_bytes(shape) == 112
    assert layout.token_bytes(shape | {"key_dim": 64, "value_dim": 64}) == 56
    assert layout.token_bytes(shape | {"key_dim": 64, "value_dim": 64, "value_bits": 4}) == 72
    assert layout.token_bytes(shape | {"key_dim": 64, "value_dim": 64, "key_bits": 4}) == 72


def test_the_index_plane_holds_32_tokens_side_by_side():
    codes = np.random.default_rng(0).integers(0, 16, (2, 70, 8), dtype=np.uint8)
    plane = np.full((2, 3, 8, 16), 255, np.uint8)
    index_plane.write(plane, codes)
    np.testing.assert_array_equal(index_plane.read(plane, 0, 70), codes)
    assert plane[1, 1, 5, 3] == codes[1, 32 + 3, 5] | codes[1, 32 + 16 + 3, 5] << 4
    assert not plane[:, 2, :, 6:].any()


@given(st.sampled_from(["full", "window", "heavy"]), st.sampled_from([2, 4]), st.sampled_from([2, 4, 8]), st.integers(0, 70), st.sampled_from([32, 64, 80]))
@settings(max_examples=30)
def test_planes_cover_the_block_without_overlap(keep, key_bits, bits, sinks, dim):
    cache = make(keep, key_bits=key_bits, value_bits=bits, sinks=sinks, key_dim=dim, value_dim=dim - 8, observe=8 if keep == "heavy" else 0)
    items = layout.itemised_bytes(cache.params)
    assert 0 <= len(cache.block) - sum(items.values()) < 256
    cache.block[:] = 0
    for name in layout.planes(cache.params):
        getattr(cache.state, name).view(np.uint8)[...] += 1
    assert cache.block.max() == 1 and not cache.block[:256].any()


# ---- the cache


@pytest.mark.parametrize(("key_bits", "key_error"), [(2, 0.25), (4, 0.05)])
@pytest.mark.parametrize(("bits", "tolerance"), [(2, 0.35), (4, 0.09), (8, 0.01)])
def test_attending_to_everything_is_softmax_over_what_was_stored(bits, tolerance, key_bits, key_error):
    """Nothing but quantisation stands between this and full attention: outputs are plain softmax over dequantised tokens, and
    those differ from the true ones by the quantiser's error."""
    cache = make(key_bits=key_bits, value_bits=bits, element="fp32", sinks=5)
    text = Text(cache.params, 140)
    feed(cache, text, 139)
    keys, values, where = cache.everything(11)
    y = feed(cache, text, 1, 139)[0]
    assert (where == np.arange(139)).all()
    for got, true, error in ((keys, text.k, key_error), (values, text.v, tolerance)):
        true = true[:139].transpose(1, 0, 2)
        np.testing.assert_array_equal(got[:, :5], true[:, :5])
        np.testing.assert_array_equal(got[:, 128:], true[:, 128:])
        assert np.linalg.norm((got - true)[:, 5:128]) < error * np.linalg.norm(true[:, 5:128])
    for head in range(4):
        k = np.append(keys[head // 2], text.k[139:140, head // 2], axis=0)
        v = np.append(values[head // 2], text.v[139:140, head // 2], axis=0)
        weight = np.exp(0.4 * k.astype(np.float64) @ text.q[139, head])
        np.testing.assert_allclose(y[head], weight @ v / weight.sum(), atol=1e-5)


def test_retrieving_as_many_as_there_are_is_nearly_attending_to_all():
    dense, sparse = make(), make(retrieve=1 << 20)
    text = Text(dense.params, 150)
    error = np.abs(feed(dense, text, 150) - feed(sparse, text, 150))  # of scores from whole numbers
    assert error.max() < 0.12 and error.mean() < 0.01


@given(st.sampled_from(["full", "window", "heavy"]), st.integers(1, 20), st.integers(0, 60), st.integers(1, 30))
@settings(max_examples=12)
def test_blocks_and_rejected_rows_leave_no_trace(keep, retrieve, candidates, block):
    more = {"body": 64, "observe": 8, "window": 20, "score_normalise": 1} if keep == "heavy" else {}
    more |= {"body": 64} if keep == "window" else {}
    one, other = (make(keep, retrieve=retrieve, candidates=candidates, **more) for _ in range(2))
    text, wrong = Text(one.params, 130), Text(one.params, 130, 1)
    first = feed(one, text, 130)
    second = [feed(other, text, 75, 0, block)]
    before = committed(other, 75)
    other.attend(wrong.q[75:80], wrong.k[75:80], wrong.v[75:80], 75)
    assert committed(other, 75) == before
    second.append(feed(other, text, 55, 75, block))
    np.testing.assert_array_equal(first, np.concatenate(second))
    assert committed(one, 130) == committed(other, 130)


def test_every_step_retrieves_k_from_the_body_for_as_long_as_the_text_runs():
    """Sinks and tail never use up the budget: after 1,000 tokens each step still attends to k compressed tokens."""
    cache = make(body=1024, tail=16, retrieve=12, kv_heads=1, q_heads=2)
    text = Text(cache.params, 1000)
    asked = []
    original = cache.retrieved_slots

    def counted(*arguments):
        slots = original(*arguments)
        asked.append([len(head) for head in slots])
        return slots

    cache.retrieved_slots = counted
    feed(cache, text, 1000)
    assert all(lengths == [12] for lengths in asked[64:])


def test_retrieval_finds_the_key_that_the_query_points_at():
    cache = make(retrieve=8, candidates=32)
    text = Text(cache.params, 200)
    text.q[199] = 4 * np.repeat(text.k[57], 2, axis=0)
    feed(cache, text, 199)
    slots = cache.retrieved_slots(text.q[199].reshape(2, 2, -1), np.ones((2, cache.count), bool))
    assert all(57 in cache.state.body_pos[head, slots[head]] for head in range(2))


def test_without_re_ranking_slots_are_the_best_table_scores_by_brute_force():
    cache = make(retrieve=10)
    text = Text(cache.params, 180)
    feed(cache, text, 170)
    query = text.q[170].reshape(2, 2, -1)
    slots = cache.retrieved_slots(query, np.ones((2, cache.count), bool))
    for head in range(2):
        together = np.float32(0.4) * query[head].sum(0)
        table, step = signs.score_table(hadamard(together), cache.state.codebook[head])
        means = cache.state.mean[head].astype(np.float32)
        score = []
        for slot in range(cache.count):
            interval = cache.state.body_pos[head, slot] // 16
            shift = int(np.rint(((means[interval] - means[9]) @ together) / step))
            score.append(sum(int(table[g, c]) for g, c in enumerate(cache.codes()[head, slot])) + shift)
        assert slots[head].tolist() == sorted(sorted(range(cache.count), key=lambda i: (-score[i], i))[:10])


def test_shifting_all_keys_changes_nothing():
    """Softmax does not see a constant added to every key, and neither do codes, magnitudes and the choice of slots."""
    one, other = make(retrieve=10, element="fp32", sinks=0), make(retrieve=10, element="fp32", sinks=0)
    text = Text(one.params, 100)
    for start in range(0, 100, 16):  # intervals whose mean is exactly 0, so that fp16 means carry no rounding of their own
        text.k[start + 8 : start + 16] = -text.k[start : start + 8][: len(text.k[start + 8 : start + 16])]
    text.k = np.round(text.k * 64) / 64
    shifted = Text(one.params, 100)
    shifted.q, shifted.k, shifted.v = text.q, text.k + np.float32(2.0), text.v
    np.testing.assert_allclose(feed(one, text, 96), feed(other, shifted, 96), atol=1e-5)
    np.testing.assert_array_equal(one.codes(), other.codes())


@pytest.mark.parametrize("keep", ["window", "heavy"])
def test_a_bounded_body_evicts_and_keeps_sinks_apart(keep):
    more = {"observe": 16, "window": 24, "score_normalise": 1} if keep == "heavy" else {}
    cache = make(keep, body=64, sinks=10, **more)
    text = Text(cache.params, 400)
    feed(cache, text, 400)
    where = cache.state.body_pos
    assert cache.count == 64 and cache.sink_count == 10 and cache.state.header["evicted"] == 400 - 10 - 64
    assert (np.diff(where, axis=1) > 0).all() and where.min() >= 10
    if keep == "window":
        assert (where == np.arange(400 - 64, 400)).all()
    keys, values = cache.body()  # what moved between slots still belongs to its token
    for head in range(2):
        error = np.abs(values[head] - text.v[where[head], head]).max()
        assert error < 0.5
        together = np.corrcoef(keys[head].ravel(), text.k[where[head], head].ravel())[0, 1]
        assert together > 0.95


def test_misuse_is_refused():
    with pytest.raises(UserError, match="cannot be turned"):
        make("window", positions="cache", rotary_dim=8)
    with pytest.raises(UserError, match="multiple of 32"):
        make(body=48)
    with pytest.raises(UserError, match="value_bits"):
        make(value_bits=3)
    with pytest.raises(UserError, match="key_bits"):
        make(key_bits=8)
    cache = make(body=32, sinks=0)
    with pytest.raises(CacheFullError):
        feed(cache, Text(cache.params, 48), 48)
    with pytest.raises(UserError, match="do not fit the interval"):
        cache.attend(np.zeros((17, 4, 32)), np.zeros((17, 2, 32)), np.zeros((17, 2, 32)), cache.tail_base)
