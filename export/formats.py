"""Puts a weight format into a graph whose linear layers are MatMul with a constant [K, N] (passes/linear.py).

fp32  as traced
fp16  stored in half precision; ONNX Runtime widens matrices when it loads them, since the CPU computes in single precision
int8  MatMulNBits and GatherBlockQuantized in blocks of 32, activations quantised to 8 bits on the fly
int4  MatMulNBits with 4 bits and an offset per block, fed by AppendBlockSums; embedding and LM head as in int8, since they lose most
      from 4 bits (SmolLM2-135M: perplexity +7 % from them alone) and are a small part of larger models; so are products that
      were named as `exact`
A tied embedding is stored once in every format.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import onnx_ir as ir

from edgekv.errors import UserError
from edgekv.export import weights
from edgekv.export.passes import match, siblings
from edgekv.export.quantise import BLOCK, blocks_of, quantise, quantise_with_offsets, widened

BITS = {"int8": 8, "int4": 4}
FORMATS = ("fp32", "fp16", *BITS)
LEAST_OUTPUTS = 16  # narrower linear layers (routers, gates, scores) keep single precision: no bytes to save, much to lose
HEAD_BITS = 8  # of embedding and LM head in both integer formats
INT8_ACTIVATIONS = 4  # MatMulNBits accuracy_level


def apply(model: ir.Model, name: str, exact: Collection[ir.Node] = ()) -> None:
    """exact: MatMul nodes of the graph whose matrices keep 8 bits where others get 4."""
    if name not in FORMATS:
        raise UserError(f"weights must be one of {', '.join(FORMATS)}, not {name!r}.")
    if name in BITS:
        _quantise(model, BITS[name], {id(node) for node in exact})
    elif name == "fp16":
        _halve(model)
    _turn(model)


def _turn(model: ir.Model) -> None:
    """MatMul(x, Transpose(W)) that is left because W is also an embedding -> FusedMatMul, which reads W as it is."""
    for node in list(model.graph):
        turned = match.producer(node.inputs[1], "Transpose") if node.op_type == "MatMul" and len(node.inputs) == 2 else None
        if turned is not None and list(turned.attributes["perm"].value) == [1, 0]:
            new = match.node("FusedMatMul", [node.inputs[0], turned.inputs[0]], domain=match.MICROSOFT, like=node.outputs[0], transB=1)
            match.before(node, new)
            match.replace(node.outputs[0], new.outputs[0])


def _halve(model: ir.Model) -> None:
    for value in list(model.graph.initializers.values()):
        data = value.const_value
        if data.dtype != ir.DataType.FLOAT or len(data.shape) != 2:
            continue
        users = [use.node for use in value.uses()]
        half = match.initialiser(model, f"{value.name}.fp16", weights.halved(data, f"{value.name}.fp16"))
        for node in users:
            if node.op_type == "Gather":  # only the rows that are looked up are widened
                narrow = match.node("Gather", [half, node.inputs[1]], axis=0)
                wide = match.node("Cast", [narrow.outputs[0]], like=node.outputs[0], to=int(ir.DataType.FLOAT))
                match.before(node, narrow, wide)
                match.replace(node.outputs[0], wide.outputs[0])
            else:
                wide = match.node("Cast", [half], like=value, to=int(ir.DataType.FLOAT))
                match.before(node, wide)
                for index, used in enumerate(node.inputs):
                    if used is value:
                        node.replace_input_with(index, wide.outputs[0])


class _Quantised:
    """One matrix [N, K] in blocks: codes, scales and zero points as graph constants. With 4 bits it has offset columns too."""

    def __init__(self, model: ir.Model, data: ir.TensorProtocol, name: str, bits: int):
        rows, columns = data.shape
        self.rows, self.bits = rows, bits
        self.columns = widened(columns) if bits == 4 else columns
        count = blocks_of(self.columns)

        def compute():
            weight = np.ascontiguousarray(data.numpy())
            blocks = quantise_with_offsets(weight) if bits == 4 else quantise(weight, bits)
            return blocks.codes, blocks.scales, blocks.zero_points

        parts = weights.Parts(compute)
        byte = ir.DataType.UINT8
        self._tensor = weights.Lazy(lambda: parts.read(0), (rows, count, BLOCK * bits // 8), f"{name}.codes", byte)
        scales = weights.Lazy(lambda: parts.read(1), (rows, count), f"{name}.scales")
        zeros = weights.Lazy(lambda: parts.read(2), (rows, -(-count * bits // 8)), f"{name}.zeros", byte)
        self.codes, self.scales, self.zeros = (
            match.initialiser(model, t.name, t) for t in (self._tensor, scales, zeros)
        )  # fmt: skip
        self._name = name

    def flat_codes(self, model: ir.Model) -> ir.Value:
        """The codes as [N, K * bits / 8], the same bytes on disk."""
        shape = (self.rows, self.columns * self.bits // 8)
        return match.initialiser(model, f"{self._name}.codes.flat", weights.reshaped(self._tensor, shape, f"{self._name}.codes.flat"))


def _quantise(model: ir.Model, bits: int, exact: set[int]) -> None:
    made: dict[str, _Quantised] = {}  # by name of the untransposed weight, so that a tied embedding is quantised once
    summed: dict[int, ir.Value] = {}  # values with their block sums appended, by the value they came from

    def blocks(name: str, data: ir.TensorProtocol, width: int) -> _Quantised:
        if name not in made:
            made[name] = _Quantised(model, data, name, width)
        return made[name]

    products = [node for node in model.graph if node.op_type == "MatMul" and node.domain == ""]
    for node in list(model.graph):
        if node.op_type == "Gather" and match.tensor(node.inputs[0]) is not None:
            _lookup(model, node, blocks)
    for node in products:
        _product(model, node, blocks, HEAD_BITS if node is products[-1] or id(node) in exact else bits, summed)


def _lookup(model: ir.Model, node: ir.Node, blocks) -> None:
    table = node.inputs[0]
    data = match.tensor(table)
    axis = node.attributes["axis"].value if "axis" in node.attributes else 0
    if len(data.shape) != 2 or data.dtype != ir.DataType.FLOAT or axis != 0 or data.shape[1] % BLOCK or data.size < match.SMALL:
        return
    held = blocks(table.name, data, HEAD_BITS)
    new = match.node(
        "GatherBlockQuantized", [held.flat_codes(model), node.inputs[1], held.scales, held.zeros], domain=match.MICROSOFT,
        like=node.outputs[0], bits=HEAD_BITS, block_size=BLOCK, gather_axis=0, quantize_axis=1,
    )  # fmt: skip
    match.before(node, new)
    match.replace(node.outputs[0], new.outputs[0])


def _product(model: ir.Model, node: ir.Node, blocks, bits: int, summed: dict[int, ir.Value]) -> None:
    turned = match.producer(node.inputs[1], "Transpose")
    bias, result = None, node.outputs[0]
    if turned is not None and match.tensor(turned.inputs[0]) is not None:
        weight = turned.inputs[0]
        data, name, bits = match.tensor(weight), weight.name, HEAD_BITS
        columns, outputs = data.shape[1], data.shape[0]
    else:
        found = siblings.linear(node)
        if found is None:
            return
        result, data = found.result, weights.transposed(found.weight, node.inputs[1].name)
        name = node.inputs[1].name.removesuffix(".t")
        (outputs, columns), bias = data.shape, found.bias
    if outputs < LEAST_OUTPUTS or columns < BLOCK:
        return
    held = blocks(name, data, bits)
    x = _with_sums(node.inputs[0], summed) if bits == 4 else node.inputs[0]
    inputs = [x, held.codes, held.scales, held.zeros]
    if bias is not None:
        inputs += [None, match.initialiser(model, bias.name, bias)]
    new = match.node(
        "MatMulNBits", inputs, domain=match.MICROSOFT, like=result,
        K=held.columns, N=outputs, bits=bits, block_size=BLOCK, accuracy_level=INT8_ACTIVATIONS,
    )  # fmt: skip
    match.before(result.producer(), new)
    match.replace(result, new.outputs[0])


def _with_sums(x: ir.Value, summed: dict[int, ir.Value]) -> ir.Value:
    if id(x) not in summed:
        node = match.node("AppendBlockSums", [x], domain=match.EDGEKV)
        shape = x.shape
        node.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
        node.outputs[0].shape = ir.Shape([*shape[:-1], widened(shape[-1])]) if shape is not None and isinstance(shape[-1], int) else None
        match.after(x.producer(), node)
        summed[id(x)] = node.outputs[0]
    return summed[id(x)]
