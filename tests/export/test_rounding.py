"""Weights that learn through the rounding of an export to 4 bits."""

import numpy as np
import pytest
import torch

from edgekv.export import quantise
from edgekv.export.thin import rounding


@pytest.mark.parametrize("seed", range(6))
def test_the_grid_is_found_again_by_itself_and_by_an_export(seed):
    rng = np.random.default_rng(seed)
    rows, columns = int(rng.integers(1, 40)), int(rng.integers(1, 5)) * 32 - int(rng.integers(0, 2)) * int(rng.integers(0, 32))
    weight = torch.from_numpy((rng.standard_normal((rows, columns)) * 10.0 ** rng.uniform(-3, 1)).astype(np.float32))
    found = rounding.rounded(weight)
    for block, before in zip(found.split(32, dim=1), weight.split(32, dim=1), strict=True):
        half = (before.amax(1) - before.amin(1)) / 30
        assert ((block - before).abs().amax(1) <= half * (1 + 1e-4)).all()
        assert all(len(row.unique()) <= 16 for row in block)
    torch.testing.assert_close(rounding.rounded(found), found, rtol=1e-5, atol=1e-6 * float(weight.abs().max()))

    held = quantise.quantise_with_offsets(found.numpy())
    count = quantise.blocks_of(columns)
    wide = quantise.dequantise(held, quantise.widened(columns), 4)
    exported = wide[:, : count * 32].reshape(rows, count, 32) + wide[:, count * 32 : count * 32 + count, None]
    moved = np.linalg.norm(exported.reshape(rows, -1)[:, :columns] - found.numpy()) / np.linalg.norm(found.numpy())
    assert moved < 0.012  # what the 4 bits of the offsets' remainders change; rounding anew changes six times as much


def test_a_gradient_passes_as_if_nothing_was_rounded():
    weight = torch.randn(4, 64, requires_grad=True)
    factor = torch.randn(4, 64)
    (rounding.rounded(weight) * factor).sum().backward()
    assert torch.equal(weight.grad, factor)


def test_a_block_of_equal_numbers_stays():
    weight = torch.full((2, 32), 0.25)
    assert torch.equal(rounding.rounded(weight), weight)
    assert torch.equal(rounding.rounded(0 * weight), 0 * weight)


def test_only_matrices_of_linear_layers_are_rounded():
    model = torch.nn.ModuleDict({"q": torch.nn.Linear(4, 4), "norm": torch.nn.LayerNorm(4), "table": torch.nn.Embedding(4, 4)})
    assert rounding.matrices(model, [name for name, _ in model.named_parameters()]) == ["q.weight"]
