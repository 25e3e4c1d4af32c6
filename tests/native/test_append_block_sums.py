"""The op that appends the sums of 32-column blocks."""

import numpy as np
import pytest
from one_node import open_session
from onnx import TensorProto, helper


@pytest.fixture(scope="module")
def session():
    node = helper.make_node("AppendBlockSums", ["x"], ["y"], domain="edgekv")
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, None)] for name in "xy"]
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)]
    return open_session(helper.make_model(helper.make_graph([node], "one", *ends), opset_imports=versions, ir_version=10))


@pytest.mark.parametrize("shape", [(1,), (32,), (3, 33), (1, 50, 576), (2, 17, 1100)])
def test_sums_follow_the_padded_columns(session, shape):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    columns = shape[-1]
    padded, blocks = -(-columns // 32) * 32, -(-columns // 32)
    (y,) = session.run(None, {"x": x})
    assert y.shape == (*shape[:-1], padded + -(-blocks // 32) * 32)
    np.testing.assert_array_equal(y[..., :columns], x)
    assert not y[..., columns:padded].any() and not y[..., padded + blocks :].any()
    full = np.pad(x.astype(np.float64), [(0, 0)] * (x.ndim - 1) + [(0, padded - columns)])
    np.testing.assert_allclose(y[..., padded : padded + blocks], full.reshape(*shape[:-1], blocks, 32).sum(-1), atol=1e-5)


def test_a_row_has_the_same_bits_alone(session):
    x = np.random.default_rng(1).standard_normal((40, 96)).astype(np.float32)
    (all_rows,) = session.run(None, {"x": x})
    for row in (0, 15, 16, 39):
        np.testing.assert_array_equal(session.run(None, {"x": x[row : row + 1]})[0][0], all_rows[row])


@pytest.mark.parametrize("shape", [(), (0, 32), (3, 0)])
def test_nothing_to_sum_is_refused(session, shape):
    with pytest.raises(Exception, match="AppendBlockSums: x must have at least one row and one column"):
        session.run(None, {"x": np.zeros(shape, np.float32)})
