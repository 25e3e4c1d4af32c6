"""From a model and a text to the maps of every layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from edgekv.errors import UserError
from edgekv.export import rope
from edgekv.export.load import Source
from edgekv.export.quiet import quiet
from edgekv.export.thin import attention, calibrate, latent, pairs, ranks, stream
from edgekv.geometry import LayerGeometry
from edgekv.quality.text import shipped

CHUNK = 512  # tokens of a piece of the calibration text, at most the model's context
TOKENS = 8192
STEPS = 96  # of the refinement of each layer
LEAST_CHUNKS = 2  # one to calibrate on, one to measure on

Report = Callable[[str, int | None, int | None], None]


@dataclass(frozen=True)
class KeyOptions:
    """What was asked for: the ranks (None: the model brings its maps), the form (projected, absorbed, pairs or latent; None: absorbed
    into the weights of a model without rotary positions, else projected), the UTF-8 text to calibrate on (None: the one that comes with edgekv), how many
    of its tokens, and steps of the refinement per layer (0: closed form only)."""

    rank: ranks.KeyRank | None
    form: str | None = None
    text: Path | None = None
    tokens: int = TOKENS
    steps: int = STEPS


def load_model(source: Source, context: int) -> Any:
    """The model in single precision, with the attention that takes maps."""
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(
            source.folder, config=source.config, dtype=torch.float32, attn_implementation=attention.NAME, trust_remote_code=False
        )
    rope.freeze(model, context)
    return model.eval()


def chunks_of(source: Source, text: str, vocab: int, context: int, tokens: int) -> torch.Tensor:
    """int64 [N, T] of the text; UserError when it is too short."""
    length = min(CHUNK, context)
    ids = [i for i in Tokenizer.from_str(source.tokenizer).encode(text, add_special_tokens=False).ids if i < vocab]
    count = min(len(ids), max(tokens, LEAST_CHUNKS * length)) // length
    if count < LEAST_CHUNKS:
        raise UserError(
            f"The text to calibrate keys on has {len(ids)} tokens and at least {LEAST_CHUNKS * length} are needed; a few thousand are better."
        )
    return torch.tensor(ids[: count * length]).view(count, length)


def starts_of(chunks: torch.Tensor, context: int) -> list[int]:
    """Positions that the chunks are taken to begin at: spread evenly over the context, in an order that mixes them."""
    count, length = chunks.shape
    places = np.linspace(0, max(context - length, 0), count).astype(int)
    return [int(place) for place in places[np.random.default_rng(0).permutation(count)]]


def _projected(
    model: Any, chunks: torch.Tensor, geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank, steps: int, context: int, report: Report
) -> calibrate.Calibrated:
    """Maps of every layer. One pass over the layers, and one more before it when their spectra decide the ranks."""
    starts, count = starts_of(chunks, context), len(geometry)
    heads = [(g.kv_heads, g.key_dim) for g in geometry]

    def texts():
        return stream.turned(stream.layers(model, chunks), geometry, starts)

    def note(stage: str) -> Callable[[int], None]:
        return lambda layer: report(stage, layer + 1, count)

    if wanted.spread:
        spectra, full = calibrate.closed_form(texts(), note("looking at the keys"))
        chosen = ranks.choose(wanted, heads, spectra)
        return calibrate.fit(texts(), lambda text: calibrate.cut(full[text.layer], chosen[text.layer]), steps, note("fitting thin keys"))
    chosen = ranks.choose(wanted, heads)
    return calibrate.fit(texts(), lambda text: calibrate.cut(calibrate.closed_form_of(text)[1], chosen[text.layer]), steps, note("fitting thin keys"))


def _latent(
    model: Any, chunks: torch.Tensor, geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank, steps: int, report: Report
) -> calibrate.Calibrated:
    """Latent maps of every layer. Where the text lies in the context does not matter to them: they are made before the rotation."""
    latent.check(geometry, any(getattr(module, "attention_scaling", 1.0) != 1.0 for module in model.modules()))
    heads = [(1, g.kv_heads * g.key_dim) for g in geometry]

    def note(stage: str) -> Callable[[int], None]:
        return lambda layer: report(stage, layer + 1, len(geometry))

    if wanted.spread:
        curves = latent.curves(stream.layers(model, chunks), geometry, note("looking at the keys"))
        chosen = ranks.by_curves(wanted.share, heads, curves)
    else:
        chosen = ranks.choose(wanted, heads)
    return calibrate.fit(
        stream.layers(model, chunks), lambda text: latent.cut(latent.closed_form(text, geometry[text.layer]), chosen[text.layer]), steps, note("fitting thin keys")
    )


def _pairs(
    model: Any, chunks: torch.Tensor, geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank, report: Report
) -> calibrate.Calibrated:
    """Rotary pairs of every layer. Where the text lies in the context does not matter to them: scores depend on distances alone."""
    pairs.check(geometry, wanted)
    heads, count = [(g.kv_heads, g.key_dim) for g in geometry], len(geometry)
    spectra = []
    if wanted.spread:
        for text in stream.layers(model, chunks):
            spectra.append(pairs.spectrum(pairs.variances(text, geometry[text.layer]), geometry[text.layer]))
            report("looking at the keys", text.layer + 1, count)
    chosen = ranks.choose(wanted, heads, spectra, pairs.steps(wanted, geometry) if wanted.share else None)

    def start(text: stream.LayerText) -> pairs.PairMaps:
        return pairs.choose(pairs.variances(text, geometry[text.layer]), geometry[text.layer], chosen[text.layer])

    return calibrate.fit(stream.layers(model, chunks), start, 0, lambda layer: report("fitting thin keys", layer + 1, count))


def from_chunks(
    model: Any, chunks: torch.Tensor, geometry: Sequence[LayerGeometry], wanted: ranks.KeyRank, form: str, steps: int, context: int, report: Report
) -> calibrate.Calibrated:
    """Maps of every layer of the form that was asked for. chunks int64 [N, T]."""
    if form == "latent":
        return _latent(model, chunks, geometry, wanted, steps, report)
    if form == "pairs":
        return _pairs(model, chunks, geometry, wanted, report)
    return _projected(model, chunks, geometry, wanted, steps, context, report)


def from_text(
    source: Source, options: KeyOptions, form: str, geometry: Sequence[LayerGeometry], context: int, report: Report
) -> calibrate.Calibrated:
    """Calibrated maps of a form for a model that was found."""
    text = read_text(options.text)
    report("loading the model to calibrate its keys", None, None)
    model = load_model(source, context)
    chunks = chunks_of(source, text, int(model.get_output_embeddings().weight.shape[0]), context, options.tokens)
    return from_chunks(model, chunks, geometry, options.rank, form, options.steps, context, report)


def read_text(path: Path | None) -> str:
    if path is None:
        return shipped().content
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"The text {path} cannot be read: {error}.") from None
