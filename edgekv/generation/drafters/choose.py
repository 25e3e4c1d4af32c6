"""From what a user types behind --draft to a drafter: the list of drafters, and what is checked before anything is loaded."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from edgekv import engine
from edgekv.bundle import Bundle, open_bundle
from edgekv.engine import Engine
from edgekv.errors import UserError
from edgekv.generation.drafters import Drafter
from edgekv.generation.drafters.bundle import BundleDrafter, first_look
from edgekv.generation.drafters.ngram import NgramDrafter
from edgekv.generation.drafters.self_window import DEFAULT_WINDOW, SelfWindowDrafter
from edgekv.generation.drafters.vocabulary import first_difference, read_token_ids
from edgekv.generation.text import load_tokenizer

_MOST_WINDOW = 1 << 20


@dataclass(frozen=True)
class Choice:
    """A drafter that can be made: its name, its bundle if it has one, and how to make it for the target's engine."""

    name: str
    bundle: Bundle | None
    make: Callable[[Engine], Drafter]


def choose(spec: str, target: Bundle, tokenizer: Tokenizer, verify: bool = True) -> Choice:
    """`ngram`, `self`, `self:WINDOW`, or the path of a bundle with the target's tokenizer.

    Raises UserError (BundleError) when there is no such drafter or it does not fit the target.
    """
    name, given, value = spec.partition(":")
    if spec == "ngram":
        return Choice("ngram", None, lambda loaded: NgramDrafter())
    if name == "self":
        window = _window(value) if given else DEFAULT_WINDOW
        return Choice("self", None, lambda loaded: _self_window(loaded, window))
    if not Path(spec).exists():
        raise UserError(f"--draft takes ngram, self, self:WINDOW or the folder of a bundle; there is nothing at {spec}.")
    draft = open_bundle(spec, verify)
    difference = first_difference(tokenizer, load_tokenizer(draft, draft=True))
    if difference:
        raise UserError(f"{spec} cannot draft for {target.folder}: {difference}. Use a draft with the same tokenizer, or --draft ngram.")
    token_ids = read_token_ids(draft, target.model["vocab"])
    return Choice(
        str(spec),
        draft,
        lambda loaded: BundleDrafter(
            engine.load(draft, loaded.threads), loaded.vocab, token_ids, first_look(target.weight_bytes, draft.weight_bytes)
        ),
    )


def _self_window(loaded: Engine, window: int) -> Drafter:
    if not hasattr(loaded, "look"):
        raise UserError("--draft self needs an engine that can look at a part of its cache; this one cannot. Use --draft ngram or a bundle.")
    return SelfWindowDrafter(loaded, window)


def _window(text: str) -> int:
    if not re.fullmatch("[0-9]{2,7}", text) or not 16 <= int(text) <= _MOST_WINDOW:
        raise UserError(f"--draft self:WINDOW takes a number of tokens from 16 to {_MOST_WINDOW:,}, not {text[:40]!r}.")
    return int(text)


def check_caches(target: Bundle, draft: Bundle | None, limit: int | None) -> None:
    """Raises UserError when the caches of both bundles together exceed `limit` bytes."""
    both = target.arena_bytes + (draft.arena_bytes if draft else 0)
    if limit is not None and both > limit:
        takes, otherwise = f"The KV cache takes {both:,} bytes", ""
        if draft:
            takes = f"The KV caches take {both:,} bytes ({target.arena_bytes:,} of the target, {draft.arena_bytes:,} of the draft)"
            otherwise = ", or draft with --draft ngram, which has no cache" if target.arena_bytes <= limit else ""
        raise UserError(f"{takes}, more than the --kv-limit of {limit:,}; export with a smaller --kv-budget{otherwise}.")
