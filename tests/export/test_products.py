"""What quantised bundles gain when they are loaded for the CPU: rows alike in every block, logits that can be chosen."""

import numpy as np
import pytest
import tiny_models

from edgekv import engine
from edgekv.export import exporter
from edgekv.generation.session import Session
from edgekv.policy import CachePolicy


@pytest.fixture(scope="module", params=["int4", "int8"])
def loaded(request, tmp_path_factory):
    model = tiny_models.make(tmp_path_factory.mktemp("models") / "untied", "llama")  # so that the output layer is a product too
    options = exporter.Options(CachePolicy(element="fp32", boundary=32), None, weights=request.param, check_parity=False)
    made = exporter.export(str(model), tmp_path_factory.mktemp("bundles") / request.param, options)
    return engine.load(made, max_rows=8)


def test_a_row_has_the_bits_of_a_single_step_whatever_comes_with_it(loaded):
    session, tokens = Session(loaded), np.arange(7, 15)
    session.feed([5, 6, 7, 8, 9])
    together = loaded.step(tokens, session.position, np.arange(8)).copy()
    for row in range(8):
        alone = loaded.step(tokens[row : row + 1], session.position + row, np.zeros(1, np.int64))[0]
        np.testing.assert_array_equal(alone, together[row])
    np.testing.assert_array_equal(loaded.step(tokens[:3], session.position, np.arange(3)), together[:3])


def test_logits_can_be_chosen_for_drafting(loaded):
    session, row = Session(loaded), np.zeros(1, np.int64)
    session.feed([5, 6, 7, 8, 9])
    whole = loaded.step(np.array([11]), session.position, row)[0].copy()
    wanted = np.array([3, 17, 200])
    left_out = loaded.look(64, wanted)
    part = loaded.step(np.array([11]), session.position, row)[0].copy()
    finite = np.isfinite(part)
    np.testing.assert_array_equal(part[finite], whole[finite])
    assert finite[wanted].all() and (part[~finite] == -np.inf).all() and 3 <= finite.sum() <= 3 * 8
    assert 0 < left_out < loaded.bundle.weight_bytes
    more = np.array([3, 17, 200, 100])
    assert loaded.look(64, more) < left_out
    assert np.isfinite(loaded.step(np.array([11]), session.position, row)[0][100])
    assert loaded.look(None) == 0
    np.testing.assert_array_equal(loaded.step(np.array([11]), session.position, row)[0], whole)
