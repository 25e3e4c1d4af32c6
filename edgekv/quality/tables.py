"""The figures of `edgekv eval` as tables: rows of text, the first row the header, for a terminal and for the HTML page alike."""

from __future__ import annotations

from typing import Any

from edgekv.budget import format_bytes

Table = tuple[str, list[tuple[str, ...]]]


def heading(made: dict[str, Any]) -> str:
    """One or two sentences on what was measured."""
    text, parts = made["text"], []
    if text["tokens"]:
        parts.append(f"Perplexity of {text['tokens']} tokens of {text['name']}, read once from the start.")
    if any(b["tasks"] for b in made["bundles"]):
        needle = made["needle"]
        parts.append(f"Retrieval: facts hidden in prose, greedy answers, seed {needle['seed']}.")
    return " ".join(parts)


def all_tables(made: dict[str, Any]) -> list[Table]:
    found = []
    if made["text"]["tokens"]:
        found += [_overview(made), _by_position(made)]
    if any(b["tasks"] for b in made["bundles"]):
        found.append(_retrieval(made))
    return found


def _figure(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _overview(made: dict[str, Any]) -> Table:
    after = made["first_eviction"] and made["first_eviction"] + 1
    rows = [("bundle", "KV bytes", "perplexity", f"from token {after}" if after else "", f"against {made['reference']}", "95 % interval", "same top token")]
    for b in made["bundles"]:
        against = b["against_reference"]
        ratio = against["perplexity_ratio"]
        itself = b["name"] == made["reference"]
        rows.append((
            b["name"], format_bytes(b["kv_bytes"]), _figure(b["perplexity"]["perplexity"], ".3f"),
            _figure(b["perplexity"]["after_first_eviction"], ".3f") if after else "",
            "" if itself else _figure(ratio and ratio["ratio"] - 1, "+.2%"),
            "" if itself or ratio is None else f"{ratio['low'] - 1:+.2%} to {ratio['high'] - 1:+.2%}",
            "" if itself else _figure(against["top1_agreement"], ".2%"),
        ))  # fmt: skip
    return "Perplexity", _without_empty_columns(rows)


def _without_empty_columns(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    kept = [i for i in range(len(rows[0])) if any(row[i] for row in rows[1:])]
    return [tuple(row[i] for i in kept) for row in rows]


def _by_position(made: dict[str, Any]) -> Table:
    ranges = made["bundles"][0]["perplexity"]["ranges"]
    rows = [("bundle", *(f"{r['start']}–{r['stop'] - 1}" for r in ranges))]
    for b in made["bundles"]:
        rows.append((b["name"], *(_figure(r["perplexity"], ".2f") for r in b["perplexity"]["ranges"])))
    return "Perplexity by position in the text", rows


def _retrieval(made: dict[str, Any]) -> Table:
    bundles = made["bundles"]
    rows = [("task", "tokens", *(b["name"] for b in bundles))]
    for task in dict.fromkeys(task for b in bundles for task in b["tasks"]):
        for length in _lengths(made, task):
            cells = [_mean(b["tasks"].get(task, {"cells": []})["cells"], length) for b in bundles]
            rows.append((task, str(length), *(_figure(c, ".0%") for c in cells)))
    if len(rows) > 2:
        rows.append(("all", "", *(_figure(_overall(b), ".0%") for b in bundles)))
    return "Retrieval: share of the hidden facts that came back", rows


def _lengths(made: dict[str, Any], task: str) -> list[int]:
    return sorted({c["length"] for b in made["bundles"] for c in b["tasks"].get(task, {"cells": []})["cells"]})


def _mean(cells: list[dict[str, Any]], length: int) -> float | None:
    mine = [c for c in cells if c["length"] == length]
    trials = sum(c["trials"] for c in mine)
    return sum(c["score"] * c["trials"] for c in mine) / trials if trials else None


def _overall(bundle: dict[str, Any]) -> float | None:
    scores = [task["score"] for task in bundle["tasks"].values()]
    return sum(scores) / len(scores) if scores else None
