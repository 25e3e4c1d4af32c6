"""The second lowering: a bundle's graph for TensorRT without edgekv's plugin, from TensorScatter and Attention (TensorRT >= 10.15).

Each layer's cache is two tensors, k.<i> and v.<i> [1, kv_heads, slots, dim], updated in place by TensorScatter at slot.<j>; attention
sees all slots under mask.<j> [1, 1, T, slots]. The host makes both, once per kind of layer (edgekv.engine.ring). TensorRT ignores Attention's own count
of valid keys and refuses its past and present tensors, so neither is used.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import onnx
from onnx import NodeProto, TensorProto, helper

from edgekv import layout
from edgekv.bundle import Bundle
from edgekv.engine.ring import Ring
from edgekv.export.to_tensorrt import Lowering, attention_params
from edgekv.export.to_tensorrt_data import Sink, Source

OPSET = 24


class Plain(NamedTuple):
    """What `lower_plain` made; masks: slots of mask.0, mask.1, ..."""

    graph: Path
    weight_bytes: int
    int4_matrices: int
    masks: list[int]


def lower_plain(
    bundle: Bundle, folder: Path, *, half: bool = True, int4: bool = True, progress: Callable[[int, int], None] | None = None
) -> Plain:
    """As `to_tensorrt.lower`, without the plugin. UserError for policies that need it."""
    params = [layout.complete(layer["params"]) for layer in bundle.layers]
    model = onnx.load(bundle.graph_path, load_external_data=False)
    with Sink(folder) as sink:
        work = _PlainLowering(model, Source(model, bundle.graph_path.parent), sink, half, int4 and half)
        work.params, work.rings = params, [Ring(p) for p in params]
        work.run(progress or (lambda done, total: None))
        size = sink.bytes
    work.finish()
    onnx.save(model, folder / "model.onnx")
    size += sum(len(t.raw_data) for t in sink.tensors.values())
    return Plain(folder / "model.onnx", size, work.int4_matrices, list(work.mask_slots().values()))


class _PlainLowering(Lowering):
    params: list[dict]  # of every layer
    rings: list[Ring]

    def __init__(self, *given):
        super().__init__(*given)
        self.makers: dict[str, NodeProto] = {}

    def ring_index(self, layer: int) -> int:
        """Which slot.<j> and mask.<j> a layer reads: kinds of ring in order of their first layer."""
        return list(dict.fromkeys(ring.key() for ring in self.rings)).index(self.rings[layer].key())

    def mask_slots(self) -> dict[str, int]:
        return {f"mask.{self.ring_index(i)}": ring.slots for i, ring in enumerate(self.rings)}

    def attention(self, node: NodeProto) -> None:
        p = attention_params(node)
        layer = p["layer"]
        q, k, v = self.rows(node, p)
        heads = (p["q_heads"], p["kv_heads"], p["kv_heads"])
        dims = (p["key_dim"], p["key_dim"], p["value_dim"])
        ranks = [3, 3, 3] if not node.input[1] else [self.rank(x) for x in node.input[:3]]
        q, k, v = (x if r == 4 else self.by_head(x, h, d) for x, r, h, d in zip((q, k, v), ranks, heads, dims, strict=True))
        if p["fused_rotary"]:
            cos, sin = (self.half_table(x, p["rotary_dim"] // 2) for x in node.input[5:7])
            q, k = (self.rotated(x, cos, sin, p) for x in (q, k))
        caches = {}
        for name, fresh in (("k", k), ("v", v)):
            self.kinds[f"{name}.{layer}"] = self.real
            out = f"{name}.{layer}.out"
            caches[name] = self.emit("TensorScatter", [f"{name}.{layer}", fresh, f"slot.{self.ring_index(layer)}"], self.real, name=out, axis=2, mode="linear")
        extra = {"softcap": float(p["softcap"])} if p["softcap"] else {}
        y = self.emit(
            "Attention", [q, caches["k"], caches["v"], self.bias(self.ring_index(layer))], self.real, scale=float(p["scale"]), **extra
        )  # fmt: skip
        y = self.emit("Transpose", [y], self.real, perm=[0, 2, 1, 3])
        width = p["q_heads"] * p["value_dim"]
        self.emit("Reshape", [y, self.number(f"trt.rows.{width}", [0, 0, width])], self.real, name=node.output[0])

    def rank(self, name: str) -> int:
        """Dimensions of a value of the bundle's graph: its attention takes [1, T, heads * dim] and [1, heads, T, dim] alike."""
        if name in self.source:
            return len(self.source.shape(name))
        if not self.makers:
            self.makers.update((out, node) for node in self.model.graph.node for out in node.output)
        maker = self.makers.get(name)
        if maker is None:
            given = next(i for i in self.model.graph.input if i.name == name)
            return len(given.type.tensor_type.shape.dim)
        if maker.op_type == "BoundedCacheAttention":
            return 3
        if maker.op_type == "Transpose":
            return len(helper.get_node_attr_value(maker, "perm"))
        if maker.op_type == "Reshape":
            return self.source.shape(maker.input[1])[0]
        if maker.op_type in ("Gather", "GatherBlockQuantized"):
            return self.rank(maker.input[0]) + self.rank(maker.input[1]) - 1
        if maker.op_type in ("Squeeze", "Unsqueeze"):
            return self.rank(maker.input[0]) + self.source.shape(maker.input[1])[0] * (1 if maker.op_type == "Unsqueeze" else -1)
        if maker.op_type in ("Add", "Mul", "Sub", "Div"):
            return max(self.rank(x) for x in maker.input)
        return self.rank(maker.input[0])

    def bias(self, index: int) -> str:
        """The mask as numbers to add to scores. TensorRT-RTX 1.7 cannot share a bool mask between two Attention nodes."""
        name = f"bias.{index}"
        if name not in self.kinds:
            self.kinds[f"mask.{index}"] = TensorProto.BOOL
            seen, hidden = self.number("trt.seen", 0, self.numpy), self.number("trt.hidden", -65504, self.numpy)
            self.emit("Where", [f"mask.{index}", seen, hidden], self.real, name=name)
        return name

    def by_head(self, x: str, heads: int, dim: int) -> str:
        """[1, T, heads * dim] -> [1, heads, T, dim]"""
        shaped = self.emit("Reshape", [x, self.number(f"trt.heads.{heads}.{dim}", [0, 0, heads, dim])], self.real)
        return self.emit("Transpose", [shaped], self.real, perm=[0, 2, 1, 3])

    def half_table(self, name: str, columns: int) -> str:
        """cos or sin [1, T, columns or more] -> [1, 1, T, columns] in the target's type"""
        key = f"{name}.plain"
        if key not in self.kinds:
            first, last, axis = (self.number(f"trt.slice.{i}", [i]) for i in (0, columns, 2))
            cut = self.emit("Slice", [self.value(name, exact=True), first, last, axis], TensorProto.FLOAT)
            wide = self.emit("Unsqueeze", [cut, self.number("trt.slice.1", [1])], TensorProto.FLOAT)
            self.emit("Cast", [wide], self.real, name=key, to=self.real)
        return key

    def rotated(self, x: str, cos: str, sin: str, p: dict) -> str:
        """Rotates the first rotary_dim numbers of every head, in pairs (i, i + half) or (2i, 2i + 1)."""
        half, rest, wide = p["rotary_dim"] // 2, p["key_dim"] - p["rotary_dim"], self.real

        def cut(value: str, first: int, last: int, step: int = 1) -> str:
            numbers = [self.number(f"trt.slice.{i}", [i]) for i in (first, last, 3, step)]
            return self.emit("Slice", [value, *numbers], wide)

        a, b = (cut(x, i, p["rotary_dim"], 2) for i in (0, 1)) if p["rotary_interleaved"] else (cut(x, 0, half), cut(x, half, 2 * half))
        first = self.emit("Sub", [self.emit("Mul", [a, cos], wide), self.emit("Mul", [b, sin], wide)], wide)
        second = self.emit("Add", [self.emit("Mul", [b, cos], wide), self.emit("Mul", [a, sin], wide)], wide)
        if p["rotary_interleaved"]:
            last = self.number("trt.slice.4", [4])
            pair = self.emit("Concat", [self.emit("Unsqueeze", [y, last], wide) for y in (first, second)], wide, axis=4)
            turned = self.emit("Reshape", [pair, self.number(f"trt.join.{2 * half}", [0, 0, 0, 2 * half])], wide)
        else:
            turned = self.emit("Concat", [first, second], wide, axis=3)
        return self.emit("Concat", [turned, cut(x, 2 * half, 2 * half + rest)], wide, axis=3) if rest else turned

    def finish(self) -> None:
        """Inputs and outputs of the caches in place of the states."""
        graph, kind = self.model.graph, self.real
        inputs = [i for i in graph.input if not i.name.startswith("state.")]
        outputs = [o for o in graph.output if not o.name.startswith("state.")]
        for layer, p in enumerate(self.params):
            for name, dim in (("k", p["key_dim"]), ("v", p["value_dim"])):
                shape = [1, p["kv_heads"], self.rings[layer].slots, dim]
                inputs.append(helper.make_tensor_value_info(f"{name}.{layer}", kind, shape))
                outputs.append(helper.make_tensor_value_info(f"{name}.{layer}.out", kind, shape))
        # The mask has all four dimensions: TensorRT-RTX 1.7 trips over those its parser would add.
        for name, slots in self.mask_slots().items():
            inputs.append(helper.make_tensor_value_info(name.replace("mask", "slot"), TensorProto.INT64, [1]))
            inputs.append(helper.make_tensor_value_info(name, TensorProto.BOOL, [1, 1, "T", slots]))
        del graph.input[:], graph.output[:]
        graph.input.extend(inputs)
        graph.output.extend(outputs)
        self.model.opset_import[0].version = OPSET
        del self.model.opset_import[1:]
        self.model.ir_version = 11
