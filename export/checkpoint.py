"""Reads a checkpoint tensor by tensor, and builds its model without any weights.

`ghost` makes the model with parameters that have a shape but no memory of their own, which is all that tracing needs; the
numbers are read one tensor at a time while the bundle is written. So an export needs memory for a few layers, not for the model.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from edgekv.errors import UserError
from edgekv.export.attention import NAME
from edgekv.export.quiet import quiet
from edgekv.export.thin import map_file

INDEX = "model.safetensors.index.json"


class _EmptyIsMeta(TorchFunctionMode):
    """Uninitialised tensors (parameters of linear layers and embeddings) get no memory; computed ones (rotary tables) are real."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def ghost(config: PretrainedConfig) -> PreTrainedModel:
    """The float32 model of a configuration with memory-less parameters; only its shapes and its buffers mean anything."""
    with _EmptyIsMeta():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32)
    made: dict[int, torch.nn.Parameter] = {}  # parameters that are shared stay shared
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                hollow = torch.nn.Parameter(torch.zeros(1).expand(parameter.shape), requires_grad=False)
                module._parameters[name] = made.setdefault(id(parameter), hollow)
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                raise UserError(f"{type(model).__name__} has a table ({name}) that exists only in its checkpoint, which is not supported.")
    return model.eval()


def fit_head(model: PreTrainedModel, rows: int, hollow: bool = False) -> None:
    """Replaces the output layer by one with `rows` outputs; hollow: without memory, as the models of `checkpoint.ghost`."""
    old = model.get_output_embeddings()
    columns, bias = old.weight.shape[1], getattr(old, "bias", None) is not None
    head = torch.nn.Linear(columns, rows, bias=bias, device="meta" if hollow else None)
    if hollow:
        for name, parameter in list(head._parameters.items()):
            if parameter is not None:
                head._parameters[name] = torch.nn.Parameter(torch.zeros(1).expand(parameter.shape), requires_grad=False)
    model.set_output_embeddings(head)


class Checkpoint:
    """Tensors of a directory of .safetensors files, by the names of the file."""

    def __init__(self, folder: Path):
        self.folder = folder
        index = folder / INDEX
        if index.is_file():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (ValueError, KeyError, AttributeError, TypeError):
                raise UserError(f"{index} is damaged; download the model again.") from None
        else:
            files = sorted(p.name for p in folder.glob("*.safetensors") if p.name != map_file.FILE)
        self._file_of: dict[str, Path] = {}
        self._shape_of: dict[str, tuple[int, ...]] = {}
        for name in files:
            self._scan(folder / Path(str(name)).name)

    def _scan(self, path: Path) -> None:
        if not path.is_file():
            raise UserError(f"{path} is missing; download the model again.")
        try:
            with safe_open(path, "pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    self._file_of[key] = path
                    self._shape_of[key] = tuple(file.get_slice(key).get_shape())
        except Exception as error:
            raise UserError(f"{path} is damaged or cut short ({error}); download the model again.") from None

    def __bool__(self) -> bool:
        return bool(self._file_of)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in set(self._file_of.values()))

    def keys(self) -> set[str]:
        return set(self._file_of)

    def shape(self, key: str) -> tuple[int, ...]:
        return self._shape_of[key]

    def read(self, key: str) -> np.ndarray:
        """One tensor as float32."""
        with safe_open(self._file_of[key], "pt") as file:
            return file.get_tensor(key).to(torch.float32).numpy()


Reader = Callable[[], np.ndarray]


def match(model: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Reader] | None:
    """Parameter or saved buffer name -> what reads it, or None when names or shapes differ from the checkpoint's.

    Names may differ by the base model's prefix, as transformers allows; a parameter shared by several modules (tied embeddings)
    may be saved under any of its names.
    """
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    prefix = f"{model.base_model_prefix}."

    def find(names: list[str], shape: tuple[int, ...]) -> str | None:
        for name in names:
            for key in (name, prefix + name, name.removeprefix(prefix)):
                if key in checkpoint.keys() and checkpoint.shape(key) == shape:
                    return key
        return None

    readers: dict[str, Reader] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        key = find([name, *aliases[id(parameter)]], tuple(parameter.shape))
        if key is None:
            return None
        readers[name] = lambda key=key: checkpoint.read(key)
    for name, buffer in model.named_buffers():
        key = find([name], tuple(buffer.shape))
        if key is not None and name in model.state_dict():
            readers[name] = lambda key=key: checkpoint.read(key)
    return readers


def load_whole(folder: Path, config: PretrainedConfig, hollow: PreTrainedModel) -> dict[str, Reader]:
    """The same readers from a model that transformers loads into memory: for checkpoints whose tensors it renames or merges."""
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=torch.float32, trust_remote_code=False)
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"The weights in {folder} cannot be loaded: {reason}") from None
    state = model.state_dict()
    readers: dict[str, Reader] = {}
    for name, parameter in hollow.named_parameters(remove_duplicate=False):
        if name not in state or state[name].shape != parameter.shape:
            raise UserError(f"The weights in {folder} lack {name} or have another shape for it; the checkpoint does not fit its config.json.")
        readers[name] = lambda name=name: state[name].numpy()
    return readers
