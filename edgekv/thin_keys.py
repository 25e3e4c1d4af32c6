"""What a manifest says of thin keys (section `keys`, written by export/thin/into_graph.py), in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from edgekv import layout

FORMS = ("projected", "absorbed", "pairs", "latent")


def sensible(keys: Any, layers: int) -> bool:
    """Whether an untrusted section `keys` has what words() reads, for so many layers."""

    def numbers(value: Any, kinds: type | tuple) -> bool:
        return isinstance(value, list) and len(value) == layers and all(isinstance(x, kinds) and not isinstance(x, bool) and abs(x) < 1e30 for x in value)

    return (
        isinstance(keys, dict) and keys.get("form") in FORMS and numbers(keys.get("ranks"), int)
        and all(isinstance(keys.get(name), int) and 0 < keys[name] < 1 << 40 for name in ("token_bytes", "token_bytes_whole"))
        and all(keys.get(name) is None or numbers(keys[name], int | float) for name in ("attention_kl", "score_error"))
        and (keys.get("attention_kl") is None) == (keys.get("score_error") is None)
    )  # fmt: skip


def fits(keys: dict[str, Any], layers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a sensible section `keys` says of every layer what its complete parameters do."""

    def stored(p: Mapping[str, Any]) -> tuple[str, int]:
        if p["latent"]:
            return "latent", p["latent"]
        return "projected" if p["head_dim"] else "pairs" if p["fused_rotary"] == layout.BY_HEAD else "absorbed", p["key_dim"]

    return all(stored(p) == (keys["form"], rank) for p, rank in zip(layers, keys["ranks"], strict=True))


def words(keys: dict[str, Any]) -> str:
    """One or two sentences for people."""
    ranks = keys["ranks"]
    spread = f"{ranks[0]}" if len(set(ranks)) == 1 else f"{min(ranks)} to {max(ranks)}"
    of = "for the keys of all kv heads" if keys["form"] == "latent" else "per key"
    text = (
        f"Thin keys ({keys['form']}): {spread} numbers {of}, {keys['token_bytes']} bytes of keys per token and not {keys['token_bytes_whole']} "
        f"({keys['token_bytes'] / keys['token_bytes_whole'] - 1:+.1%})."
    )
    if keys.get("attention_kl"):
        kl, error = keys["attention_kl"], keys["score_error"]
        worst = max(range(len(kl)), key=kl.__getitem__)
        text += (
            f" On held-out text attention changes by {sum(kl) / len(kl):.3f} nats on average (layer {worst}: {kl[worst]:.3f}) and scores by "
            f"{sum(error) / len(error):.2f}."
        )
    return text
