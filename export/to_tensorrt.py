"""From a bundle's graph to one that TensorRT 10.3 and newer parse: `lower`.

A bundle is made for ONNX Runtime, whose contrib operators (MatMulNBits, GatherBlockQuantized, FusedMatMul) and newer ONNX operators
(RMSNormalization, opset 23) TensorRT's parser does not know. Here each becomes standard operators of opset 21:

  BoundedCacheAttention   the plugin's inputs: packed q, k, v are split
  SignVQRetrieval         the plugin's inputs. Its slots are bits, which only the attention reads; the state passes through it
  MatMulNBits, 4 bits     DequantizeLinear of int4 blocks and a MatMul. TensorRT's int4 has no zero point, so w = (c - z) s is
                          written as (c - 8) s + (8 - z) s; the second part is the same for a whole block, so it meets only
                          the block's sum of x: a MatMul 32 times narrower. Exact, not a second quantisation.
  AppendBlockSums         the same idea in the bundle, for offsets that are no multiple of s: both go into that narrow MatMul
  MatMulNBits, 8 bits     weights widened: TensorRT has no 8-bit blocks
  GatherBlockQuantized    a Gather in a widened table
  FusedMatMul (W^T)       Transpose and MatMul, which TensorRT joins
  RMSNormalization        its definition, in float32

With half precision everything runs in float16 except what must not: normalisation, the rotation's angles, the logits' last cast.
TensorRT builds such a graph as it is written (strongly typed), which all versions do, so no version chooses precisions for us.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper

from edgekv import layout
from edgekv.bundle import Bundle
from edgekv.errors import UserError
from edgekv.export.to_tensorrt_data import Blocks, Sink, Source

OPSET = 21
FLOAT, HALF, INT4 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT4
_INT64_RESULTS = {"Shape", "Size", "ArgMax", "ArgMin", "NonZero"}
_BOOL_RESULTS = {"Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Not", "And", "Or", "Xor", "IsNaN", "IsInf"}


class Lowered(NamedTuple):
    """What `lower` made: the graph file, bytes of its weights, and how many matrices stayed in 4 bits."""

    graph: Path
    weight_bytes: int
    int4_matrices: int


def lower(bundle: Bundle, folder: Path, *, half: bool = True, int4: bool = True, progress: Callable[[int, int], None] | None = None) -> Lowered:
    """Writes model.onnx and model.onnx.data for TensorRT into an existing folder.

    half      float16 activations and weights; otherwise float32
    int4      keep 4-bit blocks of the bundle in 4 bits (needs half); otherwise widen them
    progress  called with (nodes done, all nodes)

    Raises UserError for an operator that has no translation.
    """
    model = onnx.load(bundle.graph_path, load_external_data=False)
    with Sink(folder) as sink:
        work = Lowering(model, Source(model, bundle.graph_path.parent), sink, half, int4 and half)
        work.run(progress or (lambda done, total: None))
        size = sink.bytes
    inline = sum(len(t.raw_data) for t in sink.tensors.values())
    onnx.save(model, folder / "model.onnx")
    return Lowered(folder / "model.onnx", size + inline, work.int4_matrices)


def attention_params(node: NodeProto) -> dict:
    """The fields of attributes.def of an attention node."""
    attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
    return {name: attributes.get(name, default) for name, _, default in layout.FIELDS}


class Lowering:
    """One pass over the nodes in order; `self.nodes` collects what they become."""

    def __init__(self, model: onnx.ModelProto, source: Source, sink: Sink, half: bool, int4: bool):
        self.model, self.source, self.sink, self.half, self.int4 = model, source, sink, half, int4
        self.real = HALF if half else FLOAT  # type of activations
        self.numpy = np.float16 if half else np.float32
        self.nodes: list[NodeProto] = []
        self.kinds: dict[str, int] = {i.name: i.type.tensor_type.elem_type for i in model.graph.input}
        self.int4_matrices = 0
        self._sums: dict[str, str] = {}  # x -> the sums of its blocks
        self._summed: dict[str, str] = {}  # x with block sums appended -> x
        self._wide: dict[str, str] = {}
        self._split: dict[str, list[str]] = {}  # packed q, k, v -> each on its own
        self._searched: dict[str, str] = {}  # a state -> the same after retrieval
        self._made = 0
        self.exact = self._exact_values()

    def run(self, progress: Callable[[int, int], None]) -> None:
        nodes = list(self.model.graph.node)
        for index, node in enumerate(nodes):
            self.translate(node)
            progress(index + 1, len(nodes))
        graph = self.model.graph
        for output in graph.output:
            if output.type.tensor_type.elem_type == FLOAT:
                self._last_cast(output.name)
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(self.nodes)
        used = {name for node in self.nodes for name in node.input}
        graph.initializer.extend(t for name, t in self.sink.tensors.items() if name in used)
        del self.model.opset_import[:]
        self.model.opset_import.extend([helper.make_opsetid("", OPSET), helper.make_opsetid("edgekv", 1)])
        self.model.ir_version = 10

    # ---- which values stay in float32 whatever the precision

    def _exact_values(self) -> set[str]:
        """Everything that cos and sin are computed from: positions beyond 2048 are not exact in float16, angles far earlier."""
        makers = {out: node for node in self.model.graph.node for out in node.output}
        roots = [out for node in self.model.graph.node if node.op_type in ("Cos", "Sin") for out in node.output]
        for node in self.model.graph.node:
            if node.op_type in ("BoundedCacheAttention", "SignVQRetrieval"):
                roots += list(node.input[5:7])
        exact: set[str] = set()
        while roots:
            name = roots.pop()
            if name in exact or name not in makers:
                continue
            exact.add(name)
            roots += makers[name].input
        return exact

    # ---- small parts

    def emit(self, op_type: str, inputs: list[str], kind: int, outputs: int = 1, domain: str = "", name: str = "", **attributes) -> str:
        """Adds a node; returns the name of its first output."""
        self._made += 1
        names = [name] if name else [f"trt.{op_type}.{self._made}" + (f".{i}" if outputs > 1 else "") for i in range(outputs)]
        self.nodes.append(helper.make_node(op_type, inputs, names, domain=domain, **attributes))
        self.kinds.update((n, kind) for n in names)
        return names[0]

    def cast(self, name: str, kind: int) -> str:
        return name if self.kind(name) == kind else self.emit("Cast", [name], kind, to=kind)

    def kind(self, name: str) -> int:
        return self.kinds[name] if name in self.kinds else self.source.kind(name) if name in self.source else FLOAT

    def number(self, name: str, values, kind=np.int64) -> str:
        return self.sink.array(name, np.asarray(values, kind))

    def weight(self, name: str, exact: bool = False) -> str:
        """An initialiser of the bundle in the target's type, as it is when it holds no real numbers."""
        kind = self.source.kind(name)
        if kind not in (FLOAT, HALF):
            return self.sink.add(name, kind, self.source.shape(name), [self.source.array(name)])
        wanted = np.float32 if exact or not self.half else np.float16
        new = f"{name}.{np.dtype(wanted).name}"
        self.kinds[new] = HALF if wanted is np.float16 else FLOAT
        array = self.source.array(name).astype(wanted)
        if not np.isfinite(array).all() and np.isfinite(self.source.array(name)).all():
            array = np.clip(self.source.array(name), -65504, 65504).astype(wanted)  # masks of -1e38 and the like
        return self.sink.array(new, array)

    def value(self, name: str, exact: bool = False) -> str:
        """An input of a node: weight or computed value, in the type the node works in."""
        if not name:
            return ""
        if name in self.source:
            return self.weight(name, exact)
        if name in self._wide:
            name = self._wide[name]
        kind = self.kind(name)
        if kind == FLOAT and self.half and not exact:
            return self.cast(name, HALF)
        return self.cast(name, FLOAT) if kind == HALF and exact else name

    # ---- the rules

    def translate(self, node: NodeProto) -> None:
        if node.domain in ("", "ai.onnx"):
            {"RMSNormalization": self.rms_norm, "Cast": self.cast_node, "Constant": self.constant}.get(node.op_type, self.keep)(node)
            return
        rules = {
            ("edgekv", "BoundedCacheAttention"): self.attention,
            ("edgekv", "SignVQRetrieval"): self.retrieval,
            ("edgekv", "AppendBlockSums"): lambda node: self._summed.update({node.output[0]: node.input[0]}),
            ("com.microsoft", "MatMulNBits"): self.matmul_nbits,
            ("com.microsoft", "GatherBlockQuantized"): self.gather_blocks,
            ("com.microsoft", "FusedMatMul"): self.fused_matmul,
        }
        rule = rules.get((node.domain, node.op_type))
        if rule is None:
            raise UserError(f"The graph has the operator {node.domain}::{node.op_type}, which has no translation for TensorRT.")
        rule(node)

    def keep(self, node: NodeProto) -> None:
        """A standard operator: the same, on the target's types."""
        exact = any(out in self.exact for out in node.output)
        new = NodeProto()
        new.CopyFrom(node)
        del new.input[:]
        new.input.extend(self.value(name, exact) for name in node.input)
        for attribute in new.attribute:
            if attribute.HasField("t") and attribute.t.data_type == FLOAT and self.half and not exact:
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(attribute.t).astype(np.float16)))
        self.nodes.append(new)
        if node.op_type in _INT64_RESULTS:
            kind = TensorProto.INT64
        elif node.op_type in _BOOL_RESULTS:
            kind = TensorProto.BOOL
        elif node.op_type == "ConstantOfShape":
            kind = new.attribute[0].t.data_type if new.attribute else FLOAT
        else:
            kind = self.kind(new.input[1 if node.op_type == "Where" else 0])
        self.kinds.update((out, kind) for out in node.output)

    def constant(self, node: NodeProto) -> None:
        value = next(a for a in node.attribute)
        if value.name != "value":
            kind = {"value_float": np.float32, "value_floats": np.float32}.get(value.name, np.int64)
            array = np.asarray(helper.get_attribute_value(value), kind)
        else:
            array = onnx.numpy_helper.to_array(value.t)
        if array.dtype == np.float32 and self.half and node.output[0] not in self.exact:
            array = array.astype(np.float16)
        self.sink.array(node.output[0], array)
        self.kinds[node.output[0]] = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)

    def cast_node(self, node: NodeProto) -> None:
        """Casts between real types belong to the bundle's precision, not to ours."""
        to, out = helper.get_node_attr_value(node, "to"), node.output[0]
        exact = out in self.exact
        if to not in (FLOAT, HALF):
            self.keep(node)
            self.kinds[out] = to
            return
        given = self.value(node.input[0], exact)
        wanted = FLOAT if exact else self.real
        if self.kind(given) == wanted:
            self._wide[out], self.kinds[out] = given, wanted
        else:
            self.emit("Cast", [given], wanted, name=out, to=wanted)

    def rms_norm(self, node: NodeProto) -> None:
        epsilon = next((a.f for a in node.attribute if a.name == "epsilon"), 1e-5)
        axis = next((a.i for a in node.attribute if a.name == "axis"), -1)
        if axis != -1:
            raise UserError(f"RMSNormalization over axis {axis} has no translation for TensorRT.")
        x = self.cast(self.value(node.input[0], True), FLOAT)
        square = self.emit("Mul", [x, x], FLOAT)
        mean = self.emit("ReduceMean", [square, self.number("trt.last", [-1])], FLOAT, keepdims=1)
        moved = self.emit("Add", [mean, self.number(f"trt.epsilon.{epsilon:.3g}", epsilon, np.float32)], FLOAT)
        normal = self.emit("Div", [x, self.emit("Sqrt", [moved], FLOAT)], FLOAT)
        scaled = self.emit("Mul", [normal, self.weight(node.input[1], exact=True) if node.input[1] in self.source else self.value(node.input[1], True)], FLOAT)
        self.emit("Cast", [scaled], self.real, name=node.output[0], to=self.real)

    def attention(self, node: NodeProto) -> None:
        params, given = attention_params(node), [*node.input, "", "", ""]
        slots = [given[7]] if layout.is_selfindex(params) else []
        if slots == [""]:
            raise UserError(f"The compressed cache of layer {params['layer']} is not searched; export the bundle again with this edgekv.")
        inputs = [*self.rows(node, params), given[3], self._searched.get(given[4], given[4]), *self.tables(params, given), *slots]
        self.plugin(node.op_type, f"cache.{params['layer']}", inputs, list(node.output), params)
        self.kinds.update({node.output[0]: self.real, node.output[1]: TensorProto.INT8})

    def retrieval(self, node: NodeProto) -> None:
        params, given = attention_params(node), [*node.input, "", "", ""]
        state = self._searched[given[4]] = f"{given[4]}.searched"
        inputs = [self.rows(node, params)[0], given[3], given[4], *self.tables(params, given)]
        self.plugin(node.op_type, f"retrieval.{params['layer']}", inputs, [node.output[0], state], params)
        self.kinds.update({node.output[0]: TensorProto.INT32, state: TensorProto.INT8})

    def plugin(self, op_type: str, name: str, inputs: list[str], outputs: list[str], params: dict) -> None:
        kept = {field: params[field] for field, _, _ in layout.FIELDS}
        self.nodes.append(helper.make_node(op_type, inputs, outputs, name=name, domain="edgekv", plugin_namespace="edgekv", plugin_version="1", **kept))

    def tables(self, params: dict, given: list[str]) -> list[str]:
        """Cosines and sines of a node that rotates."""
        return [self.value(x, exact=True) for x in given[5:7]] if params["fused_rotary"] else []

    def rows(self, node: NodeProto, params: dict) -> list[str]:
        """Queries, keys and values of an attention node, unpacked. UserError when the node makes keys thinner, which our plugin cannot."""
        if params["head_dim"] or params["latent"]:
            raise UserError("This bundle keeps thin keys (projected or latent), for which there are no GPU kernels yet; run it with --engine onnxruntime.")
        q, k, v = node.input[:3]
        if not k and q in self._split:
            return self._split[q]
        if not k:
            packed = q
            widths = [params["q_heads"] * params["key_dim"], params["kv_heads"] * params["key_dim"], params["kv_heads"] * params["value_dim"]]
            sizes = self.number("trt.split." + "_".join(map(str, widths)), widths)
            q = self.emit("Split", [self.value(q), sizes], self.real, outputs=3, axis=-1)
            self._split[packed] = [q[:-1] + str(i) for i in range(3)]
            return self._split[packed]
        return [self.value(x) if x else "" for x in (q, k, v)]

    def matmul_nbits(self, node: NodeProto) -> None:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        given = [*node.input, "", "", ""]
        bits = attributes["bits"]
        if attributes["block_size"] != Blocks.SIZE or bits not in (4, 8) or given[4]:
            raise UserError("MatMulNBits with other than 4 or 8 bits, blocks of 32 and no group index has no translation for TensorRT.")
        plain = self._summed.get(given[0])
        blocks = Blocks(self.source, given[1], given[2], given[3] or None, attributes["K"], bits, sums=plain is not None)
        x, base = self.value(plain or given[0]), f"{given[1]}.trt"
        if self.int4 and bits == 4 and blocks.rows % 2 == 0 and blocks.columns % Blocks.SIZE == 0:
            y = self._int4_product(x, blocks, base)
        else:
            wide = self.sink.add(base, self.real, [blocks.rows, blocks.columns], blocks.wide(self.numpy))
            y = self.emit("MatMul", [x, self.emit("Transpose", [wide], self.real, perm=[1, 0])], self.real)
        if given[5]:
            y = self.emit("Add", [y, self.weight(given[5])], self.real)
        self._wide[node.output[0]], self.kinds[node.output[0]] = y, self.real

    def _int4_product(self, x: str, blocks: Blocks, base: str) -> str:
        shape = [blocks.columns, blocks.rows]
        codes = base if base in self.sink.tensors else self.sink.add(base, INT4, shape, [blocks.signed4()])
        scales = self.sink.array(f"{base}.scales", np.ascontiguousarray(blocks.scales.T).astype(self.numpy))
        weight = self.emit("DequantizeLinear", [codes, scales], self.real, axis=0, block_size=Blocks.SIZE)
        y = self.emit("MatMul", [x, weight], self.real)
        self.int4_matrices += 1
        offsets = blocks.offsets()
        if offsets is None:
            return y
        if x not in self._sums:
            shaped = self.emit("Reshape", [x, self.number(f"trt.blocks.{blocks.count}", [0, 0, blocks.count, Blocks.SIZE])], self.real)
            self._sums[x] = self.emit("ReduceSum", [shaped, self.number("trt.last", [-1])], self.real, keepdims=0)
        part = self.emit("MatMul", [self._sums[x], self.sink.array(f"{base}.offsets", offsets.astype(self.numpy))], self.real)
        return self.emit("Add", [y, part], self.real)

    def gather_blocks(self, node: NodeProto) -> None:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        codes, rows, scales = node.input[:3]
        zeros = node.input[3] if len(node.input) > 3 else None
        bits = attributes.get("bits", 4)
        if attributes.get("gather_axis", 0) != 0 or attributes.get("block_size") != Blocks.SIZE or attributes.get("quantize_axis", 1) != 1:
            raise UserError("GatherBlockQuantized with other than rows in blocks of 32 has no translation for TensorRT.")
        columns = self.source.shape(codes)[1] * 8 // bits
        blocks = Blocks(self.source, codes, scales, zeros, columns, bits)
        table = self.sink.add(f"{codes}.table", self.real, [blocks.rows, columns], blocks.wide(self.numpy))
        self.emit("Gather", [table, rows], self.real, name=node.output[0], axis=0)

    def fused_matmul(self, node: NodeProto) -> None:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        if attributes.pop("transB", 0) != 1 or attributes.pop("alpha", 1.0) != 1.0 or any(attributes.values()):
            raise UserError("FusedMatMul that does more than transpose its weight has no translation for TensorRT.")
        turned = self.emit("Transpose", [self.value(node.input[1])], self.real, perm=[1, 0])
        self.emit("MatMul", [self.value(node.input[0]), turned], self.real, name=node.output[0])

    def _last_cast(self, output: str) -> None:
        """A graph output promised in float32, under its own name."""
        if output in self._wide:
            self.emit("Cast", [self._wide[output]], FLOAT, name=output, to=FLOAT)
        elif self.kinds[output] == HALF:
            for node in self.nodes:
                for names in (node.input, node.output):
                    for i, name in enumerate(names):
                        if name == output:
                            names[i] = f"{output}.half"
            self.emit("Cast", [f"{output}.half"], FLOAT, name=output, to=FLOAT)
