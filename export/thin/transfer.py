"""Attention transfer: every layer learns the full model's attention on the full model's own hidden states, before a model learns as a whole.

No layer has to wait for another and no output layer is computed, so a query costs a small part of what it costs in a training of the whole
model. What the layers lose together is left to that. The idea is the first step of LoLCATs (arXiv 2410.10254), there for linear attention.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgekv.export import training_folder
from edgekv.export.thin import rounding, stream
from edgekv.export.thin.calibrate import RATE, ROWS, descend, divergence, held_out
from edgekv.export.thin.maps import Maps
from edgekv.export.thin.train import rate_of
from edgekv.geometry import LayerGeometry

STEPS = 200
LENGTH = 512  # tokens of a piece that is read; longer ones teach more of long distances in a step, which takes longer
LEAST_PIECES = 2  # one to learn from, one to measure on


def chunks_for(training: torch.Tensor, steps: int) -> torch.Tensor:
    """int64 [n, T] of the training sequences, spread over them: so many that `steps` read about every query once, and one in eight to
    measure on."""
    length = training.shape[1]
    wanted = math.ceil(math.ceil(steps * min(ROWS, length) / length) * 8 / 7) + 1
    return training[np.unique(np.linspace(0, len(training) - 1, min(wanted, len(training))).astype(int))]


def transfer(
    student: Any, teacher: Any, names: Sequence[str], maps: Sequence[Maps], chunks: torch.Tensor, starts: Sequence[int],
    geometry: Callable[[], Sequence[LayerGeometry]], steps: int, seed: int, path: Path, report: Callable[[int, int, float], None],
    stop: Callable[[int], bool], rounded: Sequence[str] = (),
) -> None:  # fmt: skip
    """Trains the named parameters of the student, a twin of the teacher, and maps, layer by layer. Layers that are done are kept in the
    file at `path`, and another call goes on behind them; `stop` ends it early.

    rounded: those that are read on the 4-bit grid meanwhile (rounding.py). starts: position that each of the chunks int64 [N, T] is taken
    to begin at. report: layers done, layers, KL of the last one, nats.
    """
    done, own = _read(path), dict(student.named_parameters())
    parameters, made = done["parameters"], done["maps"]
    if len(made) == len(maps):
        return
    blocks, shapes = stream.blocks(student, chunks[0]), geometry()
    for index, reading in enumerate(stream.readings(teacher, chunks)):
        if index < len(made):
            continue
        inside = {id(p): name for name, p in blocks[index].named_parameters()}
        mine = {name: own[name] for name in names if id(own[name]) in inside}
        coarse = [inside[id(own[name])] for name in mine if name in rounded]
        found = Layer(blocks[index], list(mine.values()), coarse, reading, starts, shapes[index]).learn(maps[index], steps, seed + index, stop)
        if found is None:
            return
        made.append(found[0].parts())
        parameters.update({name: p.detach() for name, p in mine.items()})
        training_folder.save(done, path)
        report(index + 1, len(blocks), found[1])


def load(path: Path, student: Any, start: Sequence[Maps]) -> list[Maps] | None:
    """Puts the weights of a transfer that began with the maps `start` into the student and returns the maps that belong to them; None when
    not all layers are done."""
    done, own = _read(path), dict(student.named_parameters())
    if len(done["maps"]) < len(start):
        return None
    with training_folder.restoring(path):
        for name, numbers in done["parameters"].items():
            training_folder.put(numbers, own[name])
        for layer, parts in zip(start, done["maps"], strict=True):
            if [x.shape for x in parts] != [x.shape for x in layer.parts()] or not all(torch.isfinite(x).all() for x in parts):
                raise ValueError("its maps are not those of this run")
        return [layer.with_parts(parts) for layer, parts in zip(start, done["maps"], strict=True)]


def _read(path: Path) -> dict[str, Any]:
    """parameters by name, and the parts of the maps of the layers that are done."""
    if not path.is_file():
        return {"parameters": {}, "maps": []}
    done = training_folder.read(path)
    with training_folder.restoring(path):
        return {"parameters": dict(done["parameters"]), "maps": list(done["maps"])}


class Layer:
    """One layer of the student beside what the teacher's reads and sees. parameters: those of its block that learn; rounded: names in the
    block of those among them that are read on the 4-bit grid."""

    def __init__(
        self, block: Any, parameters: list[torch.Tensor], rounded: Sequence[str], reading: stream.Reading, starts: Sequence[int],
        geometry: LayerGeometry,
    ):  # fmt: skip
        self._block, self._parameters, self._rounded, self._geometry = block, parameters, list(rounded), geometry
        self._reading, self._starts = reading, starts
        count = len(reading.hidden)
        self._measured = [i for i in range(count) if held_out(i, count)] or [0]
        self._training = [i for i in range(count) if not held_out(i, count)]

    def learn(self, maps: Maps, steps: int, seed: int, stop: Callable[[int], bool]) -> tuple[Maps, float] | None:
        """Adam on the KL of the attention, each step on ROWS queries of one chunk. What is better on the held-out chunks, before or
        after, stays, and its KL is returned; when the end is no better, shorter steps are tried. None, and nothing changed, when `stop`
        ended it early. Maps that leave nothing out have nothing to learn."""
        if maps.whole:
            return maps, 0.0
        parts = [x.to(self._reading.hidden[0].device).clone().requires_grad_() for x in maps.parts()]
        trained = [*self._parameters, *parts]
        before, start = [x.detach().clone() for x in trained], self.measure(maps.with_parts(parts))
        for rate in (RATE, RATE / 6):
            complete = self._descend(maps, parts, steps, rate, torch.Generator().manual_seed(seed), stop)
            end = self.measure(maps.with_parts(parts)) if complete else math.inf
            if end < start:
                return maps.with_parts([x.detach() for x in parts]), end
            with torch.no_grad():
                for x, numbers in zip(trained, before, strict=True):
                    x.copy_(numbers)
            if not complete:
                return None
        return maps, start

    def _descend(
        self, maps: Maps, parts: list[torch.Tensor], steps: int, rate: float, generator: torch.Generator, stop: Callable[[int], bool]
    ) -> bool:
        length = self._reading.hidden[0].shape[1]

        def loss(step: int) -> torch.Tensor:
            rows = torch.randperm(length, generator=generator)[:ROWS]
            return self._divergence(self._training[step % len(self._training)], maps.with_parts(parts), rows)

        return descend([*self._parameters, *parts], loss, [rate * rate_of(step, steps) for step in range(steps)], stop)

    @torch.no_grad()
    def measure(self, maps: Maps) -> float:
        """KL(full attention || thin attention) on the held-out chunks, every eighth query: mean over queries and heads, nats."""
        rows = torch.arange(0, self._reading.hidden[0].shape[1], 8)
        return sum(float(self._divergence(chunk, maps, rows)) for chunk in self._measured) / len(self._measured)

    def _divergence(self, chunk: int, maps: Maps, rows: torch.Tensor) -> torch.Tensor:
        text, rows = self._reading.text, rows.to(self._reading.hidden[chunk].device)
        with torch.no_grad():
            full = text.scores.logits(text.q[chunk][:, rows], text.k[chunk], rows)
        read = rounding.read(self._block, self._rounded)
        q, k = stream.queries_and_keys(self._block, self._reading.hidden[chunk], self._reading.call, read)
        q, k = (stream.further(x, self._geometry, self._starts[chunk]) for x in (q[:, rows], k))
        return divergence(full, text.scores.logits(*maps.at(self._starts[chunk]).apply(q, k), rows))
