"""MatMul(x, Transpose(weight)) -> MatMul(x, weight stored transposed); 2-D Gemm between Reshapes -> MatMul and Add.

Afterwards every linear layer is one MatMul with a constant [K, N], and an Add when it has a bias. A weight that is also looked up
(tied embedding) stays as it is: its Transpose is left for the choice of the weight format.
"""

from __future__ import annotations

import onnx_ir as ir

from edgekv.export.passes import match
from edgekv.export.weights import transposed


def apply(model: ir.Model) -> int:
    changes = 0
    for node in list(model.graph):
        if node.op_type == "MatMul" and node.domain == "":
            changes += _transpose(model, node)
        elif node.op_type == "Gemm" and node.domain == "":
            changes += _gemm(model, node)
    return changes


def _transpose(model: ir.Model, node: ir.Node) -> int:
    turned = match.producer(node.inputs[1], "Transpose")
    if turned is None:
        return 0
    weight = turned.inputs[0]
    data = match.tensor(weight)
    if data is None or len(data.shape) != 2 or any(u.node.op_type == "Gather" for u in weight.uses()):
        return 0
    node.replace_input_with(1, match.initialiser(model, f"{weight.name}.t", transposed(data, f"{weight.name}.t")))
    return 1


def _gemm(model: ir.Model, node: ir.Node) -> int:
    """Reshape [1, T, K] -> [T, K], Gemm(x, weight, bias), Reshape -> [1, T, N], as GPT-2's Conv1D is traced."""
    attributes = {name: node.attributes[name].value for name in node.attributes}
    if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return 0
    x, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    flat, data = match.producer(x, "Reshape"), match.tensor(weight)
    back = match.only_use(node.outputs[0])
    if data is None or len(data.shape) != 2 or flat is None or back is None or back.op_type != "Reshape":
        return 0
    source, result = flat.inputs[0], back.outputs[0]
    if result.shape is None or source.shape is None or len(source.shape) != 3 or len(result.shape) != 3:
        return 0
    if source.shape[0] != 1 or result.shape[0] != 1 or str(source.shape[1]) != str(result.shape[1]):
        return 0
    if attributes.get("transB", 0):
        weight = match.initialiser(model, f"{weight.name}.t", transposed(data, f"{weight.name}.t"))
    product = match.node("MatMul", [source, weight], like=result)
    new = [product]
    if bias is not None:
        new.append(match.node("Add", [product.outputs[0], bias], like=result))
    match.before(back, *new)
    match.replace(result, new[-1].outputs[0])
    return 1
