"""The attention node takes rows as linear layers make them, so the Transposes and Reshapes around it go.

Inputs [1, heads, T, dim] = Transpose(Reshape([1, T, heads * dim])) are read as [1, T, heads * dim]; a constant factor on the
queries moves into the node's scale; Reshapes that change nothing, and pairs of which the second undoes the first, are dropped.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from edgekv.export.passes import match


def apply(model: ir.Model) -> int:
    changes = _reshapes(model)
    for node in match.attentions(model):
        for index in range(3):
            changes += _flatten(model, node, index)
        changes += _scale(node)
    return changes + _reshapes(model)


def _flatten(model: ir.Model, node: ir.Node, index: int) -> int:
    turned = match.producer(node.inputs[index], "Transpose")
    if turned is None or list(turned.attributes["perm"].value) != [0, 2, 1, 3]:
        return 0
    split = turned.inputs[0]  # [1, T, heads, dim]
    shaped = match.producer(split, "Reshape")
    heads, dim = match.width(split, 2), match.width(split, 3)
    if heads is None or dim is None or split.shape[0] != 1:
        return 0
    if shaped is not None and shaped.inputs[0].shape is not None and len(shaped.inputs[0].shape) == 3:
        source = shaped.inputs[0]
        if source.shape[0] == 1 and match.width(source) == heads * dim and str(source.shape[1]) == str(split.shape[1]):
            node.replace_input_with(index, source)
            return 1
    shape = match.initialiser(model, f"rows.{heads * dim}", np.array([0, 0, heads * dim], np.int64))
    flat = match.node("Reshape", [split, shape])
    flat.outputs[0].shape = ir.Shape([1, split.shape[1], heads * dim])
    flat.outputs[0].type = split.type
    match.before(node, flat)
    node.replace_input_with(index, flat.outputs[0])
    return 1


def _scale(node: ir.Node) -> int:
    """q * c with the node's scale s becomes q with the scale c * s (OPT scales its queries itself)."""
    product = match.producer(node.inputs[0], "Mul")
    if product is None:
        return 0
    for q, factor in match.operands(product):
        number = match.scalar(factor)
        if number is not None and match.same_shape(q, product.outputs[0]):
            before = node.attributes["query_factor"].value if "query_factor" in node.attributes else 1.0
            node.attributes["query_factor"] = ir.AttrFloat32("query_factor", before * number)
            node.replace_input_with(0, q)
            return 1
    return 0


def _reshapes(model: ir.Model) -> int:
    changes = 0
    for node in list(model.graph):
        if node.op_type != "Reshape" or node.domain:
            continue
        result, source = node.outputs[0], node.inputs[0]
        while (earlier := match.producer(source, "Reshape")) is not None:
            source = earlier.inputs[0]
        if match.same_shape(source, result) and not result.is_graph_output():
            match.replace(result, source)
            changes += 1
    return changes
