"""`edgekv finetune`: trains the query and key side of a model with keys of few numbers; needs the extra `edgekv[export]`."""

from __future__ import annotations

from pathlib import Path

import click

from edgekv.cli._common import Interrupts
from edgekv.cli._stages import stages


@click.command("finetune", short_help="Train a model to do with thinner keys.")
@click.argument("model")
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="Folder of the new model.")
@click.option("--key-rank", "rank", required=True, help="Numbers per key (latent: per token): 32, a share of the key bytes (25%), or auto[:SHARE], one budget spread over the layers.")
@click.option("--key-form", "form", type=click.Choice(["projected", "pairs", "latent"]),
              help="What keys get thinner by, see edgekv export; without a rotation, projected maps are absorbed into the weights. Default: pairs "
              "where the model and --key-rank allow it, else projected.")  # fmt: skip
@click.option("--text", "texts", multiple=True, required=True, type=click.Path(path_type=Path), help="UTF-8 text to train on; several times for several.")
@click.option("--steps", type=click.IntRange(1), default=200, show_default=True, help="Training steps.")
@click.option("--batch", type=click.IntRange(1), default=8, show_default=True, help="Sequences per step, over all processes.")
@click.option("--length", type=click.IntRange(8), default=512, show_default=True, help="Tokens of a sequence.")
@click.option("--rate", type=click.FloatRange(0, 1, min_open=True), default=3e-3, show_default=True,
              help="Size of a step relative to the numbers that it changes.")  # fmt: skip
@click.option("--loss", type=click.Choice(["distill", "text", "both"]), default="distill", show_default=True,
              help="Learn the full model's predictions, the text itself, or both.")  # fmt: skip
@click.option("--calibrate-tokens", type=click.IntRange(2), default=8192, show_default=True, help="Tokens to find the first maps with.")
@click.option("--calibrate-steps", type=click.IntRange(0), default=96, show_default=True, help="Refinement steps of them per layer; pairs have none.")
@click.option("--transfer-steps", type=click.IntRange(0), default=200, show_default=True,
              help="Steps per layer in which it learns the full model's attention, before the training.")  # fmt: skip
@click.option("--transfer-length", type=click.IntRange(8), default=512, show_default=True, help="Tokens of a piece that it learns that on.")
@click.option("--control/--no-control", default=True, show_default=True, help="Train whole keys on the same data too and give their perplexity (text, both).")
@click.option("--precision", type=click.Choice(["fp32", "bf16"]), default="fp32", show_default=True,
              help="Of matrix products while training; bf16 is faster where the processor has it (GPUs take TF32).")
@click.option("--weights", type=click.Choice(["fp32", "int4"]), default="fp32", show_default=True,
              help="What the weights that learn are read as meanwhile. After int4, an export to 4 bits loses nothing of what was learned.")  # fmt: skip
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--save-every", type=click.IntRange(1), help="Steps between checkpoints; default once a minute.")
@click.option("--fresh", is_flag=True, help="Start over instead of going on with an unfinished training.")
@click.option("--force", is_flag=True, help="Replace a folder that is there already.")
@click.pass_context
def command(ctx: click.Context, model: str, target: Path, texts: tuple[Path, ...], **options) -> None:
    """Trains MODEL (a Hugging Face directory, a hub id or a .gguf file) so that its keys have --key-rank numbers. Only queries and keys
    learn, of latent keys what makes them and what they are read with; the rank holds by construction. Ctrl-C keeps the work, and the same
    command goes on with it.

    The result is a model directory for `edgekv export`. On several GPUs or processes: accelerate launch -m edgekv finetune MODEL ...
    """
    from rich.console import Console

    from edgekv.errors import UserError
    from edgekv.export.thin import finetune

    given = ctx.get_parameter_source("calibrate_steps") is not click.core.ParameterSource.DEFAULT
    if options["form"] == "pairs" and options["calibrate_steps"] and given:
        raise UserError("--calibrate-steps refines maps, and --key-form pairs has none; leave it out.")

    console = Console(stderr=True, highlight=False)
    with Interrupts() as interrupted, stages(console) as report:
        figures = finetune.make_model(model, target, finetune.Options(texts=texts, **options), report, lambda step: interrupted())
    if figures is None:
        console.print(f"Stopped. The same command goes on with the work in {target}.training.", markup=False)
        ctx.exit(130)
    if not figures:  # another process than the first
        return
    full = figures["perplexity_full"]
    shown = [f"{name} {figures[key]:.2f} ({figures[key] / full - 1:+.1%})" for name, key in
             (("before", "perplexity_thin_before"), ("after attention transfer", "perplexity_thin_transferred"), ("after", "perplexity_thin_after"), ("same-data control with whole keys", "perplexity_control"))
             if figures[key] is not None]  # fmt: skip
    console.print(f"{target}: perplexity on {figures['validation_tokens']} held-out tokens: full keys {full:.2f}, thin " + ", ".join(shown), markup=False)
    if figures["loss"] == "distill":
        console.print("The control of a distillation is the full model itself: it has nothing to learn from its own predictions.", markup=False)
    elif options["control"] and figures["perplexity_control"] is None:
        console.print("There is no control: only the maps learn, so whole keys have nothing to learn from the text.")
    console.print(f"Use it with: edgekv export {target} -o BUNDLE", markup=False)
