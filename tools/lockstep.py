"""Several texts over one set of weights, for checks that generate many texts: their steps wait for each other and run as one.

Every text has an engine of its own - states, compaction, logits, as in a run of its own - except that the products between the
attention nodes are computed for the rows of all texts together, so the weights are read once for all of them. The graph is the
bundle's with every attention node multiplied: `merged` splits its rows by text and joins them again.

    table = Table(bundle, texts=8, max_rows=17)
    run(table, [lambda engine: ..., ...])       # one function per text, each in a thread, with an engine of its own
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from edgekv.bundle import Bundle
from edgekv.engine import products
from edgekv.engine.onnxruntime import CPU, OnnxRuntimeEngine, session_options

_ROWS_AXIS = -2  # of q, k, v, cos and sin
_ROW_INPUTS, _POSITION, _STATE, _SLOTS = (0, 1, 2, 5, 6), 3, 4, 7  # inputs of both operators


def merged(graph_path: Path, texts: int) -> onnx.ModelProto:
    """The bundle's graph for several texts; external weights are not loaded.

    Inputs: input_ids [1, T] of all texts, one behind the other; sizes int64 [texts], which sum to T; places int64 [T], the rotary
    position of every row; rows [R], indices into T; position.K and state.L.K for text K and layer L. Outputs: logits, state.L.K.out.
    """
    model = onnx.load(graph_path, load_external_data=False)
    graph = model.graph
    made, nodes = {}, []
    for node in graph.node:
        if node.op_type == "Add" and any(made.get(name) == "Range" for name in node.input):
            nodes.append(helper.make_node("Identity", ["places"], [node.output[0]]))
        elif node.op_type in ("BoundedCacheAttention", "SignVQRetrieval"):
            nodes.extend(_multiplied(node, texts, made))
        else:
            nodes.append(node)
        made.update({name: node.op_type for name in node.output})
    inputs = [item for item in graph.input if item.name in ("input_ids", "rows")]
    states = {item.name: item.type.tensor_type.shape.dim[0].dim_value for item in graph.input if item.name.startswith("state.")}
    inputs += [helper.make_tensor_value_info("sizes", TensorProto.INT64, [texts]), helper.make_tensor_value_info("places", TensorProto.INT64, ["T"])]
    inputs += [helper.make_tensor_value_info(f"position.{k}", TensorProto.INT64, [1]) for k in range(texts)]
    inputs += [helper.make_tensor_value_info(f"{name}.{k}", TensorProto.INT8, [size]) for name, size in states.items() for k in range(texts)]
    outputs = [item for item in graph.output if item.name == "logits"]
    outputs += [helper.make_tensor_value_info(f"{name}.{k}.out", TensorProto.INT8, [size]) for name, size in states.items() for k in range(texts)]
    nodes = _needed(nodes, {item.name for item in outputs})
    used = {name for node in nodes for name in node.input}
    for field, kept in (("node", nodes), ("input", [item for item in inputs if item.name in used]), ("output", outputs)):
        del getattr(graph, field)[:]
        getattr(graph, field).extend(kept)
    del graph.value_info[:]
    return model


def _multiplied(node: onnx.NodeProto, texts: int, made: dict[str, str]) -> list[onnx.NodeProto]:
    """One node per text between a split and a join. What a retrieval found stays apart: only the same text's attention takes it."""
    nodes, parts = [], {}
    for name in {node.input[i] for i in _ROW_INPUTS if i < len(node.input) and node.input[i]}:
        parts[name] = [f"{name}.of.{k}" for k in range(texts)]
        if made.get(parts[name][0]) is None:  # cos and sin serve all layers
            nodes.append(helper.make_node("Split", [name, "sizes"], parts[name], axis=_ROWS_AXIS))
            made[parts[name][0]] = "Split"
    state, attends = node.input[_STATE], node.op_type == "BoundedCacheAttention"
    for k in range(texts):
        one = onnx.NodeProto()
        one.CopyFrom(node)
        one.name = f"{node.output[0]}.{k}"
        for index, name in enumerate(node.input):
            of_text = {_POSITION: "position", _STATE: state, _SLOTS: name}.get(index)
            one.input[index] = "" if not name else f"{of_text}.{k}" if of_text else parts[name][k]
        one.output[0] = f"{node.output[0]}.{k}"
        if attends:
            one.output[1] = f"{state}.{k}.out"
        nodes.append(one)
    if attends:
        nodes.append(helper.make_node("Concat", [f"{node.output[0]}.{k}" for k in range(texts)], [node.output[0]], axis=_ROWS_AXIS))
    return nodes


def _needed(nodes: list[onnx.NodeProto], wanted: set[str]) -> list[onnx.NodeProto]:
    """The nodes on which the wanted outputs depend, in order."""
    kept = []
    for node in reversed(nodes):
        if wanted.intersection(node.output):
            kept.append(node)
            wanted.update(node.input)
    return kept[::-1]


class Seat(OnnxRuntimeEngine):
    """The engine of one text: everything but the model is its own."""

    def __init__(self, table: Table, bundle: Bundle, max_rows: int):
        self._table = table
        super().__init__(bundle, threads=1, max_rows=max_rows)

    def _open(self) -> None:
        self._has_shift, self._logit_bytes = True, 0  # the table's own graph computes

    def _run(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        if not 0 <= position - self._tail_base <= self.boundary - len(tokens):
            raise ValueError(f"{len(tokens)} tokens after position {position} do not fit the tail that starts at {self._tail_base}")
        self._position[0] = position
        self.block, self.wanted = np.array(tokens, np.int64), np.array(rows, np.int64)
        self._table.run(self)
        return self._logits[0, : len(rows)]

    @property
    def places(self) -> np.ndarray:
        return self._position[0] - self._shift[0] + np.arange(self.block.size)


class Table:
    """Seats for `texts` texts. A step runs when every text that still goes on has asked for one."""

    def __init__(self, bundle: Bundle, texts: int, max_rows: int, threads: int = 1):
        self.seats = [Seat(self, bundle, max_rows) for _ in range(texts)]
        for seat in self.seats:
            seat.block, seat.wanted = np.zeros(1, np.int64), np.zeros(0, np.int64)
        with tempfile.TemporaryDirectory(dir=bundle.folder.parent) as folder:
            path = Path(folder) / "model.onnx"
            model = merged(bundle.graph_path, texts)
            products.put_in(model)
            path.write_bytes(model.SerializeToString())
            for data in bundle.folder.glob("*.data"):
                os.link(data.resolve(), path.parent / data.name)
            self._session = ort.InferenceSession(str(path), session_options(threads), providers=CPU)
        self._binding = self._session.io_binding()
        self._inputs = {item.name for item in self._session.get_inputs()}
        value = ort.OrtValue.ortvalue_from_numpy
        for k, seat in enumerate(self.seats):
            self._bind(f"position.{k}", seat._position)
            for layer, state in enumerate(seat._states):
                shared = value(state.view(np.int8))
                self._binding.bind_ortvalue_input(f"state.{layer}.{k}", shared)
                self._binding.bind_ortvalue_output(f"state.{layer}.{k}.out", shared)
        self._turn = threading.Condition()
        self._waiting: set[Seat] = set()
        self._going = len(self.seats)
        self._failure: Exception | None = None

    def _bind(self, name: str, array: np.ndarray) -> None:
        if name in self._inputs:
            self._binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))

    def run(self, seat: Seat) -> None:
        with self._turn:
            self._waiting.add(seat)
            if len(self._waiting) == self._going:
                self._step()
            while seat in self._waiting:
                self._turn.wait()
            if self._failure:
                raise self._failure

    def leave(self) -> None:
        """One text has ended; the others go on."""
        with self._turn:
            self._going -= 1
            if self._going and len(self._waiting) == self._going:
                self._step()

    def _step(self) -> None:
        try:
            self._compute()
        except Exception as error:
            self._failure = error
        self._waiting.clear()
        self._turn.notify_all()

    def _compute(self) -> None:
        for seat in self.seats:
            if seat not in self._waiting:  # its text has ended: one token beyond it keeps the node busy and commits nothing
                seat.block, seat.wanted = np.zeros(1, np.int64), np.zeros(0, np.int64)
        sizes = np.array([seat.block.size for seat in self.seats], np.int64)
        starts = np.cumsum(sizes) - sizes
        rows = np.concatenate([seat.wanted + start for seat, start in zip(self.seats, starts, strict=True)])
        logits = np.empty((1, rows.size, self.seats[0].vocab), np.float32)
        self._bind("input_ids", np.concatenate([seat.block for seat in self.seats])[None])
        self._bind("places", np.concatenate([seat.places for seat in self.seats]))
        self._bind("sizes", sizes)
        self._bind("rows", rows)
        self._binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        self._session.run_with_iobinding(self._binding)
        first = 0
        for seat in self.seats:
            seat._logits[0, : seat.wanted.size] = logits[0, first : first + seat.wanted.size]
            first += seat.wanted.size


def run(table: Table, texts: Sequence[Callable[[Seat], Any]]) -> list[Any]:
    """What each function returns; raises what one of them raised."""
    results: list[Any] = [None] * len(texts)
    failures: list[BaseException] = []

    def one(index: int) -> None:
        try:
            results[index] = texts[index](table.seats[index])
        except BaseException as error:
            failures.append(error)
        finally:
            table.leave()

    threads = [threading.Thread(target=one, args=(index,)) for index in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return results
