"""What thinner keys cost a Llama-shaped model in perplexity, by method and share of the key bytes, without training: a table.

    python tools/thin_key_table.py MODEL --calibrate emma.txt --evaluate persuasion.txt [--shares 75 50 37.5 25 12.5] [--methods ...]

Methods:
    latent            the latent of all kv heads of a layer together, before the rotation, in closed form
    latent-refined    that, and a short descent on the attention's KL; what `edgekv export --key-form latent` does
    latent-auto       the same with ranks spread over the layers by measured KL
    pairs             every kv head keeps the rotary pairs of largest variance; what `edgekv export --key-form pairs` does
    kq-svd            a map per kv head after the rotation, from all keys alike, calibrated at the first positions only
    weighted          the same from keys counted by the attention they receive, without the first token, at positions over the whole context
    refined           that, and a short descent on the attention's KL; what `edgekv export --key-rank` does
    refined-auto      the same with ranks spread over the layers

Each line: change of perplexity against full keys on the same tokens with its 95 % interval (from blocks of 64 tokens), and how often the
likeliest token is the same. --far N adds the same for texts that begin at position N.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path

import torch

from edgekv.export import load
from edgekv.export.thin import calibrate, make, ranks, stream
from edgekv.export.thin.attention import Session, using
from edgekv.export.thin.maps import KeyMaps
from edgekv.geometry import LayerGeometry

METHODS = ("latent", "latent-refined", "latent-auto", "pairs", "kq-svd", "weighted", "refined", "refined-auto")
BLOCK = 64


def model_geometry(model) -> list[LayerGeometry]:
    c, inv_freq = model.config, model.model.rotary_emb.inv_freq
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    one = LayerGeometry(c.num_attention_heads, c.num_key_value_heads, head, head, head**-0.5, rotary_dim=head, inv_freq=tuple(inv_freq.tolist()))
    return [one] * c.num_hidden_layers


@torch.no_grad()
def losses(model, chunks: torch.Tensor, maps: dict, start: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of every token but the first of each chunk, nats, and the likeliest tokens; float32 and int64 [N, T-1]."""
    loss, best = [], []
    with using(Session(maps)):
        for chunk in chunks:
            places = start + torch.arange(len(chunk))
            logits = model(input_ids=chunk[None], position_ids=places[None], use_cache=False).logits[0, :-1]
            loss.append(torch.nn.functional.cross_entropy(logits, chunk[1:], reduction="none"))
            best.append(logits.argmax(-1))
    return torch.stack(loss), torch.stack(best)


def compare(full, thin) -> str:
    difference = (thin[0] - full[0]).flatten()
    blocks = difference[: len(difference) // BLOCK * BLOCK].view(-1, BLOCK).mean(1)
    mean, half = float(difference.mean()), 1.96 * float(blocks.std()) / math.sqrt(len(blocks))
    low, high = (100 * math.expm1(mean + x) for x in (-half, half))
    return f"{100 * math.expm1(mean):+7.2f} %  ({low:+.2f} to {high:+.2f})  same top token {(thin[1] == full[1]).float().mean():.1%}"


def read(given: argparse.Namespace) -> tuple:
    """The model, its geometry and context, the calibration text in chunks, and the evaluated one in pieces int64 [n, length]."""
    source = load.find(given.model)
    context = source.config.max_position_embeddings
    model = make.load_model(source, context)
    vocab = model.get_output_embeddings().weight.shape[0]
    text = make.chunks_of(source, given.calibrate.read_text(encoding="utf-8"), vocab, context, given.tokens)
    ids = [i for i in load_ids(source, given.evaluate) if i < vocab][: given.chunks * given.length]
    return model, model_geometry(model), context, text, torch.tensor(ids).view(-1, given.length)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--calibrate", required=True, type=Path)
    parser.add_argument("--evaluate", required=True, type=Path)
    parser.add_argument("--shares", nargs="+", type=float, default=[75, 50, 37.5, 25, 12.5])
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=make.TOKENS, help="of the calibration text")
    parser.add_argument("--steps", type=int, default=make.STEPS)
    parser.add_argument("--chunks", type=int, default=4, help="evaluated pieces of --length tokens")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--far", type=int, nargs="*", default=[], help="also evaluate at these first positions")
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, geometry, context, text, pieces = read(given)
    begun = time.monotonic()
    full = {start: losses(model, pieces, {}, start) for start in (0, *given.far)}
    print(f"{given.model}: calibrated on {text.numel()} tokens of {given.calibrate.name}, {pieces.numel()} tokens of {given.evaluate.name} in pieces of "
          f"{given.length}, full keys: perplexity {full[0][0].mean().exp():.2f}", flush=True)  # fmt: skip
    for method in given.methods:
        prepared = prepare(model, text, geometry, method, context)
        for share in given.shares:
            maps = made(model, text, geometry, method, share / 100, context, given.steps, prepared)
            for start in full:
                found = compare(full[start], losses(model, pieces, maps(start), start))
                print(f"{method:16} {share:5g} %  from {start:5}  {found}  {time.monotonic() - begun:.0f} s", flush=True)


def load_ids(source, path: Path) -> list[int]:
    from tokenizers import Tokenizer

    return Tokenizer.from_str(source.tokenizer).encode(path.read_text(encoding="utf-8"), add_special_tokens=False).ids


def prepare(model, text, geometry, method, context):
    """What all shares of a method have in common, from one pass over the layers."""
    texts = stream.layers(model, text)
    if method == "pairs" or method.startswith("latent"):
        return None
    if method == "kq-svd":
        return [plain_maps(layer) for layer in texts]
    return calibrate.closed_form(stream.turned(texts, geometry, make.starts_of(text, context)))


def plain_maps(text: stream.LayerText) -> KeyMaps:
    heads, dim = text.k.shape[1], text.k.shape[3]
    k, q = text.k.transpose(0, 1).reshape(heads, -1, dim), text.q.transpose(0, 1).reshape(heads, -1, dim)
    found = calibrate.Moments((k.transpose(1, 2) @ k).double() / k.shape[1], (q.transpose(1, 2) @ q).double() / q.shape[1])
    return calibrate.spectrum_and_maps(found, text.scores.scale, text.q.shape[1] // heads)[1]


def made(model, text, geometry, method, share, context, steps, prepared):
    """start -> maps of every layer for texts that begin there."""
    heads = [(g.kv_heads, g.key_dim) for g in geometry]
    if method.startswith("latent"):
        wanted = ranks.KeyRank(share=share, spread=method == "latent-auto")
        fitted = make.from_chunks(model, text, geometry, wanted, "latent", 0 if method == "latent" else steps, context, lambda *_: None)
        tell([layer.rank for layer in fitted.maps], fitted)
        return lambda start: {i: layer.at(start) for i, layer in enumerate(fitted.maps)}
    if method == "pairs":
        fitted = make.from_chunks(model, text, geometry, ranks.KeyRank(share=share), method, 0, context, lambda *_: None)
        tell([layer.rank for layer in fitted.maps], fitted)
        return lambda start: dict(enumerate(fitted.maps))
    wanted = ranks.KeyRank(share=share, spread=method == "refined-auto")
    chosen = ranks.choose(wanted, heads, [] if method == "kq-svd" else prepared[0])
    full = prepared if method == "kq-svd" else prepared[1]
    maps = [calibrate.cut(m, r) for m, r in zip(full, chosen, strict=True)]
    if method.startswith("refined"):
        texts = stream.turned(stream.layers(model, text), geometry, make.starts_of(text, context))
        fitted = calibrate.fit(texts, lambda layer: calibrate.cut(full[layer.layer], chosen[layer.layer]), steps)
        maps = fitted.maps
        tell(chosen, fitted)
    return lambda start: dict(enumerate(maps))


def tell(chosen: list[int], fitted: calibrate.Calibrated) -> None:
    print(f"    ranks {chosen}; attention KL {' '.join(f'{e.attention_kl:.3f}' for e in fitted.errors)}", flush=True)


if __name__ == "__main__":
    main()
