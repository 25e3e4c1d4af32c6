"""A model as a graph with edgekv's inputs and outputs: input_ids, position, rows, shift, state.<i> -> logits, state.<i>.out."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PreTrainedModel

from edgekv.errors import UserError
from edgekv.export.attention import Recorder, recording
from edgekv.export.quiet import quiet
from edgekv.geometry import LayerGeometry

OPSET = 23
STATE_BYTES = 256  # of the states while tracing; the real sizes are put in when the cache has been planned


def discover(model: PreTrainedModel) -> list[LayerGeometry]:
    """What each layer stores, from a run on shapes alone. UserError names a feature that edgekv lacks."""
    with recording(Recorder()) as recorder, FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), quiet():
        model(input_ids=torch.zeros(1, 4, dtype=torch.int64), position_ids=torch.arange(4)[None], use_cache=False)
    if not recorder.layers:
        raise UserError(
            f"{type(model).__name__} does not route its attention through transformers' attention interface, so edgekv cannot export it."
        )
    if sorted(recorder.layers) != list(range(len(recorder.layers))):
        raise UserError(f"Only layers {sorted(recorder.layers)} of {type(model).__name__} attend; models that mix attention with other kinds of memory are not supported.")
    return [recorder.layers[index] for index in range(len(recorder.layers))]


class _Step(torch.nn.Module):
    """One step of a model on edgekv's inputs. Only the wanted rows reach the output layer, whichever model it is."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self.model = model
        self._rows: torch.Tensor | None = None
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(f"{type(model).__name__} has no output layer that gives logits over a vocabulary.")
        self._hook = head.register_forward_pre_hook(lambda module, args: (args[0].index_select(1, self._rows),))

    def forward(self, input_ids, position, rows, shift, states):
        self._rows = rows
        place = (position - shift + torch.arange(input_ids.shape[1]))[None]
        with recording(Recorder(position, states)) as recorder:
            logits = self.model(input_ids=input_ids, position_ids=place, use_cache=False).logits
        self._rows = None
        return (logits, *(recorder.updated[index] for index in range(len(states))))

    def release(self) -> None:
        self._hook.remove()


def trace(model: PreTrainedModel, layers: int) -> ir.Model:
    """The graph of a model from `checkpoint.ghost`; its weights are hollow still, its states STATE_BYTES long."""
    step = _Step(model).eval()
    states = [torch.zeros(STATE_BYTES, dtype=torch.int8) for _ in range(layers)]
    example = (
        torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), torch.tensor([1, 2, 3]),
        torch.zeros(1, dtype=torch.int64), states,
    )  # fmt: skip
    dynamic = ({1: torch.export.Dim("T", min=1)}, None, {0: torch.export.Dim("R", min=1)}, None, [None] * layers)
    names = [f"state.{index}" for index in range(layers)]
    try:
        with torch.no_grad(), quiet():
            program = torch.export.export(step, example, dynamic_shapes=dynamic, strict=False)
            graph = torch.onnx.export(
                program,
                dynamo=True,
                optimize=False,
                verbose=False,
                opset_version=OPSET,
                input_names=["input_ids", "position", "rows", "shift", *names],
                output_names=["logits", *(f"{name}.out" for name in names)],
            ).model
    finally:
        step.release()
    for value in [*graph.graph.initializers.values()]:
        value.name = value.name.removeprefix("model.")
    return graph
