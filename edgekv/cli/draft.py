"""`edgekv draft`: makes a draft model for speculative decoding from the target itself; needs the extra `edgekv[export]`."""

from __future__ import annotations

import time
from pathlib import Path

import click

from edgekv.cli._stages import stages
from edgekv.errors import UserError


@click.command("draft", short_help="Make a small draft model for a target, for --draft.")
@click.argument("model")
@click.option("-o", "--output", "target", required=True, type=click.Path(path_type=Path), help="Folder of the draft's bundle.")
@click.option("--layers", type=click.IntRange(1), help="Layers of the target to keep; default a fifth of them.")
@click.option("--head-tokens", type=click.IntRange(64), help="Tokens the draft can propose; default the 8192 most frequent.")
@click.option("--tokens", type=click.IntRange(1), default=400_000, show_default=True, help="Tokens of the target's outputs to learn from.")
@click.option("--passes", type=click.FloatRange(0.01, 1000), default=3.0, show_default=True, help="Times to go through them.")
@click.option("--text", "texts", multiple=True, type=click.Path(path_type=Path), help="UTF-8 file whose pieces the target continues.")
@click.option("--kv-budget", help="Size of the draft's cache: bytes, tokens or percent; default 1024 tokens or the context.")
@click.option("--weights", type=click.Choice(["fp32", "fp16", "int8", "int4"]), default="int8", show_default=True)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of everything that is drawn.")
@click.option("--threads", type=click.IntRange(1, 1024), help="Threads to train with; default: all cores.")
@click.option("--fresh", is_flag=True, help="Start over instead of going on with an unfinished training.")
@click.option("--force", is_flag=True, help="Replace a bundle that is there already.")
def command(model: str, target: Path, kv_budget: str | None, weights: str, force: bool, **training) -> None:
    """Makes a draft for MODEL (a Hugging Face directory, a hub id or a .gguf file): fewer layers, fewer output tokens, trained
    on what MODEL itself writes. Ctrl-C keeps the work; the same command goes on with it."""
    from rich.console import Console

    try:
        from edgekv.export import draft, exporter
    except ImportError as error:
        raise UserError(f"`edgekv draft` needs more packages ({error.name} is missing): pip install 'edgekv[export]'.") from None
    from edgekv.policy import CachePolicy, parse_budget

    console, start = Console(stderr=True, highlight=False), time.monotonic()
    # The draft reads text without end, however long the target's context is: its cache keeps the newest tokens.
    policy = CachePolicy(keep="window", positions="cache")
    wanted = exporter.Options(policy=policy, budget=parse_budget(kv_budget or "1024tok"), weights=weights, force=force)
    options = draft.Options(export=wanted, **training)
    try:
        with stages(console) as report:
            made = draft.make(model, target, options, report)
    except KeyboardInterrupt:
        raise UserError(f"Stopped. The same command goes on with the work in {target}.training.") from None
    agreement = made.agreement
    console.print(
        f"{target}: {len(made.layers)} layers {made.layers}, {made.head_tokens} tokens (they cover {made.coverage:.1%} of what the target says)\n"
        f"On {agreement.tokens} tokens of the target that it never saw, the draft is right {agreement.greedy:.1%} of the time in greedy "
        f"decoding and {agreement.sampled:.1%} at temperature 1; it took {(time.monotonic() - start) / 60:.0f} minutes.\n"
        f"Use it with: edgekv run TARGET --draft {target}"
    )
