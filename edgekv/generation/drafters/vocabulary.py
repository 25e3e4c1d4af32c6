"""Whether two models speak the same tokens: a draft's token ids must mean what the target's mean."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from edgekv.bundle import Bundle
from edgekv.errors import BundleError
from edgekv.generation.text import DRAFT_TOKENS

_PARTS = ("normalizer", "pre_tokenizer")


def first_difference(target: Tokenizer, draft: Tokenizer) -> str | None:
    """The first thing in which two tokenizers differ, in words; None when they cut and number every text alike.

    Compared by content: tokens by id, merges in order, normalisation and splitting. How prompts are wrapped or padded does not
    matter: the draft reads token ids.
    """
    ours, theirs = (_by_id(tokenizer) for tokenizer in (target, draft))
    for token in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(token), theirs.get(token)
        if a != b:
            return f"token {token} is {_shown(a)} in the target and {_shown(b)} in the draft"
    ours, theirs = (json.loads(tokenizer.to_str()) for tokenizer in (target, draft))
    if ours["model"].get("type") != theirs["model"].get("type"):
        return f"the target's tokenizer is of type {ours['model'].get('type')}, the draft's {theirs['model'].get('type')}"
    a, b = (_merges(tokenizer["model"]) for tokenizer in (ours, theirs))
    for rank, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return f"merge {rank} joins {x[0]!r} and {x[1]!r} in the target, {y[0]!r} and {y[1]!r} in the draft"
    if len(a) != len(b):
        return f"the target has {len(a)} merges, the draft {len(b)}"
    for part in _PARTS:
        if ours.get(part) != theirs.get(part):
            return f"their {part.replace('_', '-')}s differ"
    return None


def _by_id(tokenizer: Tokenizer) -> dict[int, str]:
    return {token: text for text, token in tokenizer.get_vocab(with_added_tokens=True).items()}


def _shown(token: str | None) -> str:
    return "unknown" if token is None else repr(token if len(token) <= 40 else token[:40] + "...")


def _merges(model: dict[str, Any]) -> list[tuple[str, ...]]:
    """Merges as pairs; files hold them as pairs or as texts with a space."""
    return [tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge) for merge in model.get("merges") or ()]


def read_token_ids(bundle: Bundle, vocab: int) -> np.ndarray | None:
    """The target's token of each row of a draft's logits, int64 [rows]; None when the bundle has all tokens in order.

    vocab  tokens of the target.  Raises BundleError when the file does not fit.
    """
    path = bundle.file(DRAFT_TOKENS)
    if path is None:
        return None
    rows = bundle.model["vocab"]
    try:
        ids = np.frombuffer(path.read_bytes(), "<i4").astype(np.int64)
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}); make the draft again with `edgekv draft`.") from None
    if ids.size != rows or np.unique(ids).size != rows or not ((ids >= 0) & (ids < vocab)).all():
        raise BundleError(f"{path} does not name {rows} different tokens of the target; the draft was made for another model.")
    return ids
