"""Thin keys in the graph: maps as inputs of the attention node, which applies them after its rotation (projected) or before it (latent),
multiplied into the weights (absorbed), or rotary pairs that leave weights and rotation (pairs).

`absorb` and `leave_out` need queries and keys that come straight from a linear layer. Between that and the scores a rotary model turns
both by their positions, so a map in the weights would be applied to something else than what is scored: scores then have nothing to do with
the full ones any more, and `absorb` refuses. A pair of numbers that is turned by itself can be left out before as well as after.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from edgekv.errors import UserError
from edgekv.export.graph import KEY_DECODE, KEY_ENCODE, KEY_MAP, QUERY_MAP
from edgekv.export.passes import match, siblings
from edgekv.export.weights import Lazy

WHY_NOT = (
    "Keys of this model cannot be absorbed into its weights: layer {layer} rotates queries and keys by position (or changes them otherwise) "
    "behind their weights, and a product with a smaller matrix does not commute with a rotation. Use --key-form latent or projected."
)


def straight(node: ir.Node, rotates: bool = False) -> siblings.Linear | None:
    """The linear layer whose result the node takes as queries, keys and values; None when there is something between. rotates: whether
    the node turns them itself."""
    if node.inputs[1] is not None or node.inputs[2] is not None or any((value is not None) != rotates for value in (*node.inputs, None, None)[5:7]):
        return None
    maker = node.inputs[0].producer()
    if maker is None:
        return None
    product = maker if maker.op_type == "MatMul" else next((v.producer() for v in maker.inputs if v is not None and match.producer(v, "MatMul")), None)
    found = siblings.linear(product) if product is not None else None
    return found if found is not None and found.result is node.inputs[0] else None


def products(node: ir.Node) -> list[ir.Node]:
    """The MatMul nodes that the attention node's queries and keys come from; packed, they make its values too."""
    found, left = [], [value for value in node.inputs[:2] if value is not None]
    while left:
        maker = left.pop().producer()
        if maker is None:
            continue
        if maker.op_type == "MatMul":
            found.append(maker)
        else:
            left += [value for value in maker.inputs if value is not None]
    return found


def project(model: ir.Model, node: ir.Node, query: np.ndarray, key: np.ndarray) -> None:
    """query float32 [q_heads, head_dim, rank] and key [kv_heads, head_dim, rank] become inputs of the node."""
    layer = node.attributes["layer"].value
    node.resize_inputs(KEY_MAP + 1)
    for index, name, numbers in ((QUERY_MAP, "query_map", query), (KEY_MAP, "key_map", key)):
        node.replace_input_with(index, match.initialiser(model, f"layers.{layer}.{name}", np.ascontiguousarray(numbers, np.float32)))


def make_latent(model: ir.Model, node: ir.Node, encode: np.ndarray, decode: np.ndarray) -> None:
    """encode float32 [kv_heads * key_dim, latent] and decode [kv_heads, latent + 1, key_dim] become inputs of the node."""
    layer = node.attributes["layer"].value
    node.resize_inputs(KEY_DECODE + 1)
    for index, name, numbers in ((KEY_ENCODE, "key_encode", encode), (KEY_DECODE, "key_decode", decode)):
        node.replace_input_with(index, match.initialiser(model, f"layers.{layer}.{name}", np.ascontiguousarray(numbers, np.float32)))


def absorb(model: ir.Model, node: ir.Node, query: np.ndarray, key: np.ndarray, value_dim: int) -> int:
    """The same maps in the weights (and biases) of the linear layer that makes queries, keys and values, which the node takes packed. Returns
    how many parameters it lost."""
    layer, found = node.attributes["layer"].value, straight(node)
    if found is None:
        raise UserError(WHY_NOT.format(layer=layer))
    (q_heads, head, rank), kv_heads = query.shape, key.shape[0]

    def thin(rows: np.ndarray) -> np.ndarray:
        """[..., (q_heads + kv_heads) head + kv_heads value_dim] with mapped queries and keys."""
        q, k, v = np.split(rows, np.cumsum([q_heads * head, kv_heads * head]), axis=-1)
        lead = rows.shape[:-1]
        parts = [
            np.einsum("nhd,hdr->nhr", part.reshape(-1, heads, head).astype(np.float64), maps.astype(np.float64)).reshape(*lead, heads * rank)
            for part, heads, maps in ((q, q_heads, query), (k, kv_heads, key))
        ]
        return np.concatenate([*parts, v], axis=-1).astype(np.float32)

    return _replace(model, node, found, thin, (q_heads + kv_heads) * rank + kv_heads * value_dim)


def leave_out(model: ir.Model, node: ir.Node, numbers: np.ndarray, head: int, value_dim: int) -> int:
    """numbers int64 [kv_heads, rank]: what queries and keys of a kv head keep of the `head` numbers that the linear layer makes for each.
    The node's rotation is then one of these numbers, see turn_by_head. Returns how many parameters the layer lost."""
    found, kv_heads = straight(node, rotates=True), len(numbers)
    width = found.weight.shape[1]
    values = width - kv_heads * value_dim
    q_heads = values // head - kv_heads
    kept = np.concatenate([np.repeat(numbers, q_heads // kv_heads, 0), numbers])
    columns = np.concatenate([(kept + head * np.arange(len(kept))[:, None]).ravel(), np.arange(values, width)])
    return _replace(model, node, found, lambda rows: np.ascontiguousarray(rows[..., columns]), len(columns))


def turn_by_head(model: ir.Model, layers: Sequence[tuple[ir.Node, np.ndarray]]) -> None:
    """Attention nodes, each with pairs int64 [kv_heads, n]: the columns of the rotary tables that turn a head's numbers. From now on the
    tables of a node hold those, one head behind the other (fused_rotary 2). One gather and one split serve all layers: nodes of
    their own would cost a step more time than the smaller matrices save."""
    for index in (5, 6):
        tables: dict[str, list[tuple[ir.Node, np.ndarray]]] = {}
        for node, pairs in layers:
            tables.setdefault(node.inputs[index].name, []).append((node, pairs.ravel()))
        for users in tables.values():
            table = users[0][0].inputs[index]
            columns, sizes = np.concatenate([c for _, c in users]), np.array([len(c) for _, c in users])
            gather = match.node("Gather", [table, match.initialiser(model, "rotary.pairs", columns)], axis=-1)
            split = match.node("Split", [gather.outputs[0], match.initialiser(model, "rotary.sizes", sizes)], outputs=len(users), axis=-1)
            lead = table.shape[:-1] if table.shape is not None else [1, None]
            for value, size in ((gather.outputs[0], len(columns)), *zip(split.outputs, sizes, strict=True)):
                value.shape, value.type = ir.Shape([*lead, int(size)]), table.type
            match.after(table.producer(), gather, split)
            for (node, _), part in zip(users, split.outputs, strict=True):
                node.replace_input_with(index, part)


def _replace(model: ir.Model, node: ir.Node, found: siblings.Linear, thin: Callable[[np.ndarray], np.ndarray], width: int) -> int:
    """The node's linear layer with `width` results instead, of thin(weight) and thin(bias). Returns how many parameters it has less."""
    name = f"layers.{node.attributes['layer'].value}.thin"
    weight = found.weight
    made = match.initialiser(model, f"{name}.weight", Lazy(lambda: thin(weight.numpy()), (weight.shape[0], width), f"{name}.weight"))
    product = match.node("MatMul", [found.product.inputs[0], made])
    new = [product]
    if found.bias is not None:
        bias = found.bias
        added = match.initialiser(model, f"{name}.bias", Lazy(lambda: thin(bias.numpy()), (width,), f"{name}.bias"))
        new.append(match.node("Add", [product.outputs[0], added]))
    shape = found.product.inputs[0].shape
    for one in new:
        one.outputs[0].shape = ir.Shape([*shape[:-1], width]) if shape is not None else None
        one.outputs[0].type = found.result.type
    match.before(found.product, *new)
    node.replace_input_with(0, new[-1].outputs[0])
    return (weight.shape[1] - width) * (weight.shape[0] + (found.bias is not None))
