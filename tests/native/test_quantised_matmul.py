"""Products with 4- and 8-bit weights: against the oracle, alike on every instruction set and for every number of rows."""

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from one_node import open_session

from edgekv import native
from edgekv.engine import products
from edgekv.reference import products as oracle

SHAPES = [(1, 1), (7, 1), (8, 2), (33, 3), (96, 19), (1000, 5), (64, 50)]  # outputs, blocks


def weights(bits: int, outputs: int, blocks: int, seed: int = 0, scales: type = np.float32) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {
        "codes": random.integers(0, 256, (outputs, blocks, 4 * bits), dtype=np.uint8),
        "scales": random.uniform(0.001, 0.1, (outputs, blocks)).astype(scales).astype(np.float32),
        "zeros": random.integers(0, 256, (outputs, -(-blocks * bits // 8)), dtype=np.uint8),
    }


def model(given: dict[str, np.ndarray], bits: int, bias: bool = False, ours: bool = True, sums: int = 0, constant: bool = True):
    """One product; `ours` False: as bundles have it, MatMulNBits behind AppendBlockSums when sums is 1."""
    names = ["x", "codes", "scales", "zeros"] + (["bias"] if bias else [])
    outputs, blocks, _ = given["codes"].shape
    if ours:
        nodes = [helper.make_node("QuantisedMatMul", names, ["y"], domain="edgekv", bits=bits, sums=sums)]
    else:
        first = [helper.make_node("AppendBlockSums", ["x"], ["wide"], domain="edgekv")] * sums
        names = ["wide" if sums else "x", *names[1:4], *(["", "bias"] if bias else [])]
        attributes = {"K": blocks * 32, "N": outputs, "bits": bits, "block_size": 32, "accuracy_level": 4}
        nodes = [*first, helper.make_node("MatMulNBits", names, ["y"], domain="com.microsoft", **attributes)]
    held = [numpy_helper.from_array(array, name) for name, array in given.items() if constant or name == "bias"]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, None)]
    if not constant:
        inputs += [helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(given[n].dtype), given[n].shape) for n in names[1:4]]
    graph = helper.make_graph(nodes, "one", inputs, [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)], held)
    versions = [helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scales", [np.float32, np.float16])  # in two planes of their own kind
@pytest.mark.parametrize("outputs, blocks", SHAPES)
def test_against_the_oracle(instruction_set, bits, outputs, blocks, scales):
    given, random = weights(bits, outputs, blocks, scales=scales), np.random.default_rng(1)
    bias = random.standard_normal(outputs).astype(np.float32)
    session = open_session(model(given | {"bias": bias}, bits, bias=True))
    x = random.standard_normal((1, 9, 32 * blocks)).astype(np.float32) * random.uniform(0.01, 100, (1, 9, 1)).astype(np.float32)
    (y,) = session.run(None, {"x": x})
    assert y.shape == (1, 9, outputs)
    wanted = oracle.multiply(x[0], **given, bits=bits, bias=bias)
    np.testing.assert_allclose(y[0], wanted, rtol=2e-6, atol=2e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("bits", [4, 8])
def test_the_largest_numbers_do_not_overflow(instruction_set, bits):
    given = weights(bits, 16, 3)
    for code, zero in ((0, 255), (255, 0), (255, 255), (0, 0)):
        given["codes"][:], given["zeros"][:] = code, zero
        x = np.tile(np.array([[1.0], [-1.0]], np.float32), 96)
        (y,) = open_session(model(given, bits)).run(None, {"x": x})
        np.testing.assert_allclose(y, oracle.multiply(x, **given, bits=bits), rtol=1e-6)


@pytest.mark.parametrize("scales", [np.float32, np.float16])
def test_every_instruction_set_gives_the_same_bits(scales):
    given, x = weights(4, 100, 19, scales=scales), np.random.default_rng(2).standard_normal((6, 608)).astype(np.float32)
    session, before, found = open_session(model(given, 4)), native.isa(), []
    try:
        for name in native.SCHEMA["isa"]:
            native.set_isa(name)
            found.append(session.run(None, {"x": x})[0])
    finally:
        native.set_isa(before)
    for other in found[1:]:
        np.testing.assert_array_equal(found[0], other)


@pytest.mark.parametrize("scale", [0.0, -0.0, 2.0**-24, 1e-7, 6e-5, 65504.0, 65520.0, np.inf, np.nan])
def test_scales_at_the_edges_of_half_precision(instruction_set, scale):
    """Zeros and subnormal numbers are such numbers, others make their layer keep single precision."""
    given, x = weights(4, 16, 2, scales=np.float16), np.random.default_rng(9).standard_normal((2, 64)).astype(np.float32)
    given["scales"][5, 1] = scale
    (y,) = open_session(model(given, 4)).run(None, {"x": x})
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = oracle.multiply(x, **given, bits=4)
    np.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_has_the_same_bits_whatever_comes_with_it(bits):
    session = open_session(model(weights(bits, 3000, 7), bits))
    x = np.random.default_rng(3).standard_normal((150, 224)).astype(np.float32)
    (together,) = session.run(None, {"x": x})
    for first, last in ((0, 1), (3, 5), (10, 13), (20, 25), (60, 67), (63, 150)):
        np.testing.assert_array_equal(session.run(None, {"x": x[first:last]})[0], together[first:last])


def test_weights_are_multiplied_exactly_by_inputs_that_need_no_rounding():
    given = weights(4, 40, 4)
    x = np.random.default_rng(4).integers(-127, 128, (3, 128)).astype(np.float32)
    x[:, ::32] = 127
    codes, zeros = oracle.unpack(given["codes"], given["zeros"], 4)
    dense = ((codes - zeros[..., None]) * given["scales"][..., None].astype(np.float64)).reshape(40, 128)
    np.testing.assert_allclose(open_session(model(given, 4)).run(None, {"x": x})[0], x @ dense.T, rtol=1e-4, atol=1e-3)


# without sums beside its inputs MatMulNBits takes whole blocks alone
@pytest.mark.parametrize("bits, sums, columns", [(4, 1, 33), (4, 1, 1100), *((bits, sums, n) for bits, sums in ((4, 1), (4, 0), (8, 0)) for n in (64, 576))])
def test_a_bundles_product_is_replaced(bits, sums, columns):
    blocks = -(-columns // 32)
    given = weights(bits, 24, blocks + (-(-blocks // 32) if sums else 0))
    made = model(given, bits, ours=False, sums=sums)
    x = np.random.default_rng(5).standard_normal((2, 3, columns)).astype(np.float32)
    (wanted,) = open_session(made).run(None, {"x": x})
    products.put_in(made)
    assert [node.op_type for node in made.graph.node] == ["QuantisedMatMul"]
    (y,) = open_session(made).run(None, {"x": x})
    np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())


def layer(given: dict[str, np.ndarray], bits: int, *, shared: bool = False):
    """The second half of a decoder layer as exported: norm, joined gate and up projection, gate, down projection, residual."""
    hidden, inner = given["down.codes"].shape[0], given["up.codes"].shape[0] // 2
    sums = bits == 4

    def product(x: str, y: str, name: str, outputs: int, columns: int) -> list:
        first = [helper.make_node("AppendBlockSums", [x], [f"{x}.sums"], domain="edgekv")] if sums else []
        names = [f"{x}.sums" if sums else x, *(f"{name}.{part}" for part in ("codes", "scales", "zeros"))]
        attributes = {"K": columns, "N": outputs, "bits": bits, "block_size": 32, "accuracy_level": 4}
        return [*first, helper.make_node("MatMulNBits", names, [y], domain="com.microsoft", **attributes)]

    nodes = [
        *product("x", "h", "in", hidden, 32 * given["in.codes"].shape[1]),
        helper.make_node("RMSNormalization", ["h", "norm"], ["n"], epsilon=1e-5, axis=-1),
        *product("n", "both", "up", 2 * inner, 32 * given["up.codes"].shape[1]),
        helper.make_node("Split", ["both", "sizes"], ["gate", "up"], axis=-1),
        helper.make_node("Sigmoid", ["gate"], ["s"]),
        helper.make_node("Mul", ["gate", "s"], ["silu"]),
        helper.make_node("Mul", ["silu", "up"], ["m"]),
        *product("m", "d", "down", hidden, 32 * given["down.codes"].shape[1]),
        helper.make_node("Add", ["h", "d"], ["y"]),
    ]
    held = [numpy_helper.from_array(array, name) for name, array in given.items()]
    held.append(numpy_helper.from_array(np.array([inner, inner], np.int64), "sizes"))
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, None)] for name in "xy"]
    if shared:
        ends[1].append(helper.make_tensor_value_info("n", TensorProto.FLOAT, None))
    graph = helper.make_graph(nodes, "layer", *ends, held)
    versions = [helper.make_opsetid("", 23), helper.make_opsetid("edgekv", 1), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=versions, ir_version=10)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("bits, hidden, inner", [(4, 64, 96), (4, 72, 40), (8, 64, 96)])  # 8 bits go without sums
def test_what_lies_next_to_a_product_is_taken_in(instruction_set, bits, shared, hidden, inner):
    given = {"norm": np.random.default_rng(6).uniform(0.5, 2, hidden).astype(np.float32)}
    for name, outputs, columns in (("in", hidden, 64), ("up", 2 * inner, hidden), ("down", hidden, inner)):
        blocks = -(-columns // 32)
        part = weights(bits, outputs, blocks + (bits == 4), seed=len(name))
        part["scales"] *= 0.1
        part["zeros"] = np.full_like(part["zeros"], 0x88 if bits == 4 else 0x80)
        given |= {f"{name}.{key}": array for key, array in part.items()}
    made = layer(given, bits, shared=shared)
    x = np.random.default_rng(7).standard_normal((1, 7, 64)).astype(np.float32)
    wanted = open_session(made).run(None, {"x": x})
    products.put_in(made)
    assert [node.op_type for node in made.graph.node] == ["QuantisedMatMul"] + ["RMSNormalization"] * shared + ["QuantisedMatMul"] * 2
    session = open_session(made)
    for got, want in zip(session.run(None, {"x": x}), wanted, strict=True):
        np.testing.assert_allclose(got, want, atol=0.02 * np.abs(want).max())  # a code of an activation may round the other way
        assert np.abs(got - want).mean() < 1e-3 * np.abs(want).mean()
    np.testing.assert_array_equal(session.run(None, {"x": x[:, 3:4]})[0], session.run(None, {"x": x})[0][:, 3:4])


def test_sums_that_others_use_stay():
    made = model(weights(4, 8, 2), 4, ours=False, sums=1)
    made.graph.output.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, None))
    products.put_in(made)
    assert sorted(node.op_type for node in made.graph.node) == ["AppendBlockSums", "QuantisedMatMul"]


@pytest.mark.parametrize("node", [0, 1])
def test_a_damaged_graph_is_refused(node):
    made = model(weights(4, 8, 2), 4, ours=False, sums=1)
    del made.graph.node[node].input[:]
    if node == 1:  # no weights: left to ONNX Runtime, which refuses it
        assert products.for_cpu(made.SerializeToString()).logit_bytes == 0
        return
    with pytest.raises(ValueError, match="its graph is damaged"):
        products.for_cpu(made.SerializeToString())
    with pytest.raises(ValueError, match="its graph is damaged"):
        products.for_cpu(b"\xff" * 100)


def test_other_products_stay():
    made = model(weights(4, 8, 2), 4, ours=False)
    next(a for a in made.graph.node[0].attribute if a.name == "block_size").i = 64
    products.put_in(made)
    assert made.graph.node[0].op_type == "MatMulNBits"
    made = model(weights(4, 8, 2), 4, ours=False, constant=False)
    products.put_in(made)
    assert made.graph.node[0].op_type == "MatMulNBits"


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_is_not_hidden(instruction_set, bad):
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    (y,) = open_session(model(weights(4, 8, 2), 4)).run(None, {"x": x})
    assert np.isfinite(y[0]).all() and not np.isfinite(y[1]).any()


@pytest.mark.parametrize(
    "change, sentence",
    [
        ({"scales": np.ones(3, np.float32)}, "scales and zeros must have one number for each of the 16 blocks"),
        ({"zeros": np.zeros((8, 2), np.uint8)}, "scales and zeros must have one number for each of the 16 blocks"),
        ({"codes": np.zeros((8, 2, 32), np.uint8)}, r"codes must have the shape \[N, blocks, 16\]"),
        ({"codes": np.zeros((8, 0, 16), np.uint8)}, r"codes must have the shape \[N, blocks, 16\]"),
    ],
)
def test_weights_that_do_not_fit_are_refused(change, sentence):
    with pytest.raises(Exception, match=sentence):
        open_session(model(weights(4, 8, 2) | change, 4))


def test_what_does_not_fit_the_weights_is_refused():
    session = open_session(model(weights(4, 8, 2), 4))
    for shape in ((1, 65), (1, 32), (1, 0)):
        with pytest.raises(Exception, match="QuantisedMatMul: x "):
            session.run(None, {"x": np.zeros(shape, np.float32)})
    with pytest.raises(Exception, match="bias must have 8 numbers"):
        open_session(model(weights(4, 8, 2) | {"bias": np.zeros(7, np.float32)}, 4, bias=True)).run(None, {"x": np.zeros((1, 64), np.float32)})
    with pytest.raises(Exception, match="bits must be 4 or 8"):
        open_session(model(weights(4, 8, 2), 5))
    with pytest.raises(Exception, match="sums and gated must be 0 or 1"):
        open_session(model(weights(4, 8, 2), 4, sums=2))
    with pytest.raises(Exception, match="must be a constant of the graph"):
        open_session(model(weights(4, 8, 2), 4, constant=False))


@pytest.mark.parametrize("tiles", [[0], [12], [0, 1, 5, 12]])
def test_only_wanted_tiles_are_computed(tiles):
    given = weights(4, 100, 3)
    made = model(given, 4)
    made.graph.node[0].input.extend(["", "", "", "tiles"])
    made.graph.input.append(helper.make_tensor_value_info("tiles", TensorProto.INT32, [None]))
    session, x = open_session(made), np.random.default_rng(8).standard_normal((3, 96)).astype(np.float32)
    (whole,) = session.run(None, {"x": x, "tiles": np.zeros(0, np.int32)})
    np.testing.assert_array_equal(whole, open_session(model(given, 4)).run(None, {"x": x})[0])
    (part,) = session.run(None, {"x": x, "tiles": np.array(tiles, np.int32)})
    wanted = np.isin(np.arange(100) // 8, tiles)
    np.testing.assert_array_equal(part[:, wanted], whole[:, wanted])
    assert (part[:, ~wanted] == -np.inf).all()
    for bad in (-1, 13):
        with pytest.raises(Exception, match="tiles must be between 0 and 12"):
            session.run(None, {"x": x, "tiles": np.array([bad], np.int32)})
