"""The file of key maps beside a model: what was saved comes back, anything else is refused in a sentence."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgekv.errors import UserError
from edgekv.export.thin import latent_maps, map_file, maps
from edgekv.geometry import LayerGeometry

GENERATOR = torch.Generator().manual_seed(0)
GEOMETRY = LayerGeometry(4, 2, 16, 16, 0.25, rotary_dim=4, inv_freq=(1.0, 0.1))


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR)


MADE = {
    "projected": [maps.KeyMaps(random(4, 16, 8), random(2, 16, 8)) for _ in range(2)],
    "latent": [latent_maps.LatentMaps(random(32, 8), random(8, 32), random(32), GEOMETRY) for _ in range(2)],
}


@pytest.fixture(params=MADE)
def form(request):
    return request.param


@pytest.fixture
def file(form, tmp_path):
    map_file.save(tmp_path, MADE[form])
    return tmp_path / map_file.FILE


def test_what_was_saved_comes_back(file, form, tmp_path):
    found = map_file.fitted(map_file.load(tmp_path), [GEOMETRY] * 2, "the file")
    q, k = random(4, 20, 16), random(2, 20, 16)
    for wanted, layer in zip(MADE[form], found, strict=True):
        assert layer.form == form and layer.rank == 8
        for start in (0, 7):
            assert all(map(torch.equal, wanted.at(start).apply(q, k), layer.at(start).apply(q, k)))


def test_maps_of_full_rank_are_saved(tmp_path):
    """Encoder and decoder are one tensor then."""
    unit = torch.eye(32)
    map_file.save(tmp_path, [latent_maps.LatentMaps(unit, unit, torch.zeros(32), GEOMETRY)])
    assert map_file.load(tmp_path)[0].whole


def test_a_model_without_the_file_has_none(tmp_path):
    assert map_file.load(tmp_path) is None and not map_file.there(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, None], ids=["empty", "junk", "truncated"])
def test_damaged_files_are_refused(file, tmp_path, content):
    file.write_bytes(file.read_bytes()[:100] if content is None else content)
    with pytest.raises(UserError, match="is damaged"):
        map_file.load(tmp_path)


def first(change):
    def changed(tensors):
        name = "key_map.0" if "key_map.0" in tensors else "key_decode.0"
        return {**tensors, name: change(tensors[name])}

    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: dict(sorted(tensors.items())[1:]), "other names"),
        (lambda tensors: {**tensors, "another": torch.zeros(1)}, "other names"),
        (lambda tensors: {}, "other names"),
        (first(lambda t: t[..., :1].contiguous()), "do not fit each other"),
        (first(lambda t: t[0].contiguous()), "do not fit each other"),
        (first(lambda t: t.new_zeros(2, 1000, 1000)), "do not fit each other"),
        (first(lambda t: t.new_full(t.shape, float("nan"))), "not all numbers"),
        (first(lambda t: t / 0), "not all numbers"),
        (first(lambda t: t.int()), "numbers are int32"),
        (first(lambda t: t.to(torch.complex64)), "numbers are complex64"),
    ],
)
def test_other_contents_are_refused(file, tmp_path, change, words):
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError, match=words):
        map_file.load(tmp_path)


def test_maps_of_another_model_are_refused(file, tmp_path):
    with pytest.raises(UserError, match="maps of 2 layers and the model has 3"):
        map_file.fitted(map_file.load(tmp_path), [GEOMETRY] * 3, "it")
    with pytest.raises(UserError, match="does not fit layer 1"):
        map_file.fitted(map_file.load(tmp_path), [GEOMETRY, LayerGeometry(4, 2, 12, 12, 0.25)], "it")
