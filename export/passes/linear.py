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
    """Gemm(x, weight, bias) -> MatMul and Add, without the Reshapes [1, T, K] -> [T, K] and back that GPT-2's Conv1D puts around it."""
    attributes = {name: node.attributes[name].value for name in node.attributes}
    if attributes.get("transA", 0) or attributes.get("alpha", 1.0) != 1.0 or attributes.get("beta", 1.0) != 1.0:
        return 0
    x, weight = node.inputs[0], node.inputs[1]
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    data = match.tensor(weight)
    if data is None or len(data.shape) != 2:
        return 0
    if attributes.get("transB", 0):
        weight = match.initialiser(model, f"{weight.name}.t", transposed(data, f"{weight.name}.t"))
    result = node.outputs[0]
    flat, back = match.producer(x, "Reshape"), match.only_use(result)
    if flat is not None and back is not None and back.op_type == "Reshape" and _same_rows(flat.inputs[0], back.outputs[0]):
        x, result = flat.inputs[0], back.outputs[0]
    new = [match.node("MatMul", [x, weight], like=result)]
    if bias is not None:
        new.append(match.node("Add", [new[0].outputs[0], bias], like=result))
    match.before(result.producer(), *new)
    match.replace(result, new[-1].outputs[0])
    return 1


def _same_rows(a: ir.Value, b: ir.Value) -> bool:
    """Whether both are [1, T, any width] with the same T."""
    if a.shape is None or b.shape is None or len(a.shape) != 3 or len(b.shape) != 3:
        return False
    return a.shape[0] == 1 == b.shape[0] and str(a.shape[1]) == str(b.shape[1])
