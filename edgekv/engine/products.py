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

BLOCK, TILE = 32, 8  # columns with one scale, outputs computed together: kBlock and kTileRows of plugins/cpu/weights.h
TILES = "logits.tiles"  # the input that says which logits are wanted, int32 [n]; empty: all


def _attribute(node: onnx.NodeProto, name: str, default: float = 0) -> float:
    for attribute in node.attribute:
        if attribute.name == name:
            return attribute.f if attribute.type == onnx.AttributeProto.FLOAT else attribute.i
    return default


def _is(node: onnx.NodeProto | None, op: str, domain: str = "") -> bool:
    return node is not None and (node.domain, node.op_type) == (domain, op)


class _Graph:
    """The main graph's nodes, by the values they make and use."""

    def __init__(self, graph: onnx.GraphProto):
        self.graph = graph
        self.constants = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
        self.nodes = list(graph.node)
        self.maker = {name: node for node in self.nodes for name in node.output if name}
        self.adds = {name: node for node in self.nodes if _is(node, "Add") for name in node.input}
        self.uses = Counter(name for node in self.nodes for name in node.input)
        self.uses.update(output.name for output in graph.output)
        self.widths: dict[str, int] = {}  # last dimensions that are known
        self.instead: dict[int, onnx.NodeProto | None] = {}  # by id() of a node: what takes its place, None: nothing

    def only(self, name: str, op: str) -> onnx.NodeProto | None:
        """The node that makes a value which nothing else uses, if it is such an operator."""
        node = self.maker.get(name)
        return node if _is(node, op) and self.uses[name] == 1 else None

    def drop(self, *nodes: onnx.NodeProto) -> None:
        self.instead.update((id(node), None) for node in nodes)


class _Product:
    """A QuantisedMatMul in the making, from a MatMulNBits that it can compute."""

    def __init__(self, node: onnx.NodeProto, graph: _Graph):
        self.x, self.codes, self.scales, self.zeros, _, self.bias = _inputs(node)
        self.name, self.output = node.name, node.output[0]
        self.bits, self.sums, self.gated, self.epsilon = int(_attribute(node, "bits", 4)), 0, 0, 0.0
        self.residual = self.norm = ""
        self.width = graph.constants[self.codes][0]

    def node(self) -> onnx.NodeProto:
        inputs = [self.x, self.codes, self.scales, self.zeros, self.bias, self.residual, self.norm]
        attributes = {"bits": self.bits, "sums": self.sums, "gated": self.gated, "epsilon": self.epsilon}
        return onnx.helper.make_node("QuantisedMatMul", inputs, [self.output], name=self.name, domain="edgekv", **attributes)

    def take_sums(self, graph: _Graph) -> None:
        sums = graph.maker.get(self.x)
        if not _is(sums, "AppendBlockSums", "edgekv"):
            return
        graph.uses[self.x] -= 1
        if graph.uses[self.x]:
            graph.uses[sums.input[0]] += 1
        else:
            graph.drop(sums)
        self.x, self.sums = sums.input[0], 1

    def take_norm(self, graph: _Graph) -> None:
        norm = graph.only(self.x, "RMSNormalization")
        if norm is None or _attribute(norm, "axis", -1) != -1 or len(graph.constants.get(norm.input[1], ())) != 1:
            return
        self.x, self.norm = norm.input
        self.epsilon = float(_attribute(norm, "epsilon", 1e-5))
        graph.drop(norm)

    def take_gate(self, graph: _Graph) -> None:
        """silu(first half) * second half, as the exporter leaves it behind a joined projection: Split, Sigmoid, Mul, Mul."""
        multiplied = graph.only(self.x, "Mul")
        silu = multiplied and graph.only(multiplied.input[0], "Mul")
        sigmoid = silu and graph.only(silu.input[1], "Sigmoid")
        if sigmoid is None or sigmoid.input[0] != silu.input[0]:
            return
        first, second = silu.input[0], multiplied.input[1]
        split = graph.maker.get(first)
        if not _is(split, "Split") or list(split.output) != [first, second] or _attribute(split, "axis") != -1:
            return
        if graph.uses[first] == 2 and graph.uses[second] == 1 and _halves(split, graph):
            self.x, self.gated = split.input[0], 1
            graph.drop(multiplied, silu, sigmoid, split)

    def take_residual(self, graph: _Graph) -> onnx.NodeProto | None:
        """An addition behind it, of something that is as wide; returns it, because the product has to wait for both its inputs."""
        add = graph.adds.get(self.output)
        if add is None or graph.uses[self.output] != 1:
            return None
        other = add.input[1] if add.input[0] == self.output else add.input[0]
        if graph.widths.get(other) != self.width:
            return None
        self.residual, self.output = other, add.output[0]
        return add


def _inputs(node: onnx.NodeProto) -> list[str]:
    """x, codes, scales, zeros, groups and bias of a MatMulNBits, "" where there is none."""
    return [*node.input, *[""] * 6][:6]


def _can_compute(node: onnx.NodeProto, graph: _Graph) -> bool:
    _, *weights, groups, _ = _inputs(node)
    known = _attribute(node, "block_size") == BLOCK and _attribute(node, "bits", 4) in (4, 8) and not groups
    return known and graph.constants.keys() >= set(weights)


def _halves(split: onnx.NodeProto, graph: _Graph) -> bool:
    if len(split.input) < 2 or not split.input[1]:
        return True
    sizes = next((tensor for tensor in graph.graph.initializer if tensor.name == split.input[1]), None)
    if sizes is None or sizes.data_location == onnx.TensorProto.EXTERNAL:
        return False
    first, second = onnx.numpy_helper.to_array(sizes)
    return first == second


def _width(node: onnx.NodeProto, graph: _Graph) -> int | None:
    """Numbers in a row of a node's first output, for the few operators that a residual stream is made of."""
    if _is(node, "Gather") or _is(node, "GatherBlockQuantized", "com.microsoft"):
        packed = node.op_type == "GatherBlockQuantized" and _attribute(node, "bits", 4) == 4
        table = graph.constants.get(node.input[0], ())
        return table[1] * (2 if packed else 1) if len(table) == 2 else None
    if _is(node, "Add") and graph.widths.get(node.input[0]) == graph.widths.get(node.input[1]):
        return graph.widths.get(node.input[0])
    return None


def put_in(model: onnx.ModelProto) -> None:
    """Replaces every MatMulNBits of the main graph that has 4 or 8 bits, blocks of 32, zero points and constant weights, in place."""
    graph = _Graph(model.graph)
    for node in graph.nodes:
        if _is(node, "MatMulNBits", "com.microsoft") and _can_compute(node, graph):
            product = _Product(node, graph)
            product.take_sums(graph)
            product.take_norm(graph)
            product.take_gate(graph)
            place = product.take_residual(graph) or node
            graph.drop(node)
            graph.instead[id(place)] = product.node()
            graph.widths[product.output] = product.width
        elif (width := _width(node, graph)) is not None:
            graph.widths[node.output[0]] = width
    kept = onnx.GraphProto()  # copies, because clearing the list of nodes frees them
    kept.node.extend(new for node in graph.nodes if (new := graph.instead.get(id(node), node)) is not None)
    del model.graph.node[:]
    model.graph.node.extend(kept.node)


def choose_logits(model: onnx.ModelProto) -> int:
    """Gives the graph an input `logits.tiles` where the product that makes its output `logits` is ours, and returns the bytes of its
    weights; else changes nothing and returns 0.
    """
    product = next((node for node in model.graph.node if _is(node, "QuantisedMatMul", "edgekv") and node.output[0] == "logits"), None)
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
