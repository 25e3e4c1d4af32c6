"""Puts edgekv's own quantised products into a graph that is loaded for the CPU.

Bundles say `MatMulNBits` (com.microsoft), which every provider of ONNX Runtime and the TensorRT exporter know, behind `AppendBlockSums` where
4-bit weights keep an offset per block. On the CPU `QuantisedMatMul` (plugins/ort/quantised_matmul.cpp) takes the place of both: a block of a
few rows, as verification of a draft runs it, costs little more there than one row, and a row gives the same bits in every block. It also
takes in what lies next to a product in a decoder layer, because a node of a few microseconds' work costs as much again to start: the
normalisation or the gate in front of it and the addition behind it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import onnx

BLOCK = 32
TILE = 8  # outputs that are computed together
TILES = "logits.tiles"  # the input that says which logits are wanted, int32 [n]; empty: all
_RESIDUAL, _NORM = 5, 6  # inputs of QuantisedMatMul


def _attribute(node: onnx.NodeProto, name: str, default: float = 0) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.f if attribute.type == onnx.AttributeProto.FLOAT else attribute.i
    return default


class _Graph:
    """The main graph's nodes, by the values they make and use."""

    def __init__(self, graph: onnx.GraphProto):
        self.graph = graph
        self.constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self.nodes = list(graph.node)
        self.maker = {name: node for node in self.nodes for name in node.output if name}
        self.adds = {name: node for node in self.nodes if (node.domain, node.op_type) == ("", "Add") for name in node.input}
        self.uses = Counter(name for node in self.nodes for name in node.input)
        self.uses.update(output.name for output in graph.output)
        self.widths: dict[str, int] = {}  # last dimensions that are known
        self.instead: dict[int, onnx.NodeProto | None] = {}  # by id() of a node: what takes its place, None: nothing

    def only(self, name: str, op: str, domain: str = "") -> onnx.NodeProto | None:
        """The node that makes a value which nothing else uses, if it is such an operator."""
        node = self.maker.get(name)
        return node if node is not None and self.uses[name] == 1 and (node.domain, node.op_type) == (domain, op) else None


def _product(node: onnx.NodeProto, graph: _Graph) -> onnx.NodeProto | None:
    """What takes the place of a MatMulNBits; None when QuantisedMatMul does not compute it."""
    x, codes, scales, zeros, groups, bias = [*node.input, *[""] * 6][:6]
    bits = _attribute(node, "bits", 4)
    if _attribute(node, "block_size") != BLOCK or bits not in (4, 8) or groups or not {codes, scales, zeros} <= graph.constants.keys():
        return None
    sums = graph.maker.get(x)
    appended = sums is not None and (sums.domain, sums.op_type) == ("edgekv", "AppendBlockSums")
    inputs = [sums.input[0] if appended else x, codes, scales, zeros, bias, "", ""]
    return onnx.helper.make_node(
        "QuantisedMatMul", inputs, list(node.output), name=node.name, domain="edgekv", bits=int(bits), sums=int(appended), gated=0, epsilon=0.0
    )


def _set(node: onnx.NodeProto, name: str, value: float) -> None:
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, onnx.helper.make_attribute(name, value)])


def _take_norm(product: onnx.NodeProto, graph: _Graph) -> None:
    norm = graph.only(product.input[0], "RMSNormalization")
    if norm is None or _attribute(norm, "axis", -1) != -1 or len(graph.constants.get(norm.input[1], ())) != 1:
        return
    product.input[0], product.input[_NORM] = norm.input
    _set(product, "epsilon", float(_attribute(norm, "epsilon", 1e-5)))
    graph.instead[id(norm)] = None


def _take_gate(product: onnx.NodeProto, graph: _Graph) -> None:
    """silu(first half) * second half, as the exporter leaves it behind a joined projection: Split, Sigmoid, Mul, Mul."""
    multiplied = graph.only(product.input[0], "Mul")
    if multiplied is None:
        return
    silu = graph.only(multiplied.input[0], "Mul")
    sigmoid = silu and graph.only(silu.input[1], "Sigmoid")
    if sigmoid is None or sigmoid.input[0] != silu.input[0]:
        return
    first, second = silu.input[0], multiplied.input[1]
    split = graph.maker.get(first)
    if split is None or split.op_type != "Split" or list(split.output) != [first, second] or _attribute(split, "axis") != -1:
        return
    if graph.uses[first] != 2 or graph.uses[second] != 1 or not _halves(split, graph):
        return
    product.input[0] = split.input[0]
    _set(product, "gated", 1)
    graph.instead.update((id(node), None) for node in (multiplied, silu, sigmoid, split))


def _halves(split: onnx.NodeProto, graph: _Graph) -> bool:
    if len(split.input) < 2 or not split.input[1]:
        return True
    sizes = next((tensor for tensor in graph.graph.initializer if tensor.name == split.input[1]), None)
    if sizes is None or sizes.data_location == onnx.TensorProto.EXTERNAL:
        return False
    first, second = onnx.numpy_helper.to_array(sizes)
    return first == second


def _take_residual(product: onnx.NodeProto, graph: _Graph) -> onnx.NodeProto | None:
    """Takes in an addition behind it, of something that is as wide, and returns it: the product has to wait for both its inputs."""
    name = product.output[0]
    add = graph.adds.get(name)
    if add is None or graph.uses[name] != 1:
        return None
    other = add.input[1] if add.input[0] == name else add.input[0]
    if graph.widths.get(other) != graph.constants[product.input[1]][0]:
        return None
    product.input[_RESIDUAL] = other
    product.output[0] = add.output[0]
    return add


def _know_width(node: onnx.NodeProto, graph: _Graph) -> None:
    """Remembers how many numbers a row of a node's first output has, for the few operators that a residual stream is made of."""
    if node.op_type == "QuantisedMatMul":
        graph.widths[node.output[0]] = graph.constants[node.input[1]][0]
    elif node.op_type in ("Gather", "GatherBlockQuantized") and len(table := graph.constants.get(node.input[0], ())) == 2:
        packed = node.op_type == "GatherBlockQuantized" and _attribute(node, "bits", 4) == 4
        graph.widths[node.output[0]] = table[1] * (2 if packed else 1)
    elif node.op_type == "Add" and node.input[0] in graph.widths and graph.widths[node.input[0]] == graph.widths.get(node.input[1]):
        graph.widths[node.output[0]] = graph.widths[node.input[0]]


def put_in(model: onnx.ModelProto) -> None:
    """Replaces every MatMulNBits of the main graph that has 4 or 8 bits, blocks of 32, zero points and constant weights, in place."""
    graph = _Graph(model.graph)
    for node in graph.nodes:
        product = _product(node, graph) if (node.domain, node.op_type) == ("com.microsoft", "MatMulNBits") else None
        if product is not None:
            if _attribute(product, "sums"):
                graph.uses[node.input[0]] -= 1
                if graph.uses[node.input[0]]:
                    graph.uses[product.input[0]] += 1
                else:
                    graph.instead[id(graph.maker[node.input[0]])] = None
            _take_norm(product, graph)
            _take_gate(product, graph)
            graph.instead[id(node)] = None
            graph.instead[id(_take_residual(product, graph) or node)] = product
        _know_width(product or node, graph)
    kept = onnx.GraphProto()  # copies, because clearing the list of nodes frees them
    kept.node.extend(new for node in graph.nodes if (new := graph.instead.get(id(node), node)) is not None)
    del model.graph.node[:]
    model.graph.node.extend(kept.node)


def choose_logits(model: onnx.ModelProto) -> int:
    """Gives the graph an input `logits.tiles` where the product that makes its output `logits` is ours, and returns the bytes of its
    weights; else changes nothing and returns 0.
    """
    product = next((node for node in model.graph.node if node.op_type == "QuantisedMatMul" and node.output[0] == "logits"), None)
    if product is None:
        return 0
    product.input.append(TILES)
    model.graph.input.append(onnx.helper.make_tensor_value_info(TILES, onnx.TensorProto.INT32, [None]))
    outputs, blocks, packed = next(tuple(tensor.dims) for tensor in model.graph.initializer if tensor.name == product.input[1])
    return outputs * blocks * (packed + 5)  # codes, and a scale and a zero point per block


def _read_from_file(model: onnx.ModelProto) -> list[tuple[int, int]]:
    """(offset, bytes) in its file of every initialiser that something else than a product reads."""
    used = {name for node in model.graph.node if node.op_type != "QuantisedMatMul" for name in node.input}
    found = []
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        if tensor.name in used and "location" in place:
            found.append((int(place.get("offset", 0)), int(place.get("length", 0))))
    return found


@dataclass(frozen=True)
class CpuGraph:
    data: bytes  # the graph; its weights stay in the files that it names
    logit_bytes: int  # see choose_logits()
    ranges: list[tuple[int, int]]  # of these files that are still read once the products' weights have been laid out anew


def for_cpu(data: bytes) -> CpuGraph:
    """A serialised graph with its products replaced. Raises ValueError when the bytes are no ONNX model, or one with damaged nodes."""
    model = onnx.ModelProto()
    try:
        model.ParseFromString(data)
        put_in(model)
        logit_bytes = choose_logits(model)
    except Exception as error:  # protobuf's own class is no part of its interface, and a damaged node may lack anything
        raise ValueError(f"its graph is damaged ({error})") from None
    return CpuGraph(model.SerializeToString(), logit_bytes, _read_from_file(model))
