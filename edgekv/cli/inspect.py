"""`edgekv inspect`: what a bundle holds, which memory it will take and for what, and how well it matches its original."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from edgekv.cli import _common

if TYPE_CHECKING:
    from edgekv.bundle import Bundle


@click.command()
@_common.bundle_argument
@_common.verify_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(bundle: Path, verify: bool, as_json: bool) -> None:
    """Show what BUNDLE holds: model, cache policy in words, memory by owner, parity with the original model."""
    from edgekv import bundle as bundles

    opened = bundles.open_bundle(bundle, verify)
    memory, words = memory_by_owner(opened), policy_in_words(opened)
    if as_json:
        shown = {name: value for name, value in opened.manifest.items() if name not in ("layers", "inv_freq")}
        layers = [{"bytes": layer["bytes"], **layer["params"]} for layer in opened.layers]
        click.echo(json.dumps({**shown, "policy_in_words": words, "memory_by_owner": memory, "arena_by_plane": bytes_by_plane(opened), "layers": layers, "verified": verify}))
        return
    _show(opened, memory, words, verify)


def policy_in_words(bundle: Bundle) -> str:
    """The cache policy as sentences, made from the manifest's figures, not from a stored text."""
    from edgekv import layout, policy
    from edgekv.bundle import cache_policy

    rules = cache_policy(bundle.manifest)
    held = max(layout.held_tokens(layer["params"]) for layer in bundle.layers)
    return policy.describe(rules.resolve(held, bundle.boundary), held, bundle.model["context"])


def memory_by_owner(bundle: Bundle) -> dict[str, int]:
    """Bytes that a run will hold, by owner. Those that begin with kv are the arena, exact; weights are the files' size."""
    from edgekv import layout

    arena: Counter[str] = Counter()
    for layer in bundle.layers:
        arena.update(layout.bytes_by_owner(layer["params"]))
    owners = {f"kv {owner}": arena[owner] for owner in layout.OWNERS if arena[owner]}
    return {**owners, "weights": bundle.weight_bytes, "logits": 4 * bundle.model["vocab"]}


def bytes_by_plane(bundle: Bundle) -> dict[str, int]:
    """Bytes of the arena by plane of the state layout, all layers, each plane with its padding; headers hold the layers' own padding."""
    from edgekv import layout

    planes: Counter[str] = Counter()
    for layer in bundle.layers:
        planes.update(layout.itemised_bytes(layer["params"]))
    planes["header"] += bundle.arena_bytes - sum(planes.values())
    return {name: size for name, size in planes.items() if size}


def _show(bundle: Bundle, memory: dict[str, int], words: str, verify: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    from edgekv import thin_keys
    from edgekv.generation.report import mebibytes

    def table(title: str, rows: list[tuple[Any, ...]]) -> None:
        shown = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, pad_edge=False)
        shown.add_column(style="dim")
        shown.add_column(overflow="fold")
        for row in rows:
            shown.add_row(*map(str, row))
        console.print(shown, "")

    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 110)
    manifest, model = bundle.manifest, bundle.model
    weights = manifest.get("weights", {})
    table(
        f"{bundle.folder}",
        [
            ("model", f"{model['name']} ({model.get('architecture', '?')})"),
            ("shape", f"{model['layers']} layers, hidden {model['hidden']}, vocabulary {model['vocab']}, context {model['context']}"),
            ("weights", weights.get("format", "?")),
            ("made by", manifest.get("created_by", "?")),
            ("files", f"{len(manifest['files'])}, " + ("all hashes right" if verify else "hashes not checked")),
        ],
    )
    table("Cache policy", [("", words), ("budget", manifest["policy"].get("budget", "?"))])
    if "keys" in manifest:
        table("Keys", [("", thin_keys.words(manifest["keys"]))])
    shapes = Counter(_shape(layer["params"]) for layer in bundle.layers)
    table("Layers", [(f"{count} x", shape) for shape, count in shapes.items()])
    total = sum(memory.values())
    rows = [(owner, f"{mebibytes(count):>12}  {count / total:6.1%}") for owner, count in memory.items() if count]
    arena = sum(count for owner, count in memory.items() if owner.startswith("kv "))
    table("Memory by owner", [*rows, ("all", f"{mebibytes(total):>12}"), ("of it KV arena", f"{mebibytes(arena):>12}  {arena} bytes")])
    if bundle.compressed:
        table("Arena by plane of the state", [(name, f"{count:>12} bytes") for name, count in bytes_by_plane(bundle).items()])
    parity = manifest.get("parity")
    if parity:
        table("Parity with the original model", [(name.replace("_", " "), _figure(value)) for name, value in parity.items()])
    else:
        console.print("Parity with the original model was not checked when this bundle was made.")


def _shape(params: dict[str, Any]) -> str:
    from edgekv import layout

    params = layout.complete(params)

    def name(names: dict[str, int], value: int) -> str:
        return next((text for text, number in names.items() if number == value), str(value))

    of_head = f" of {params['head_dim']}" if params.get("head_dim") else f" ({params['latent']} latent numbers per token)" if params.get("latent") else ""
    text = (
        f"{params['q_heads']} query / {params['kv_heads']} kv heads, keys {params['key_dim']}{of_head}, values {params['value_dim']}, "
        f"{name(layout.KEEPS, params.get('keep', 0))}: body {params['body_slots']} + tail {params['tail_slots']} tokens, "
        f"{name(layout.ELEMENTS, params.get('element', 1))}"
    )
    if layout.is_selfindex(params):
        text += f" in sinks and tail, else compressed: {layout.token_bytes(params)} bytes per token and kv head, "
        text += f"{layout.latent_bytes(params)} per token for latent keys" if params["latent"] else f"{params['key_bits'] + 1}-bit keys"
        text += f", {params['value_bits']}-bit values"
    return text + (f", sliding window {params['sliding_window']}" if params.get("sliding_window") else "")


def _figure(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else json.dumps(value) if isinstance(value, dict | list) else str(value)
