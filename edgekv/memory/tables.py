"""The terminal tables of `edgekv profile`."""

from __future__ import annotations

from typing import Any

from edgekv.budget import format_bytes


def show(made: dict[str, Any]) -> None:
    """Prints a report made by `edgekv profile`: a comparison of the devices, then each device in full when there is only one."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, width=None if Console().is_terminal else 120)
    model = made["model"]
    console.print(
        f"{model['name']} ({model['architecture']}): {model['parameters'] / 1e6:.0f} million parameters, {model['layers']} layers, "
        f"{model['kv_bytes_per_token_fp16']} KV bytes per token in fp16, context {model['context']}; planned for "
        f"{model['asked_context']} tokens, {model['weights']} weights. All figures are modelled."
    )
    for note in model["notes"]:
        console.print(note)
    console.print()
    if len(made["devices"]) > 1:
        _compare(console, made["devices"])
    for device in made["devices"]:
        if "fit" in device:
            console.print(f"Best for these constraints on {device['device']['name']}: {device['cache']['words']}")
            console.print(f"  {device['fit']['command']}\n", soft_wrap=True)
    if len(made["devices"]) == 1:
        _one(console, made["devices"][0])


def _table(title: str, *columns: str):
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _bytes(count: float | None) -> str:
    return "unknown" if count is None else format_bytes(round(count))


def _compare(console, devices: list[dict]) -> None:
    rows = {
        "memory needed": lambda d: _bytes(d["memory"]["needed"]),
        "usable": lambda d: _bytes(d["memory"]["usable"]),
        "fits": lambda d: {True: "yes", False: "no", None: "memory unknown: --memory"}[d["memory"]["fits"]],
        "peak DRAM bandwidth": lambda d: f"{d['device']['peak_gbps']:.4g} GB/s",
        "on-chip cache": lambda d: _bytes(d["device"]["last_level_bytes"]),
        "KV bytes from on chip": lambda d: f"{d['speed'][-1]['kv_hit_rate']:.1%}",
    }
    for keep in [row["keep"] for row in devices[0]["longest_context"]]:
        rows[f"longest context, {keep}"] = lambda d, keep=keep: next((str(c["context"]) for c in d["longest_context"] if c["keep"] == keep), "?")
    depths = [row["depth"] for row in devices[0]["speed"]]
    for depth in depths:
        rows[f"tokens/s at {depth}"] = lambda d, depth=depth: next((f"{r['tokens_per_second']:.1f}" for r in d["speed"] if r["depth"] == depth), "")
    rows["prefill tokens/s"] = lambda d: f"{d['prefill']['tokens_per_second']:.0f}" if d["prefill"]["seconds"] else "unknown"
    rows["limit at the end"] = lambda d: d["speed"][-1]["limit"]
    table = _table("Devices side by side", "", *(d["device"]["name"] for d in devices))
    for name, value in rows.items():
        table.add_row(name, *map(value, devices))
    console.print(table, "")


def _one(console, device: dict) -> None:
    facts, memory = device["device"], device["memory"]
    console.print(f"{facts['title']}: {facts['peak_gbps']:.4g} GB/s")
    console.print(device["cache"]["words"], "")
    table = _table("Memory by owner", "owner", "size", "how known")
    for line in memory["lines"]:
        table.add_row(line["owner"], _bytes(line["bytes"]), line["basis"])
    table.add_row("all", _bytes(memory["needed"]), "")
    table.add_row("the system's own", _bytes(memory["system"]["bytes"]), memory["system"]["basis"])
    table.add_row("usable of the device", _bytes(memory["usable"]), "it fits" if memory["fits"] else "memory unknown: pass --memory")
    console.print(table)
    largest = memory["largest_allocation"]
    console.print(f"Largest single allocation: {_bytes(largest['bytes'])} ({largest['owner']}).")
    if memory["engine_build"]:
        console.print(f"Building an engine can need about {_bytes(memory['engine_build'])}: four times the weights have been reported.")
    console.print()
    if device["longest_context"]:
        table = _table("Longest context in the memory that is left", "keep", "context", "tokens kept", "KV arena")
        for row in device["longest_context"]:
            table.add_row(row["keep"], str(row["context"]), str(row["kept_tokens"]), _bytes(row["arena_bytes"]))
        console.print(table, "")
    table = _table("Decode", "cached tokens", "tokens/s", "ms", "weights read", "KV read", "KV hits", "on chip", "DRAM", "limit")
    for row in device["speed"]:
        table.add_row(
            str(row["depth"]), f"{row['tokens_per_second']:.1f}", f"{row['milliseconds']:.2f}", _bytes(row["weight_bytes"]), _bytes(row["kv_read_bytes"]),
            f"{row['kv_hit_rate']:.1%}", _bytes(row["on_chip_bytes"]), _bytes(row["dram_bytes"]), row["limit"],
        )  # fmt: skip
    console.print(table)
    console.print(f"Prediction: {device['basis']}.")
    reading = device["prefill"]
    if reading["seconds"]:
        console.print(f"Prefill of {reading['tokens']} tokens: {reading['seconds']:.2f} s, {reading['tokens_per_second']:.0f} tokens/s ({reading['basis']}).")
    else:
        console.print(f"Prefill: unknown, {reading['basis']}.")
    sentence = device["residency"]
    console.print(sentence[:1].upper() + sentence[1:])
