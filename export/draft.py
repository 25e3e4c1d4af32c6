"""`edgekv draft`: makes a small model that guesses what a large one will say, and puts it into a bundle.

It keeps some of the target's layers and the most frequent rows of its output layer, and learns from the target's own outputs.
Work in progress lies in a folder beside the result, so that a run which was stopped goes on where it ended; it is removed when
the bundle is complete.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from edgekv.bundle import Bundle, open_bundle, update_manifest
from edgekv.errors import EdgekvError, UserError
from edgekv.export import draft_corpus, draft_student, draft_train, exporter, load, parity, training_folder
from edgekv.export.quiet import quiet
from edgekv.export.thin import map_file
from edgekv.export.thin.make import read_text
from edgekv.generation.template import ChatTemplate

FREQUENT = 2000  # tokens that texts may start with when there is neither template nor text
LEAST_SEQUENCES = 2 * draft_corpus.BATCH

Report = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True)
class Options:
    """What `edgekv draft` was asked for.

    layers       layers that are kept; None: a fifth of the target's, at least 2
    head_tokens  tokens that the draft can propose; None: all up to 16,384, else the 8,192 most frequent
    tokens       of the target's outputs to learn from; length of one sequence
    passes       over these outputs
    texts        UTF-8 files whose pieces the target continues
    """

    export: exporter.Options
    layers: int | None = None
    head_tokens: int | None = None
    tokens: int = 400_000
    length: int = 256
    passes: float = 3.0
    texts: tuple[Path, ...] = ()
    seed: int = 0
    fresh: bool = False
    threads: int | None = field(default=None, compare=False)

    def training(self, contents: Sequence[str]) -> dict[str, Any]:
        """What a training run depends on, for telling whether one can be resumed. contents: of the texts."""
        wanted = asdict(self)
        for name in ("export", "fresh", "threads"):
            del wanted[name]
        return {**wanted, "texts": [training_folder.of_text(*text) for text in zip(self.texts, contents, strict=True)]}


@dataclass(frozen=True)
class Result:
    """The bundle, and what the draft was measured to be."""

    bundle: Bundle
    layers: list[int]
    head_tokens: int
    coverage: float
    agreement: draft_train.Agreement


def make(model: str, target: Path, options: Options, report: Report = lambda stage, done, total: None) -> Result:
    """Makes the draft and writes its bundle to `target`; UserError (nothing left but work to resume) when that fails."""
    work = target.parent / f"{target.name}.training"
    training_folder.sweep(work, target)
    if target.exists() and not options.export.force:
        raise UserError(f"{target} exists already; give another name or --force to replace it.")
    if options.tokens < LEAST_SEQUENCES * options.length:
        raise UserError(f"--tokens must be at least {LEAST_SEQUENCES * options.length} for something to be learnt and something to be measured.")
    source = load.find(model, lambda text: report(f"loading: {text}", None, None))
    if map_file.there(source.folder):
        raise UserError(f"{source.name} has thin keys, which a draft cannot learn from yet; make the draft from the model it was made from.")
    parity.check_memory(source)
    if options.threads:
        torch.set_num_threads(options.threads)
    contents = [read_text(path) for path in options.texts]
    training_folder.claim(work, "draft", source, options.training(contents), options.fresh)
    teacher = _teacher(source)
    count = teacher.config.num_hidden_layers
    kept = draft_student.layers_to_keep(count, _layers(options, count))

    corpus = draft_corpus.Corpus(work, options.tokens // options.length, options.length)
    _listen(corpus, teacher, source, contents, options, report)
    vocab = teacher.get_output_embeddings().weight.shape[0]
    token_ids, coverage = frequent_tokens(corpus, vocab, options.head_tokens)

    student = draft_student.cut(teacher, kept, token_ids)
    del teacher
    laws = draft_train.Laws(corpus, token_ids, vocab)
    draft_train.train(
        student, laws, options.passes, work, options.seed,
        lambda step, steps, loss: report(f"training, divergence {loss:.2f} nats", step, steps),
    )  # fmt: skip
    report("measuring", None, None)
    agreement = draft_train.measure(student, laws)

    draft_student.save(student, work / "student")
    small = draft_student.source_of(source, work / "student", student.config, token_ids if len(token_ids) < vocab else None)
    exporter.export_source(small, target, dataclasses.replace(options.export, check_parity=False), report)
    if options.export.check_parity:
        report("comparing with the trained model", None, None)
        _check_parity(small, target)
    made = update_manifest(
        target,
        draft={
            "target": source.name, "target_layers": count, "layers": kept, "head_tokens": len(token_ids), "coverage": coverage,
            "trained_tokens": int(laws.training * corpus.length), "passes": options.passes, "held_out_tokens": agreement.tokens,
            "greedy_acceptance": agreement.greedy, "sampled_acceptance": agreement.sampled,
        },
    )  # fmt: skip
    training_folder.finish(work, target)
    return Result(made, kept, len(token_ids), coverage, agreement)


def _check_parity(small: load.Source, target: Path) -> None:
    """Runs the bundle and the trained model side by side; raises UserError, with the bundle gone, when they differ."""
    try:
        made = open_bundle(target, verify=False)
        ids = parity.tokens_of(small, len(Tokenizer.from_str(small.tokenizer).get_vocab()), made.boundary)
        with torch.no_grad():
            original = draft_student.load(small)(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0].numpy()
        found = parity.compare(original, parity.bundle_logits(made, ids), parity.columns_of(ids, small.token_ids))
        weights = made.manifest["weights"]["format"]
        try:
            parity.judge(found, parity.LIMITS[weights, made.manifest["policy"]["element"]])
        except UserError as error:
            raise UserError(
                f"With {weights} weights the draft's likeliest token is the trained model's in {found.argmax_agreement:.0%} of {found.tokens} places, "
                "so it was not kept. The training is: repeat the command with --weights int8 or fp32."
            ) from error
        update_manifest(target, parity=found.to_json())
    except EdgekvError:
        shutil.rmtree(target)
        raise


def _layers(options: Options, count: int) -> int:
    wanted = max(2, count // 5) if options.layers is None else options.layers
    if not 1 <= wanted < count:
        raise UserError(f"--layers must be between 1 and {count - 1} for a model with {count} layers.")
    return wanted


def _teacher(source: load.Source) -> Any:
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, config=source.config, dtype=torch.float32, attn_implementation="sdpa", trust_remote_code=False
        )
    return model.eval()


def _listen(corpus: draft_corpus.Corpus, teacher: Any, source: load.Source, contents: Sequence[str], options: Options, report: Report) -> None:
    """Lets the target talk until the corpus is full."""
    tokenizer = Tokenizer.from_str(source.tokenizer)

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    turns = None
    if source.chat_template:
        special = {name: tokenizer.id_to_token(token) or "" if token is not None else "" for name, token in
                   (("bos_token", source.bos_token_id), ("eos_token", next(iter(source.eos_token_ids), None)))}  # fmt: skip
        template = ChatTemplate(source.chat_template, **special)
        turns = draft_corpus.Turns.of(lambda messages: template.render(messages, False), encode)
    texts = [ids for content in contents if len(ids := encode(content)) > draft_corpus.START_TOKENS]
    draft_corpus.write(
        corpus, teacher, turns, texts, range(min(FREQUENT, tokenizer.get_vocab_size())), source.bos_token_id,
        frozenset(source.eos_token_ids), options.seed, lambda done, total: report("the target writes", done * corpus.length, total * corpus.length),
    )  # fmt: skip


def frequent_tokens(corpus: draft_corpus.Corpus, vocab: int, wanted: int | None) -> tuple[np.ndarray, float]:
    """Tokens for the draft's output layer, ascending int64 [K], and the share of the target's likeliest tokens among them."""
    counts = np.bincount(corpus.ids[: corpus.done, :, 0].ravel(), minlength=vocab).astype(np.float64)
    probable = np.bincount(corpus.ids[: corpus.done].ravel(), np.exp(corpus.logp[: corpus.done].astype(np.float32)).ravel(), minlength=vocab)
    if wanted is None:
        wanted = vocab if vocab <= 16_384 else 8_192
    if wanted >= vocab:
        return np.arange(vocab), 1.0
    order = np.argsort(-probable, kind="stable")[:wanted]
    return np.sort(order), float(counts[order].sum() / counts.sum())
