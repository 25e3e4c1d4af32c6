"""Keys of fewer rotary pairs: leaving out and turning may change places, and the pairs that matter are found."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from edgekv.errors import UserError
from edgekv.export.thin import map_file, pairs, ranks
from edgekv.export.thin.attention import Scores
from edgekv.export.thin.pairs import PairMaps
from edgekv.export.thin.rotation import turn
from edgekv.export.thin.stream import LayerText
from edgekv.geometry import LayerGeometry


def geometry(interleaved=False, rotary=8, head=12, heads=4, kv_heads=2) -> LayerGeometry:
    return LayerGeometry(heads, kv_heads, head, head, 0.3, rotary_dim=rotary, rotary_interleaved=interleaved, inv_freq=tuple(0.5**i for i in range(rotary // 2)))


def random_pairs(g: LayerGeometry, count: int, random: torch.Generator) -> PairMaps:
    rows = [torch.randperm(g.rotary_dim // 2, generator=random)[:count].sort().values for _ in range(g.kv_heads)]
    return PairMaps(torch.stack(rows), g)


@given(st.booleans(), st.sampled_from([(8, 8), (8, 12)]), st.integers(1, 4), st.integers(0, 9))
def test_what_is_left_out_before_the_rotation_is_left_out_after_it(interleaved, sizes, count, seed):
    """The weights lose the numbers, the rotation the frequencies, and the scores are those of the rotated numbers that are kept."""
    random = torch.Generator().manual_seed(seed)
    g = geometry(interleaved, *sizes)
    maps = random_pairs(g, count, random)
    q, k = (torch.randn(heads, 5, g.key_dim, generator=random) for heads in (g.q_heads, g.kv_heads))
    angle = torch.outer(torch.arange(5.0), torch.tensor(g.inv_freq))
    want = maps.apply(*(turn(x, angle.cos(), angle.sin(), g) for x in (q, k)))
    thin = dataclasses.replace(g, key_dim=maps.rank, rotary_dim=2 * count, inv_freq=())
    for x, wanted, group in zip(maps.apply(q, k), want, (2, 1), strict=True):
        for head in range(len(x)):
            columns = maps.pairs[head // group]
            torch.testing.assert_close(turn(x[head], angle.cos()[:, columns], angle.sin()[:, columns], thin), wanted[head])


def test_pairs_that_every_score_lives_on_are_kept():
    g = geometry(head=8)
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(3, 4, 64, 8, generator=random), torch.randn(3, 2, 64, 8, generator=random)
    loud = torch.tensor([[0, 3], [1, 2]])
    for head in range(2):
        for pair in range(4):
            if pair not in loud[head]:
                k[:, head, :, [pair, pair + 4]] *= 0.05
    k[:, :, :, 0] += 100.0  # the same for every key, so no score depends on it
    found = pairs.variances(LayerText(0, q, k, Scores(g.scale)), g)
    chosen = pairs.choose(found, g, 4)
    assert chosen.pairs.tolist() == loud.tolist() and not chosen.whole and chosen.rank == 4
    spectrum = pairs.spectrum(found, g)
    assert spectrum.shape == (2, 8) and (np.diff(spectrum) <= 0).all()
    assert ranks.choose(ranks.parse("auto:50%"), [(2, 8)], [spectrum]) == [4]


def test_a_file_of_pairs_is_read_back_and_damage_is_told(tmp_path):
    g = geometry()
    maps = random_pairs(g, 2, torch.Generator().manual_seed(1))
    map_file.save(tmp_path, [maps, maps])
    again = map_file.fitted(map_file.load(tmp_path), [g, g], "x")
    assert all(torch.equal(a.pairs, maps.pairs) and a.rank == maps.rank for a in again)
    with pytest.raises(UserError, match="does not fit layer 0 of the model: rotary pairs up to"):
        map_file.fitted(map_file.load(tmp_path), [dataclasses.replace(g, rotary_dim=2, inv_freq=())] * 2, "x")
    for wrong in (maps.pairs.flip(1), maps.pairs - 9, maps.pairs[:, :0], maps.pairs[:0], maps.pairs.float(), maps.pairs[0]):
        map_file.save(tmp_path, [PairMaps(wrong, g)])
        with pytest.raises(UserError, match="damaged"):
            map_file.load(tmp_path)


PARTLY = geometry(rotary=4, head=16)


@pytest.mark.parametrize("wanted, layers, chosen", [
    ("50%", [geometry(head=8)] * 2, [4, 4]), ("1%", [geometry(head=8)], [4]), ("90%", [PARTLY] * 2, [14, 14]), ("95%", [PARTLY], [16]), ("87.5%", [PARTLY], [14]),
    ("75%", [geometry(head=16)], [12]), ("65%", [geometry(head=16)], [10]), ("auto:90%", [PARTLY] * 2, [14, 14]), ("auto:95%", [PARTLY] * 2, [16, 14]),
    ("auto:1%", [geometry(head=8)] * 2, [4, 4]), ("14", [PARTLY] * 2, [14, 14]),
])  # fmt: skip
def test_every_layer_keeps_whole_pairs_and_at_least_one(wanted, layers, chosen):
    rank = ranks.parse(wanted)
    pairs.check(layers, rank)
    spectra = [np.repeat(np.arange(g.key_dim / 2)[::-1] + 1, 2)[None].repeat(g.kv_heads, 0) / (layer + 1) for layer, g in enumerate(layers)]
    heads = [(g.kv_heads, g.key_dim) for g in layers]
    assert ranks.choose(rank, heads, spectra, pairs.steps(rank, layers) if rank.share else None) == chosen


@pytest.mark.parametrize("wanted, layers, remedy", [
    ("7", [geometry(head=8)], "give 2, 4 and so on to 8, or use --key-form projected"), ("12", [PARTLY], "and all 12 others.* give 14 or 16, or use"),
    ("50%", [PARTLY] * 2, "87.5% of their bytes, which --key-rank 50% does not reach; give 87.5% or more, or use --key-form projected"),
    ("auto:85%", [PARTLY] * 2, "--key-rank auto:85% does not reach; give auto:87.5% or more"), ("17", [PARTLY], "more than the 16 numbers"),
])  # fmt: skip
def test_what_leaves_no_whole_pairs_is_refused_in_the_terms_it_was_asked_in(wanted, layers, remedy):
    with pytest.raises(UserError, match=remedy):
        pairs.check(layers, ranks.parse(wanted))


def test_layers_without_a_rotation_have_no_pairs():
    with pytest.raises(UserError, match="Layer 1 has no rotary pairs"):
        pairs.check([geometry(), LayerGeometry(2, 1, 8, 8, 1.0)])
