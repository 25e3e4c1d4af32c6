"""A small model cut out of a large one: some of its layers, and an output layer for its most frequent tokens only."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from edgekv.errors import UserError
from edgekv.export.checkpoint import Checkpoint, fit_head
from edgekv.export.load import Source
from edgekv.export.quiet import quiet

WEIGHTS = "model.safetensors"


def layers_to_keep(count: int, wanted: int) -> list[int]:
    """Indices of `wanted` of `count` layers: the first half of them from the front, the others spread to the very last.

    The first layers form what all others build on, the last one shapes the output; in between many can go.
    """
    front = (wanted + 1) // 2
    behind = wanted - front
    step = (count - front) / behind if behind else 0
    return [*range(front), *(front - 1 + round(step * (place + 1)) for place in range(behind))]


def layer_list(model: PreTrainedModel, count: int) -> str:
    """Name of the module list that holds the decoder layers."""
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.ModuleList) and len(module) == count]
    if len(names) != 1:
        raise UserError(f"{type(model).__name__} keeps its layers in a way that `edgekv draft` does not know; use another model as draft.")
    return names[0]


def smaller_config(config: PretrainedConfig, kept: list[int]) -> PretrainedConfig:
    """The configuration of a model with the kept layers only and an output layer of its own."""
    small = copy.deepcopy(config)
    small.num_hidden_layers = len(kept)
    if getattr(small, "layer_types", None):
        small.layer_types = [config.layer_types[index] for index in kept]
    small.tie_word_embeddings = False
    return small


def cut(teacher: PreTrainedModel, kept: list[int], token_ids: np.ndarray) -> PreTrainedModel:
    """A float32 model with the teacher's kept layers, and the rows of its output layer for token_ids int64 [K]."""
    count = teacher.config.num_hidden_layers
    place = layer_list(teacher, count)
    config = smaller_config(teacher.config, kept)
    with quiet():
        student = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")
    fit_head(student, len(token_ids))
    theirs = {name: tensor for name, tensor in teacher.state_dict().items() if not name.startswith(f"{place}.")}
    for new, old in enumerate(kept):
        prefix = f"{place}.{old}."
        theirs |= {f"{place}.{new}.{k[len(prefix):]}": v for k, v in teacher.state_dict().items() if k.startswith(prefix)}
    head, old_head = student.get_output_embeddings(), teacher.get_output_embeddings()
    names = {name for name, _ in student.named_parameters()}
    for name, parameter in head.named_parameters():
        full = next(n for n, p in student.named_parameters() if p is parameter)
        theirs[full] = getattr(old_head, name)[torch.from_numpy(token_ids)]
    missing = names - theirs.keys()
    if missing:
        raise UserError(f"{type(teacher).__name__} has no weights for {sorted(missing)[0]} of a smaller model; use another model as draft.")
    student.load_state_dict({name: theirs[name].detach().to(torch.float32).clone() for name in names}, strict=False)
    return student


def save(student: PreTrainedModel, folder: Path) -> None:
    """Writes the parameters of a student to a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: parameter.detach().contiguous() for name, parameter in student.named_parameters()}, folder / WEIGHTS)


def source_of(source: Source, folder: Path, student_config: PretrainedConfig, token_ids: np.ndarray | None) -> Source:
    """What the exporter needs of a student whose weights `save` wrote: the target's source with another model inside."""
    return dataclasses.replace(
        source, name=f"{source.name}-draft", folder=folder, config=copy.deepcopy(student_config), checkpoint=Checkpoint(folder), token_ids=token_ids
    )


def load(source: Source) -> Any:
    """The float32 student of such a source."""
    with quiet():
        student = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32, attn_implementation="eager")
    if source.token_ids is not None:
        fit_head(student, len(source.token_ids))
    student.load_state_dict({name: torch.from_numpy(source.checkpoint.read(name)) for name in source.checkpoint.keys()}, strict=False)  # noqa: SIM118
    return student.eval()
