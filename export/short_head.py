"""A model whose output layer has rows for frequent tokens only: a cheaper draft for a target with the same tokenizer.

With vocabularies of 150,000 tokens the output layer is a quarter of a small model, and most of its rows are hardly ever the answer
(FR-Spec, arXiv 2502.14856).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from edgekv.errors import UserError
from edgekv.export import checkpoint
from edgekv.export.load import Source


@dataclass(frozen=True)
class HeadOptions:
    """Rows to keep, and UTF-8 files in which tokens are counted; without any, the tokens that the tokenizer learnt first."""

    tokens: int
    texts: tuple[Path, ...] = ()


def shorten(source: Source, options: HeadOptions) -> Source:
    """The source with a short output layer. Raises UserError when there are not so many tokens or a text cannot be read."""
    tokenizer = Tokenizer.from_str(source.tokenizer)
    known = source.config.get_text_config().vocab_size  # tokenizers may have more or fewer tokens, with gaps between their numbers
    if not len(source.eos_token_ids) < options.tokens < known:
        raise UserError(f"--head-tokens must be less than the {known} tokens of {source.name}, and more than the {len(source.eos_token_ids)} that end a text.")
    counts = np.zeros(known, np.int64)
    for path in options.texts:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{path} cannot be read as UTF-8 text ({error}); give another --head-text.") from None
        ids = np.asarray(tokenizer.encode(text, add_special_tokens=False).ids, np.int64)
        counts += np.bincount(ids[ids < known], minlength=known)
    token_ids = _frequent(counts, source.eos_token_ids, options.tokens)
    coverage = float(counts[token_ids].sum() / counts.sum()) if counts.any() else None
    return replace(source, token_ids=token_ids, cut_head=True, coverage=coverage)


def _frequent(counts: np.ndarray, ends: Sequence[int], wanted: int) -> np.ndarray:
    """int64 [wanted], ascending: the tokens that end a text, and of the others those of the highest counts, of these the lowest numbers.

    Byte-pair tokenizers number their tokens in the order in which they learnt them, the most frequent ones first.
    """
    rank = counts.copy()
    rank[[token for token in ends if token < len(rank)]] = np.iinfo(rank.dtype).max
    return np.sort(np.argsort(-rank, kind="stable")[:wanted])


def readers(source: Source, model: PreTrainedModel) -> dict[str, checkpoint.Reader]:
    """What reads the weights of the hollow model of a source whose output layer was shortened, by parameter name."""
    whole = checkpoint.ghost(source.config)
    read = checkpoint.match(whole, source.checkpoint) or checkpoint.load_whole(source.folder, source.config, whole)
    head, short = whole.get_output_embeddings(), model.get_output_embeddings()
    for part, parameter in short.named_parameters():
        all_rows = read[_name(whole, getattr(head, part))]
        read[_name(model, parameter)] = lambda all_rows=all_rows: all_rows()[source.token_ids]
    return read


def _name(model: PreTrainedModel, wanted: object) -> str:
    return next(name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is wanted)
