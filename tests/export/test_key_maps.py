"""The file of key maps beside a model: what was saved comes back, anything else is refused in a sentence."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from edgekv.errors import UserError
from edgekv.export.thin import maps

GENERATOR = torch.Generator().manual_seed(0)
MADE = [maps.KeyMaps(torch.randn(4, 16, 8, generator=GENERATOR), torch.randn(2, 16, 8, generator=GENERATOR)) for _ in range(2)]


@pytest.fixture
def file(tmp_path):
    maps.save(tmp_path, MADE)
    return tmp_path / maps.FILE


def test_what_was_saved_comes_back(file, tmp_path):
    found = maps.load(tmp_path)
    for wanted, layer in zip(MADE, found, strict=True):
        torch.testing.assert_close(layer.query, wanted.query, atol=0, rtol=0)
        torch.testing.assert_close(layer.key, wanted.key, atol=0, rtol=0)


def test_a_model_without_the_file_has_none(tmp_path):
    assert maps.load(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"\xff" * 5000, None], ids=["empty", "junk", "truncated"])
def test_damaged_files_are_refused(file, tmp_path, content):
    file.write_bytes(file.read_bytes()[:100] if content is None else content)
    with pytest.raises(UserError, match="is damaged"):
        maps.load(tmp_path)


def first_key(change):
    return lambda tensors: {**tensors, "key_map.0": change(tensors["key_map.0"])}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: {name: t for name, t in tensors.items() if name != "key_map.0"}, "other names"),
        (lambda tensors: {**tensors, "another": torch.zeros(1)}, "other names"),
        (first_key(lambda t: t[..., :1].contiguous()), "do not fit each other"),
        (first_key(lambda t: t[0].contiguous()), "do not fit each other"),
        (first_key(lambda t: t.new_zeros(2, 1000, 1000)), "do not fit each other"),
        (first_key(lambda t: t.new_full(t.shape, float("nan"))), "not all numbers"),
        (first_key(lambda t: t / 0), "not all numbers"),
    ],
)
def test_other_contents_are_refused(file, tmp_path, change, words):
    save_file(change(load_file(file)), file)
    with pytest.raises(UserError, match=words):
        maps.load(tmp_path)
