"""`edgekv export`: makes a bundle from a model; needs the extra `edgekv[export]`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgekv.errors import UserError

PARITY_FIGURES = ("tokens", "mean_difference", "max_difference", "mean_kl", "argmax_agreement", "perplexity_original", "perplexity_bundle")
KEY_OPTIONS = ("key_rank", "key_form", "key_text", "key_tokens", "key_steps")


@click.command("export", short_help="Make a bundle from a Hugging Face model or a GGUF file.")
@click.argument("model")
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="Folder of the new bundle.")
@click.option("--keep", type=click.Choice(["full", "window", "heavy"]), default="full", show_default=True,
              help="What stays in the cache: every token; sinks and newest; sinks, newest and the heaviest others.")  # fmt: skip
@click.option("--kv-budget", help="Size of the cache: bytes (2MiB), tokens (1024tok) or percent of the context (25%).")
@click.option("--cache", "format", type=click.Choice(["dense", "selfindex"]), default="dense", show_default=True,
              help="How keys and values are stored: as they are, or compressed to about a third (a fifth with --key-bits 2 --value-bits 2), with keys that are their own index.")  # fmt: skip
@click.option("--key-bits", type=click.Choice(["2", "4"]), callback=lambda ctx, option, text: text and int(text),
              help="Bits per number of a compressed key, beside its sign (selfindex); default 4.")  # fmt: skip
@click.option("--value-bits", type=click.Choice(["2", "4", "8"]), callback=lambda ctx, option, text: text and int(text),
              help="Bits per number of a compressed value (selfindex); default 4.")  # fmt: skip
@click.option("--retrieve", help="Compressed tokens that a generated token attends to: 96, 7.5% or all (selfindex); default 7.5%.")
@click.option("--rerank", type=click.IntRange(1, 64), help="Candidates per retrieved token that are ranked again by their stored keys (selfindex); default: 512 more than are retrieved.")
@click.option("--sinks", type=click.IntRange(0), help="First tokens of the text that are never evicted (window, heavy; default 4) or compressed (selfindex; default 64).")
@click.option("--window", type=click.IntRange(0), help="Newest tokens that are never evicted (heavy); default half the body, a quarter with --score keys.")
@click.option("--score", type=click.Choice(["attention", "keys"]), help="Rank the others by the attention they received or by how "
              "little their keys are like all, which takes no bytes (heavy); default attention.")  # fmt: skip
@click.option("--observe", type=click.IntRange(0), help="Queries per boundary interval that score tokens (attention); default 32.")
@click.option("--score-normalise/--no-score-normalise", default=None,
              help="Rank tokens by mean attention per query instead of the sum (attention); default yes.")  # fmt: skip
@click.option("--score-decay", type=click.FloatRange(0, 1), help="Factor on scores at every boundary (attention); default 1.")
@click.option("--positions", type=click.Choice(["original", "cache"]), default="original", show_default=True,
              help="Rotary position of a key: its place in the text, or its rank in the cache (text without end).")  # fmt: skip
@click.option("--kv-type", type=click.Choice(["fp16", "fp32"]), default="fp16", show_default=True, help="Numbers of the cache.")
@click.option("--boundary", type=click.IntRange(16), help="Tokens between two compactions, a multiple of 16; default by budget.")
@click.option("--chunk", type=click.IntRange(1), help="Most prompt tokens of one step; default the boundary interval, at most 512.")
@click.option("--weights", type=click.Choice(["fp32", "fp16", "int8", "int4"]), default="int4", show_default=True,
              help="Format of the weights.")  # fmt: skip
@click.option("--context", type=click.IntRange(1), help="Positions the bundle may use, at most the model's own.")
@click.option("--device", help="Device or profile file to choose the budget for, and to say what stays on chip there.")
@click.option("--key-rank", help="Numbers stored per key (latent: per token): 32, a share of the key bytes (25%), or auto[:SHARE], one budget spread over the layers.")
@click.option("--key-form", type=click.Choice(["projected", "absorbed", "pairs", "latent"]), help="How keys get thinner: by a map after their rotation, in "
              "the weights (models without rotary positions, and their default), by fewer rotary pairs (fastest, to be trained: edgekv finetune), or all "
              "kv heads together before the rotation (best quality, dear to read).")  # fmt: skip
@click.option("--key-text", type=click.Path(path_type=Path), help="UTF-8 text to calibrate thin keys on; default the one `edgekv eval` reads by default.")
@click.option("--key-tokens", type=click.IntRange(2), default=8192, show_default=True, help="Tokens of it to use.")
@click.option("--key-steps", type=click.IntRange(0), default=96, show_default=True, help="Refinement steps per layer; 0: closed form only. Pairs have none.")
@click.option("--head-tokens", type=click.IntRange(2), help="Rows of the output layer to keep, the most frequent tokens: makes a draft, for --draft.")
@click.option("--head-text", "head_texts", multiple=True, type=click.Path(path_type=Path),
              help="UTF-8 file to count tokens in; may be given several times. Default: what the tokenizer learnt first.")  # fmt: skip
@click.option("--parity/--no-parity", default=True, show_default=True, help="Compare the bundle's logits with the original model's.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there already.")
@click.pass_context
def command(ctx: click.Context, model: str, target: Path, keep: str, kv_budget: str | None, weights: str, context: int | None,
            chunk: int | None, device: str | None, parity: bool, force: bool, key_rank: str | None, key_form: str | None, key_text: Path | None,
            key_tokens: int, key_steps: int, head_tokens: int | None, head_texts: tuple[Path, ...], **cache) -> None:  # fmt: skip
    """Exports MODEL to a bundle that runs inside a fixed cache budget.

    MODEL is a Hugging Face directory, a hub id or a .gguf file. It may also be a bundle: then only its cache is made anew, in
    seconds, and the weights are shared.
    """
    from edgekv.memory import profiles
    from edgekv.policy import CachePolicy, parse_budget

    policy = CachePolicy(keep=keep, element=cache.pop("kv_type"), **cache)
    budget = parse_budget(kv_budget) if kv_budget else None
    if budget is None and keep != "full" and not device:
        raise UserError(f"--keep {keep} needs --kv-budget, for example --kv-budget 2MiB, 1024tok or 25%, or --device.")
    if chunk is not None and policy.boundary is not None and chunk > policy.boundary:
        raise UserError(f"--chunk {chunk} is longer than --boundary {policy.boundary}; a block of tokens never crosses a boundary.")
    def given(*names: str) -> bool:
        return any(ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT for name in names)

    if (Path(model) / "manifest.json").is_file():
        if given("weights", "context"):
            raise UserError(f"{model} is a bundle: its weights and context are what they are; leave out --weights and --context.")
        if given(*KEY_OPTIONS):
            raise UserError(f"{model} is a bundle, whose keys are what they are; give the model it was made from to make them thinner.")
        if given("head_tokens", "head_texts"):
            raise UserError(f"{model} is a bundle, whose output layer is what it is; give the model it was made from to shorten it.")
    if head_texts and head_tokens is None:
        raise UserError("--head-text says which tokens are frequent: it needs --head-tokens.")
    if key_form == "pairs" and key_steps and given("key_steps"):
        raise UserError("--key-steps refines maps, and --key-form pairs has none; leave it out.")
    head = (head_tokens, head_texts) if head_tokens is not None else None
    if not key_rank and given("key_text", "key_tokens", "key_steps"):
        raise UserError("--key-text, --key-tokens and --key-steps say how thin keys are calibrated: they need --key-rank.")
    keys = (key_rank, {"form": key_form, "text": key_text, "tokens": key_tokens, "steps": key_steps}) if key_rank or key_form else None
    profile = profiles.load(device) if device else None
    _run(model, target, {"device": profile, "policy": policy, "budget": budget, "weights": weights, "context": context, "chunk": chunk, "check_parity": parity, "force": force, "keys": keys, "head": head})  # fmt: skip


def _run(model: str, target: Path, options: dict) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from edgekv import bundle as bundles

    console = Console(stderr=True, highlight=False)
    start = time.monotonic()
    columns = TextColumn("{task.description}"), BarColumn(20), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=False) as progress:
        task = progress.add_task("starting", total=None)
        current = "starting"

        def report(stage: str, done: int | None, total: int | None) -> None:
            nonlocal task, current
            if stage != current:
                progress.update(task, total=1, completed=1)
                task, current = progress.add_task(stage, total=total), stage
            progress.update(task, total=total, completed=done or 0)

        from edgekv.export import exporter, replan
        from edgekv.export.short_head import HeadOptions
        from edgekv.export.thin import ranks
        from edgekv.export.thin.make import KeyOptions

        if replan.is_bundle(model):
            del options["weights"], options["context"], options["keys"], options["head"]
            source = bundles.open_bundle(model)
            words = _choose_for_bundle(source, options)
            made = replan.replan(source, target, **options, report=report)
        else:
            if options["keys"] is not None:
                rank, more = options["keys"]
                options["keys"] = KeyOptions(ranks.parse(rank) if rank else None, **more)
            if options["head"] is not None:
                options["head"] = HeadOptions(*options["head"])
            made = exporter.export(model, target, exporter.Options(**options), report)
            words = made.manifest.get("device", {}).get("words")
        progress.update(task, total=1, completed=1)
    _summary(console, made, words, time.monotonic() - start)


def _choose_for_bundle(source, options: dict) -> str | None:
    """Replaces the budget in `options` by the one for their device, if there is one; returns what there is to say of it."""
    device = options.pop("device")
    if device is None:
        return None
    from edgekv.memory import on_device
    from edgekv.memory.model import shape_from_bundle
    from edgekv.memory.weights import weight_format

    weights = weight_format(source.manifest["weights"]["format"])
    chosen = on_device.choose(shape_from_bundle(source.folder), options["policy"], options["budget"], weights, device, source.model["context"])
    options["budget"] = chosen.budget
    return chosen.words


def _summary(console, made, words: str | None, seconds: float) -> None:
    from edgekv import thin_keys
    from edgekv.budget import format_bytes

    manifest, figures = made.manifest, made.manifest["parity"]
    console.print(f"{made.folder}: {manifest['weights']['format']} weights, {format_bytes(made.weight_bytes)}, in {seconds:.0f} s", markup=False)
    console.print(manifest["policy"]["words"], markup=False)
    if "keys" in manifest:
        console.print(thin_keys.words(manifest["keys"]), markup=False)
    if words:
        console.print(words, markup=False)
    if "draft" in manifest:
        cover = manifest["draft"]["coverage"]
        covered = "" if cover is None else f", which cover {cover:.1%} of the text they were chosen by"
        console.print(f"A draft that can say {manifest['draft']['head_tokens']:,} tokens{covered}; use it with --draft.", markup=False)
    if figures and all(isinstance(figures.get(name), int | float) for name in PARITY_FIGURES):  # those of a bundle are what its maker wrote
        console.print(
            f"Parity on {figures['tokens']} tokens: logits differ by {figures['mean_difference']:.2g} on average and {figures['max_difference']:.2g} "
            f"at most, KL {figures['mean_kl']:.2g} nats, likeliest token equal {figures['argmax_agreement']:.1%}, "
            f"perplexity {figures['perplexity_original']:.2f} -> {figures['perplexity_bundle']:.2f}.",
            markup=False,
        )  # fmt: skip
