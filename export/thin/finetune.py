"""`edgekv finetune`: from a model and texts to a model directory whose keys have few numbers, with the same-data control beside it.

Three stages, each kept when it is done: maps are calibrated, every layer learns the full model's attention, the whole model learns.

Work in progress lies in a folder beside the result, so that a run which was stopped goes on where it ended; it is removed when the
result is complete. The result is an ordinary model directory with one more file, the key maps, and `edgekv export` finds those.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tokenizers import Tokenizer

from edgekv.errors import UserError
from edgekv.export import exporter, load, parity, rope, training_folder
from edgekv.export.quiet import quiet
from edgekv.export.thin import make, map_file, ranks, rounding, train, trainable, transfer
from edgekv.export.thin.maps import Maps
from edgekv.geometry import LayerGeometry

AGAIN = "start over with --fresh"
TRANSFER = "transfer.pt"  # layers whose attention transfer is done
RECORD = "edgekv_finetune.json"  # figures of the run, beside the result's weights
CARRIED = ("tokenizer*", "chat_template*", "generation_config.json", "special_tokens_map.json", "vocab*", "merges.txt", "*.model")

Report = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True)
class Options:
    """What `edgekv finetune` was asked for; see train.Schedule and make.KeyOptions. form: projected (absorbed where there is no rotation),
    pairs or latent; None: pairs where they can be left out, give the rank and something is there to learn, else projected. transfer_steps: of each layer's attention transfer (0: none), in pieces of at most transfer_length tokens. precision: of
    products in both trainings; maps are calibrated and perplexities measured in float32. weights: what those that learn are read as
    meanwhile, see rounding.py. control: train whole keys on the same data too."""

    rank: str
    texts: tuple[Path, ...]
    form: str | None = None
    steps: int = 200
    batch: int = 8
    length: int = 512
    rate: float = 3e-3
    loss: str = "distill"
    calibrate_tokens: int = make.TOKENS
    calibrate_steps: int = make.STEPS
    transfer_steps: int = transfer.STEPS
    transfer_length: int = transfer.LENGTH
    precision: str = "fp32"
    weights: str = "fp32"
    control: bool = True
    seed: int = 0
    save_every: int | None = None
    fresh: bool = False
    force: bool = False

    def training(self, contents: Sequence[str]) -> dict[str, Any]:
        """What a run depends on, for telling whether one can be resumed. contents: of the texts."""
        wanted = asdict(self)
        for name in ("fresh", "force", "save_every"):
            del wanted[name]
        return {**wanted, "texts": [training_folder.of_text(*text) for text in zip(self.texts, contents, strict=True)]}


def make_model(
    model: str, target: Path, options: Options, report: Report = lambda stage, done, total: None, stop: Callable[[int], bool] = lambda step: False
) -> dict[str, Any] | None:
    """Writes the fine-tuned model to `target` and returns its figures; None when `stop` ended the training early (its work is kept).

    UserError (nothing left but work to resume) when that is not possible. Every process of a run calls this.
    """
    wanted = ranks.parse(options.rank)
    accelerator, work = Accelerator(), target.parent / f"{target.name}.training"
    if accelerator.is_main_process:
        training_folder.sweep(work, target)
    if target.exists() and not options.force:
        raise UserError(f"{target} exists already; give another name or --force to replace it.")
    if options.batch % accelerator.num_processes:
        raise UserError(f"--batch {options.batch} cannot be shared evenly by {accelerator.num_processes} processes.")
    main = accelerator.is_main_process
    say: Report = report if main else lambda stage, done, total: None
    source = load.find(model, lambda text: say(f"loading: {text}", None, None))
    if map_file.there(source.folder):
        raise UserError(f"{source.name} has thin keys already; fine-tune the model that it was made from.")
    parity.check_memory(source)
    context = rope.choose_context(source.config, None)
    plain = make.load_model(source, context)
    contents = [make.read_text(path) for path in options.texts]
    corpus = _corpus(source, contents, options, int(plain.get_output_embeddings().weight.shape[0]), context)
    if main:
        training_folder.claim(work, "finetune", source, options.training(contents), options.fresh)
    accelerator.wait_for_everyone()
    # only what is still to be done needs it
    looked = functools.cache(lambda: exporter.whole_geometry(source, context, say, options.form, options.weights == "int4", wanted))

    def geometry() -> list[LayerGeometry]:
        return looked()[0]

    with training_folder.beginning(work):
        names = trainable.key_side(plain, corpus.training[0, :8])
        options = replace(options, form=_form(options.form, work, names, looked))
        if options.form == "latent":
            names = []  # a cache keeps the latest keys whole beside latent ones, and those must stay what they were: only the maps learn
        rounded = _rounded(plain, names, options)
        start = _start(plain, corpus, wanted, options, context, work, accelerator, geometry, lambda: exporter.layer_shapes(source, context), say)

    schedule = train.Schedule(options.steps, options.batch, options.rate, options.loss, context, options.seed, options.save_every)
    teacher = trainable.ThinModel(trainable.twin(plain, names), None)
    teacher.requires_grad_(False)
    transferred = _transferred(plain, teacher, names, rounded, start, corpus, options, context, work, accelerator, geometry, say, stop)
    if transferred is None:
        return None
    student = _student(plain, names, transferred, rounded)

    def learn(what: str, thin: trainable.ThinModel, file: str) -> bool:
        with train.products(options.precision):
            return train.train(
                thin, teacher, corpus, schedule, accelerator, work / file,
                lambda step, steps, loss: say(f"{what}, loss {loss:.3f} nats", step, steps), stop,
            )  # fmt: skip

    if not learn("training", student, "training.pt"):
        return None
    control = None
    if options.control and options.loss != "distill" and names:  # a whole model has nothing to learn from itself
        whole = _student(trainable.twin(plain, names), names, None, rounded)
        with torch.no_grad():  # from where the student began
            for name, p in whole.model.named_parameters():
                p.copy_(dict(teacher.model.named_parameters())[name])
        if not learn("training the control", whole, "control.pt"):
            return None
        control = train.perplexity(whole, corpus.validation, accelerator.device) if main else None
    figures = None
    if main:
        say("measuring", None, None)
        device, untrained = accelerator.device, trainable.ThinModel(teacher.model, start)  # once, however often the run was stopped
        before = {name: train.perplexity(thin.to(device), corpus.validation, device) for name, thin in (("full", teacher), ("before", untrained))}
        if options.transfer_steps:
            before["transferred"] = _of_transfer(teacher, transferred, names, rounded, corpus, work, device)
        figures = _finish(source, student, names, corpus, accelerator, target, work, options, context, before, control)
    accelerator.wait_for_everyone()
    return figures if main else {}


def _form(wanted: str | None, work: Path, names: list[str], looked: Callable[[], tuple[list[LayerGeometry], str]]) -> str:
    """The form that was asked for, or that the work in progress has, or that suits the model. UserError when nothing could learn."""
    if wanted is None and map_file.there(work / "start"):
        return map_file.load(work / "start", AGAIN)[0].form
    form = wanted or (looked()[1] if names else "projected")
    if form == "pairs" and not names:
        raise UserError("This model makes queries, keys and values with one matrix, which is not trained, so with --key-form pairs nothing could learn.")
    return form


def _rounded(plain: Any, names: list[str], options: Options) -> list[str]:
    """The weights that are read on the 4-bit grid; UserError when that is wanted and none learn."""
    if options.weights == "fp32":
        return []
    if not (found := rounding.matrices(plain, names)):
        raise UserError("Of this model and form the maps alone learn, which --weights int4 does not touch; leave it out.")
    return found


def _student(model: Any, names: list[str], start: list[Maps] | None, rounded: list[str]) -> trainable.ThinModel:
    trainable.only_these(model, names)
    return trainable.ThinModel(model, start, rounded)


def _corpus(source: load.Source, contents: Sequence[str], options: Options, vocab: int, context: int) -> train.Corpus:
    tokenizer, ids = Tokenizer.from_str(source.tokenizer), []
    for content in contents:
        ids += [i for i in tokenizer.encode(content, add_special_tokens=False).ids if i < vocab]
    length = min(options.length, context)
    corpus = train.Corpus.cut(ids, length)
    if corpus is None:
        raise UserError(f"The texts have {len(ids)} tokens and at least {2 * length} are needed; give more text or a shorter --length.")
    return corpus


def _start(
    plain: Any, corpus: train.Corpus, wanted: ranks.KeyRank, options: Options, context: int, work: Path, accelerator: Any,
    geometry: Callable[[], list[LayerGeometry]], shapes: Callable[[], list[LayerGeometry]], say: Report,
) -> list[Maps]:  # fmt: skip
    """Calibrated maps to begin with; the first process makes them, once. shapes: geometry without rotations, found without a graph, which
    is all that projected maps depend on."""
    folder = work / "start"
    if accelerator.is_main_process and not map_file.there(folder):
        count = max(make.LEAST_CHUNKS, min(len(corpus.training), options.calibrate_tokens // corpus.training.shape[1]))
        found = make.from_chunks(plain, corpus.training[:count], geometry(), wanted, options.form, options.calibrate_steps, context, say)
        if all(layer.whole for layer in found.maps):
            raise UserError(f"With --key-rank {options.rank} every key keeps all of its numbers, so there is nothing to learn; give less.")
        fresh = work / "start.new"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        map_file.save(fresh, found.maps)
        fresh.rename(folder)
    accelerator.wait_for_everyone()
    found = map_file.load(folder, AGAIN)
    if found is None or found[0].form != options.form:
        raise UserError(f"{folder} is damaged (it holds no {options.form} maps); {AGAIN}.")
    return map_file.fitted(found, geometry() if options.form != "projected" else shapes(), str(folder), AGAIN)


def _transferred(
    plain: Any, teacher: trainable.ThinModel, names: list[str], rounded: list[str], start: list[Maps], corpus: train.Corpus, options: Options,
    context: int, work: Path, accelerator: Any, geometry: Callable[[], list[LayerGeometry]], say: Report, stop: Callable[[int], bool],
) -> list[Maps] | None:  # fmt: skip
    """The maps after attention transfer, and `plain` with the weights that belong to them; None when it was stopped. The first process
    does it, once."""
    if not options.transfer_steps:
        return start
    path = work / TRANSFER
    if accelerator.is_main_process:
        pieces = corpus.joined(min(options.transfer_length, context), transfer.LEAST_PIECES)
        chunks = transfer.chunks_for(pieces, options.transfer_steps)
        trainable.only_these(plain, names)
        plain.to(accelerator.device)
        teacher.to(accelerator.device)
        with train.products(options.precision):
            transfer.transfer(
                plain, teacher.model, names, start, chunks.to(accelerator.device), make.starts_of(chunks, context), geometry, options.transfer_steps,
                options.seed, path, lambda layer, layers, kl: say(f"attention transfer, KL {kl:.3f} nats", layer, layers), stop,
                rounded,
            )  # fmt: skip
    accelerator.wait_for_everyone()
    return transfer.load(path, plain, start)


def _of_transfer(
    teacher: trainable.ThinModel, found: list[Maps], names: list[str], rounded: list[str], corpus: train.Corpus, work: Path, device: Any
) -> float:
    """Perplexity after attention transfer alone."""
    model = trainable.twin(teacher.model, names)
    transfer.load(work / TRANSFER, model, found)
    return train.perplexity(trainable.ThinModel(model, found, rounded).to(device), corpus.validation, device)


def _finish(
    source: load.Source, student: trainable.ThinModel, names: list[str], corpus: train.Corpus, accelerator: Any, target: Path, work: Path,
    options: Options, context: int, before: dict[str, float], control: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Saves the model as it was stored before, in its own number format, and measures it as saved."""
    stored = getattr(source.config, "dtype", None) or torch.float32
    student.settle(stored)  # what is measured is what is saved
    figures = {
        "model": source.name, "form": options.form, "ranks": [m.rank for m in student.maps()], "steps": options.steps, "batch": options.batch, "length": corpus.training.shape[1],
        "loss": options.loss, "processes": accelerator.num_processes, "transfer_steps": options.transfer_steps, "transfer_length": min(options.transfer_length, context), "precision": options.precision, "weights": options.weights, "trained_weights": len(names), "validation_tokens": corpus.validation.numel(),
        "perplexity_full": before["full"], "perplexity_thin_before": before["before"],
        "perplexity_thin_transferred": before.get("transferred"),
        "perplexity_thin_after": train.perplexity(student, corpus.validation, accelerator.device), "perplexity_control": control,
    }  # fmt: skip
    partial = work / training_folder.RESULT
    shutil.rmtree(partial, ignore_errors=True)
    with quiet():
        student.model.cpu().to(stored).save_pretrained(partial)
    for pattern in CARRIED:
        for path in source.folder.glob(pattern):
            if not (partial / path.name).exists():
                shutil.copyfile(path, partial / path.name)
    map_file.save(partial, student.maps())
    (partial / RECORD).write_text(json.dumps(figures, indent=1))
    training_folder.finish(work, target)
    return figures
