"""The training loop of a fine-tune: any number of processes, saves itself, and goes on bit for bit where it was stopped."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from edgekv.export import training_folder
from edgekv.export.thin.trainable import ThinModel

WARM_UP = 0.05  # share of the steps that the rate rises for
LEAST_RATE = 0.1  # of the rate, at the end
SAVE_SECONDS = 60.0
VALIDATED = 16  # most sequences that perplexity is measured on
LOSSES = ("distill", "text", "both")
PRECISIONS = {"fp32": "highest", "bf16": "medium"}  # torch's names


@contextlib.contextmanager
def products(precision: str) -> Iterator[None]:
    """Matrix products of float32 numbers in here may round them first ("bf16"; on a GPU torch takes TF32 for it) or not ("fp32"); sums
    and everything else stay float32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(PRECISIONS[precision])
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Corpus:
    """Text in sequences of one length: int64 [N, T] to train on and [M, T] that is only measured; and the number in the text of each
    sequence to train on, ascending."""

    training: torch.Tensor
    validation: torch.Tensor
    places: tuple[int, ...]

    @classmethod
    def cut(cls, ids: list[int], length: int) -> Corpus | None:
        """None when the text has fewer than two sequences. A twentieth is kept for measuring, spread over the text."""
        count = len(ids) // length
        if count < 2:
            return None
        rows = torch.tensor(ids[: count * length]).view(count, length)
        held = np.unique(np.linspace(0, count - 1, max(1, min(VALIDATED, count // 20)) + 2).astype(int)[1:-1])
        kept = np.setdiff1d(np.arange(count), held)
        return cls(rows[kept], rows[held], tuple(int(i) for i in kept))

    def joined(self, length: int, least: int) -> torch.Tensor:
        """int64 [n, K T]: neighbouring sequences to train on as pieces of at most `length` tokens, shorter ones when the text has fewer
        than `least` pieces of that."""
        runs = np.split(np.arange(len(self.places)), np.flatnonzero(np.diff(self.places) != 1) + 1)
        size = self.training.shape[1]
        for many in range(max(1, length // size), 0, -1):
            pieces = [run[i : i + many] for run in runs for i in range(0, len(run) - many + 1, many)]
            if len(pieces) >= least:
                return torch.stack([self.training[piece].flatten() for piece in pieces])
        return self.training


@dataclass(frozen=True)
class Schedule:
    """steps of `batch` sequences each; rate: size of a step relative to the mean size of each tensor's numbers; loss: one of LOSSES;
    context: positions that a sequence may begin at are drawn from it; save_every: steps between checkpoints, None: by time."""

    steps: int
    batch: int
    rate: float
    loss: str
    context: int
    seed: int
    save_every: int | None = None


def train(
    student: ThinModel,
    teacher: ThinModel,
    corpus: Corpus,
    schedule: Schedule,
    accelerator: Any,
    path: Path,
    report: Callable[[int, int, float], None],
    stop: Callable[[int], bool] = lambda step: False,
) -> bool:
    """Trains what requires a gradient, from the checkpoint at `path` on when there is one; False when `stop` ended it early.

    Every process takes its share of each batch; the loss that is reported is the mean over all. What a step does follows from the seed
    and its number alone, so neither a restart nor the number of processes changes it (the latter but for the order of sums).
    """
    trained = {name: p for name, p in student.named_parameters() if p.requires_grad}
    groups = [{"params": [p], "size": max(float(p.detach().abs().mean()), 1e-8)} for p in trained.values()]
    optimizer = torch.optim.AdamW(groups, lr=schedule.rate, betas=(0.9, 0.95), weight_decay=0.0)
    first = 0
    if path.is_file():
        saved = training_folder.read(path)
        with training_folder.restoring(path):
            for name, p in trained.items():
                training_folder.put(saved["parameters"][name], p)
            first = int(saved["step"])
    model, optimizer = accelerator.prepare(student, optimizer)
    if first:
        with training_folder.restoring(path):
            optimizer.load_state_dict(saved["optimizer"])
    teacher.to(accelerator.device).eval()
    inner = accelerator.unwrap_model(model)
    inner.eval()  # no dropout: the rank and the seed decide what a step does
    saved_at = time.monotonic()
    for step in range(first, schedule.steps):
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate * group["size"] * rate_of(step, schedule.steps)
        ids, start = _batch(corpus.training, schedule, step)
        ids = ids[accelerator.process_index :: accelerator.num_processes].to(accelerator.device)
        loss = _loss(model, teacher, ids, start, schedule.loss)
        optimizer.zero_grad(set_to_none=True)
        accelerator.backward(loss)
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
        optimizer.step()
        report(step + 1, schedule.steps, float(accelerator.reduce(loss.detach(), "mean")))
        done, ended = step + 1, _agree(stop(step + 1), accelerator)
        due = done % schedule.save_every == 0 if schedule.save_every else time.monotonic() - saved_at > SAVE_SECONDS
        if accelerator.is_main_process and (due or ended or done == schedule.steps):
            _save(path, done, inner, optimizer)
            saved_at = time.monotonic()
        if ended and done < schedule.steps:
            return False
    accelerator.wait_for_everyone()
    return True


def _agree(stop: bool, accelerator: Any) -> bool:
    """Whether any process wants to stop: all do then, at the same step."""
    if accelerator.num_processes == 1:
        return stop
    return float(accelerator.reduce(torch.tensor(float(stop), device=accelerator.device), "sum")) > 0


def rate_of(step: int, steps: int) -> float:
    """Of a step, as a share of the highest rate: a short rise, then half a cosine."""
    rise = max(1, round(WARM_UP * steps))
    if step < rise:
        return (step + 1) / rise
    return LEAST_RATE + (1 - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * (step - rise) / max(1, steps - rise)))


def _batch(rows: torch.Tensor, schedule: Schedule, step: int) -> tuple[torch.Tensor, int]:
    """Sequences of a step, in a new order in every pass over the text, and the position that they begin at."""
    places = np.arange(step * schedule.batch, (step + 1) * schedule.batch)
    orders = {p: np.random.default_rng((schedule.seed, int(p))).permutation(len(rows)) for p in np.unique(places // len(rows))}
    chosen = [int(orders[place // len(rows)][place % len(rows)]) for place in places]
    last = max(schedule.context - rows.shape[1], 0)
    return rows[chosen], int(np.random.default_rng((schedule.seed, 1 << 30, step)).integers(last + 1))


def _loss(model: Any, teacher: ThinModel, ids: torch.Tensor, start: int, kind: str) -> torch.Tensor:
    """Mean nats per token: KL(teacher || student), -log p of the text, or their sum."""
    logits = model(ids, start)
    loss = logits.new_zeros(())
    if kind != "text":
        with torch.no_grad():
            full = teacher(ids, start).log_softmax(-1)
        loss = loss + (full.exp() * (full - logits.log_softmax(-1))).sum(-1).mean()
    if kind != "distill":
        loss = loss + torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    return loss


def _save(path: Path, step: int, model: ThinModel, optimizer: Any) -> None:
    parameters = {name: p.detach().cpu() for name, p in model.named_parameters() if p.requires_grad}
    training_folder.save({"step": step, "parameters": parameters, "optimizer": optimizer.state_dict()}, path)


@torch.no_grad()
def perplexity(model: ThinModel, rows: torch.Tensor, device: Any = "cpu") -> float:
    """Of every token but the first of each sequence, read from position 0."""
    total = count = 0.0
    for row in rows:
        ids = row[None].to(device)
        total += float(torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:], reduction="sum"))
        count += ids.shape[1] - 1
    return math.exp(total / count)
