"""Distils a student on a corpus: it learns the target's laws, not just its tokens. Saves itself, and resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from edgekv.export import training_folder
from edgekv.export.draft_corpus import Corpus

BATCH = 8  # sequences per step
HELD_OUT = 0.05  # share of the corpus that is not trained on
RATE, LEAST_RATE, WARM_UP = 1e-3, 1e-4, 30  # learning rate: peak, end, steps to the peak
SAVE_SECONDS = 60.0


@dataclass(frozen=True)
class Agreement:
    """How often a draft would be right, on the target's outputs it was not trained on.

    greedy   share of places where both find the same token most probable: acceptance in greedy decoding
    sampled  mean of sum(min(p, q)): acceptance at temperature 1
    """

    tokens: int
    greedy: float
    sampled: float


class Laws:
    """The target's laws over the student's tokens.

    token_ids  int64 [K]
    vocab      tokens of the target
    """

    def __init__(self, corpus: Corpus, token_ids: np.ndarray, vocab: int):
        self.corpus = corpus
        self._row = np.full(vocab, -1, np.int64)
        self._row[token_ids] = np.arange(len(token_ids))
        self.training = max(1, int(corpus.sequences * (1 - HELD_OUT)))

    def read(self, sequences: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens int64 [B, L], rows int64 [B, L, TOP], p float32 [B, L, TOP] (0 where the student lacks the token), best int64 [B, L].

        p is not renormalised; best is the row of the target's most probable token, -1 when the student lacks it.
        """
        ids = self._row[self.corpus.ids[sequences]]
        p = np.exp(self.corpus.logp[sequences].astype(np.float32)) * (ids >= 0)
        tokens = self.corpus.tokens[sequences].astype(np.int64)
        return torch.from_numpy(tokens), torch.from_numpy(np.maximum(ids, 0)), torch.from_numpy(p), torch.from_numpy(ids[..., 0])


def train(
    student: PreTrainedModel,
    laws: Laws,
    passes: float,
    folder: Path,
    seed: int,
    report: Callable[[int, int, float], None],
    stop: Callable[[], bool] = lambda: False,
) -> bool:
    """Trains for `passes` over the corpus, from the last state saved in `folder` on; False when `stop` ended it early.

    Input embeddings stay the target's. report(step, steps, loss): mean divergence in nats over the last steps.
    """
    steps = max(1, int(passes * laws.training / BATCH))
    student.get_input_embeddings().requires_grad_(False)
    parameters = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    path, first, loss_mean = folder / "training.pt", 0, float("nan")
    if path.is_file():
        saved = training_folder.read(path)
        with training_folder.restoring(path):
            student.load_state_dict(saved["student"], strict=False)
            optimizer.load_state_dict(saved["optimizer"])
            first = int(saved["step"])

    def save(step: int) -> None:
        training_folder.save({"step": step, "student": dict(student.named_parameters()), "optimizer": optimizer.state_dict()}, path)

    student.train()
    saved_at = time.monotonic()
    for step in range(first, steps):
        rng = np.random.default_rng((seed, step * BATCH // laws.training))  # one shuffle per pass
        order = rng.permutation(laws.training)
        places = np.arange(step * BATCH, (step + 1) * BATCH) % laws.training
        for group in optimizer.param_groups:
            group["lr"] = _rate(step, steps)
        loss = _loss(student, *laws.read(np.sort(order[places]))[:3])
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        loss_mean = loss.item() if math.isnan(loss_mean) else 0.95 * loss_mean + 0.05 * loss.item()
        report(step + 1, steps, loss_mean)
        ending = step + 1 == steps or stop()
        if ending or time.monotonic() - saved_at > SAVE_SECONDS:
            save(step + 1)
            saved_at = time.monotonic()
        if ending and step + 1 < steps:
            return False
    student.eval()
    return True


def _rate(step: int, steps: int) -> float:
    if step < WARM_UP:
        return RATE * (step + 1) / WARM_UP
    done = (step - WARM_UP) / max(1, steps - WARM_UP)
    return LEAST_RATE + (RATE - LEAST_RATE) * 0.5 * (1 + math.cos(math.pi * done))


def _loss(student: PreTrainedModel, tokens: torch.Tensor, rows: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Mean KL(target || student) over the student's tokens, in nats."""
    law = student(input_ids=tokens, use_cache=False).logits.log_softmax(-1).gather(-1, rows)
    total = p.sum(-1, keepdim=True)
    share = p / total.clamp(min=1e-6)
    divergence = (share * (share.clamp(min=1e-9).log() - law)).sum(-1)
    return (divergence * (total[..., 0] > 0.5)).mean()  # places whose likely tokens the student lacks teach nothing


@torch.no_grad()
def measure(student: PreTrainedModel, laws: Laws) -> Agreement:
    """Agreement on the held-out sequences, behind their first quarter."""
    student.eval()
    greedy = sampled = count = 0
    for start in range(laws.training, laws.corpus.sequences, BATCH):
        sequences = np.arange(start, min(start + BATCH, laws.corpus.sequences))
        tokens, rows, p, best = laws.read(sequences)
        law = student(input_ids=tokens, use_cache=False).logits.float().softmax(-1)
        part = slice(tokens.shape[1] // 4, None)
        greedy += int((law.argmax(-1) == best)[:, part].sum())
        sampled += float(torch.minimum(law.gather(-1, rows), p)[:, part].sum())
        count += best[:, part].numel()
    return Agreement(count, greedy / max(count, 1), sampled / max(count, 1))
