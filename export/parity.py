"""The parity gate: the bundle and the original model read the same text side by side, and their logits must agree.

The text is no longer than the cache, so that nothing is evicted and a bounded cache must agree as closely as a full one. What
may differ is the rounding of weights and of stored keys and values; the limits below are loose enough for a sound model in each
format and far below what a wrong graph gives (argmax agreement near zero, KL of several nats). In a compressed cache all text
before the first boundary must agree as closely; what follows attends to compressed tokens, all of them, as a prompt does.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from edgekv import machine
from edgekv.bundle import Bundle
from edgekv.engine.onnxruntime import OnnxRuntimeEngine
from edgekv.errors import BundleError, EdgekvError, UserError
from edgekv.export import rope
from edgekv.export.load import Source
from edgekv.export.parity_text import TEXT
from edgekv.export.quiet import quiet
from edgekv.export.thin import attention
from edgekv.export.thin.make import load_model
from edgekv.export.thin.maps import Maps
from edgekv.generation.session import Session

MOST_TOKENS = 384
ROWS = 16  # logits compared at a time, which bounds the memory for large vocabularies


@dataclass(frozen=True)
class Limits:
    """Most that may differ; None: not a reason to fail. Mean KL in nats, agreement as a share of the tokens."""

    max_difference: float | None
    mean_kl: float
    argmax_agreement: float


# By weight format, and by whether keys and values are stored in half precision.
LIMITS = {
    ("fp32", "fp32"): Limits(1e-2, 1e-5, 0.99),
    ("fp32", "fp16"): Limits(1.0, 1e-3, 0.97),
    ("fp16", "fp32"): Limits(1.0, 1e-3, 0.97),
    ("fp16", "fp16"): Limits(1.0, 1e-3, 0.97),
    ("int8", "fp32"): Limits(None, 0.03, 0.90),
    ("int8", "fp16"): Limits(None, 0.03, 0.90),
    ("int4", "fp32"): Limits(None, 0.5, 0.5),
    ("int4", "fp16"): Limits(None, 0.5, 0.5),
}  # fmt: skip


LOSSY = Limits(None, 0.5, 0.5)  # of text that is attended to in its compressed form, whatever the format


@dataclass(frozen=True)
class Parity:
    """Over `tokens` positions: logit differences, KL(original || bundle) in nats, share of equal argmax, perplexity of both."""

    tokens: int
    max_difference: float
    mean_difference: float
    mean_kl: float
    max_kl: float
    argmax_agreement: float
    perplexity_original: float
    perplexity_bundle: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def needed_memory(source: Source) -> int:
    """Bytes of the original model in single precision, and of its checkpoint while it is loaded."""
    return sum(4 * int(np.prod(source.checkpoint.shape(key))) for key in source.checkpoint.keys())  # noqa: SIM118


def check_memory(source: Source) -> None:
    needed, available = needed_memory(source), machine.available_memory()
    if needed > available:
        raise UserError(
            f"The parity check runs the original model, which needs {needed >> 20:,} MiB of memory and {available >> 20:,} MiB are "
            "available; use a larger machine, or --no-parity to export without the check."
        )


def tokens_of(source: Source, vocab: int, room: int) -> np.ndarray:
    """int64 ids of the text, at most `room`."""
    ids = Tokenizer.from_str(source.tokenizer).encode(TEXT).ids
    ids = [i for i in ids if i < vocab][: min(room, MOST_TOKENS)]
    if len(ids) < 2:
        raise UserError("The model's tokenizer makes no tokens of English text, so parity cannot be checked; use --no-parity.")
    return np.asarray(ids, np.int64)


def original_logits(source: Source, ids: np.ndarray, context: int, maps: Sequence[Maps] | None = None) -> np.ndarray:
    """float32 [T, vocab] of the model in single precision with transformers' plain attention, made for `context` positions.

    maps  of every layer, for a bundle with thin keys: what it must agree with is the model with the same maps in its attention

    Of a source whose output layer was cut, [T, K] of the tokens that it keeps.
    """
    if source.cut_head:
        return original_logits(replace(source, cut_head=False), ids, context, maps)[:, source.token_ids]
    if maps is not None:
        with torch.no_grad(), attention.using(attention.Session(dict(enumerate(maps)))):
            return load_model(source, context)(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
    with quiet(), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, config=source.config, dtype=torch.float32, attn_implementation="eager", trust_remote_code=False
        ).eval()
        rope.freeze(model, context)
        return model(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()


def bundle_logits(bundle: Bundle, ids: np.ndarray) -> np.ndarray:
    """float32 [T, vocab], the text fed in blocks of several lengths, single tokens among them."""
    engine = OnnxRuntimeEngine(bundle, max_rows=max(1, min(bundle.chunk, bundle.boundary)))
    try:
        session, parts, done = Session(engine), [], 0
        while done < ids.size:
            block = ids[done : done + max(1, min(session.room, (1, 5, engine.chunk)[len(parts) % 3]))]
            parts.append(session.step(block, prompt=True).copy())
            session.commit(block.size)
            done += block.size
        return np.concatenate(parts)
    finally:
        engine.close()


@contextlib.contextmanager
def running(what: str) -> Iterator[None]:
    """Says of a bundle that was just made that it does not run; what is the user's to mend, such as too little memory, stays as it is."""
    try:
        yield
    except EdgekvError as error:
        if isinstance(error, UserError) and not isinstance(error, BundleError):
            raise
        raise UserError(f"{what} does not run: {error}") from None


def columns_of(ids: np.ndarray, token_ids: np.ndarray | None) -> np.ndarray:
    """Columns of logits that stand for tokens; -1 for tokens that an output layer of `token_ids` does not have. None: it has all."""
    if token_ids is None:
        return ids
    places = np.minimum(np.searchsorted(token_ids, ids), len(token_ids) - 1)
    return np.where(token_ids[places] == ids, places, -1)


def compare(original: np.ndarray, ours: np.ndarray, columns: np.ndarray) -> Parity:
    """Figures over all rows of two float32 [T, vocab]. columns: of the text's tokens; perplexity leaves out those that have none (-1)."""
    largest = total = 0.0
    kl: list[float] = []
    loss = np.zeros(2)
    agree = counted = 0
    for start in range(0, len(columns), ROWS):
        a, b = (torch.from_numpy(x[start : start + ROWS]).double() for x in (original, ours))
        difference = (a - b).abs()
        largest, total = max(largest, float(difference.max())), total + float(difference.sum())
        p, q = a.log_softmax(-1), b.log_softmax(-1)
        kl += (p.exp() * (p - q)).sum(-1).tolist()
        agree += int((a.argmax(-1) == b.argmax(-1)).sum())
        following = torch.from_numpy(columns[start + 1 : start + 1 + ROWS])
        there = following >= 0
        loss += [float(-x[: len(following)][there].gather(-1, following[there, None]).sum()) for x in (p, q)]
        counted += int(there.sum())
    perplexity = np.exp(loss / max(counted, 1))
    return Parity(
        tokens=len(columns),
        max_difference=largest,
        mean_difference=total / original.size,
        mean_kl=float(np.mean(kl)),
        max_kl=float(np.max(kl)),
        argmax_agreement=agree / len(columns),
        perplexity_original=float(perplexity[0]),
        perplexity_bundle=float(perplexity[1]),
    )


def judge(found: Parity, limits: Limits) -> None:
    """Raises UserError when the bundle does not compute what the model computes."""
    numbers = (found.max_difference, found.mean_kl, found.argmax_agreement)
    wrong = []
    if not np.all(np.isfinite(numbers)):
        wrong.append("its logits are not numbers")
    if limits.max_difference is not None and found.max_difference > limits.max_difference:
        wrong.append(f"logits differ by up to {found.max_difference:.3g} (limit {limits.max_difference:g})")
    if found.mean_kl > limits.mean_kl:
        wrong.append(f"mean KL is {found.mean_kl:.3g} nats (limit {limits.mean_kl:g})")
    if found.argmax_agreement < limits.argmax_agreement:
        wrong.append(f"the likeliest token agrees {found.argmax_agreement:.0%} of the time (limit {limits.argmax_agreement:.0%})")
    if wrong:
        raise UserError(
            f"The exported model does not match the original on {found.tokens} tokens: {'; '.join(wrong)}. "
            "Use more exact --weights, or report the model; --no-parity exports anyway."
        )


def judged(original: np.ndarray, ours: np.ndarray, columns: np.ndarray, limits: Limits, exact: int | None) -> Parity:
    """Figures as of `compare`, judged.

    exact  rows before any token was compressed: these must meet `limits`, the others LOSSY; None: no token ever is
    """
    found = compare(original, ours, columns)
    if exact is None or exact >= len(columns):
        judge(found, limits)
    else:
        judge(compare(original[:exact], ours[:exact], columns[:exact]), limits)
        judge(found, LOSSY)
    return found


def check(source: Source, bundle: Bundle, room: int, maps: Sequence[Maps] | None = None) -> Parity:
    """Runs both and judges; returns the figures. maps: as in original_logits."""
    ids = tokens_of(source, bundle.model["vocab"] if source.token_ids is None else source.config.get_text_config().vocab_size, room)
    original = original_logits(source, ids, bundle.model["context"], maps)
    with running("The exported model"):
        ours = bundle_logits(bundle, ids)
    limits = LIMITS[bundle.manifest["weights"]["format"], bundle.manifest["policy"]["element"]]
    return judged(original, ours, columns_of(ids, source.token_ids), limits, bundle.boundary if bundle.compressed else None)
