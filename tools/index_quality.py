"""How well compressed keys find the tokens that matter: recall@k and attention mass on a real model's queries and keys.

    python tools/index_quality.py --model SmolLM2-135M-Instruct.Q4_1.gguf --text persuasion.txt [--calibration emma.txt]

One pass of the model over the text captures queries, keys and values of every layer, after rotation. At each depth N the last
256 positions are the queries' interval (the tail); sinks are the first tokens of the text; the N - 256 - sinks tokens between
are the body to retrieve k from, per kv head and query row. Every way of choosing k body tokens is held against the choice by
the true attention weights ("exact"), with sinks and tail always attended:

  recall  share of the exact choice that was found
  mass    share of the attention that sinks, chosen tokens and tail hold together (mean over rows and heads, then layers)
  lowest  that of the layer which fares worst
  error   |output - full output| / |full output|

Rows of the table that end in "+quantised" attend to keys of --key-bits (and a sign) and values of --value-bits, others to the true ones. The pieces
are those of edgekv/reference/self_index, so what is measured is what the cache computes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

import numpy as np

from edgekv.reference.self_index import ranking, signs
from edgekv.reference.self_index.quantise import GROUP, dequantise, quantise, unbiased
from edgekv.reference.self_index.transform import hadamard
from edgekv.retrieval import candidates_for

INTERVAL = 256  # boundary interval: positions that share a mean key, and the length of the tail


def capture(model_path: Path, text: Path, tokens: int, depths: list[int], folder: Path) -> dict[str, np.ndarray]:
    """q fp16 [layers, q_heads, len(depths) * 256, dim] of the last 256 positions of each depth, k and v fp16 [layers, kv_heads,
    tokens, dim] of a pass over the text's first tokens (after 20,000 characters, past front matter); kept in `folder`."""
    named = f"{model_path.resolve()}|{hashlib.sha256(text.read_bytes()).hexdigest()}|{tokens}|{depths}"
    stored = folder / f"capture-{hashlib.sha256(named.encode()).hexdigest()[:16]}.npz"
    if stored.exists():
        return dict(np.load(stored))
    import torch
    from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer

    from edgekv.export.gguf import as_directory

    taken = []

    def attend(module, q, k, v, mask, scaling=None, dropout=0.0, **kwargs):
        rows = torch.cat([torch.arange(depth - INTERVAL, depth) for depth in depths])
        taken.append([x[0].half().numpy().copy() for x in (q[:, :, rows], k, v)])
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return y.transpose(1, 2).contiguous(), None

    AttentionInterface.register("edgekv_capture", attend)
    source = model_path if model_path.is_dir() else as_directory(model_path, lambda note: print(note, file=sys.stderr))
    model = AutoModelForCausalLM.from_pretrained(source, attn_implementation="edgekv_capture", dtype=torch.float32)
    words = text.read_text(encoding="utf-8", errors="replace")
    ids = AutoTokenizer.from_pretrained(source)(words[20_000:][: tokens * 12], return_tensors="pt").input_ids[:, :tokens]
    if ids.shape[1] < tokens:
        sys.exit(f"{text} holds {ids.shape[1]} tokens after its first 20,000 characters; {tokens} are needed.")
    with torch.no_grad():
        model.get_decoder()(ids)
    arrays = {name: np.stack([layer[i] for layer in taken]) for i, name in enumerate("qkv")}
    np.savez(stored, **arrays)
    return arrays


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def published_quantiser(x: np.ndarray, bits: int) -> np.ndarray:
    """Zero point = min and scale = (max - min) / levels, as published, without the refit."""
    y = x.reshape(*x.shape[:-1], -1, GROUP)
    zero, levels = y.min(-1, keepdims=True), 2**bits - 1
    scale = (y.max(-1, keepdims=True) - zero) / levels
    return (zero + scale * np.rint((y - zero) / np.where(scale > 0, scale, 1))).reshape(x.shape)


def refitted(x: np.ndarray, bits: int) -> np.ndarray:
    return dequantise(*quantise(x, bits), x.shape[-1])


class Layer:
    """One layer at one depth: true attention, and what a choice of body tokens costs. Arrays are [kv_heads, ...]."""

    def __init__(self, q, k, v, depth: int, rows: np.ndarray, sinks: int, share: float):
        self.heads, self.dim, self.group = k.shape[0], k.shape[-1], q.shape[0] // k.shape[0]
        self.k, self.v = k[:, :depth].astype(np.float32), v[:, :depth].astype(np.float32)
        self.q = q[:, rows].astype(np.float32).reshape(self.heads, self.group, len(rows), self.dim)
        self.body = slice(sinks, depth - INTERVAL)
        self.n, self.count = depth - INTERVAL - sinks, max(1, round(share * depth))
        self.scale = self.dim**-0.5
        late = np.arange(depth)[None, :] > (depth - INTERVAL + rows % INTERVAL)[:, None]
        self.logits = np.where(late, -1e30, self.products(self.k))
        self.weights = softmax(self.logits)
        self.output = self.weights @ self.v[:, None]
        self.true = self.weights[..., self.body].sum(1)
        self.exact = self.top(self.true)
        self.keys = self.k[:, self.body]
        interval = np.arange(sinks, depth - INTERVAL) // INTERVAL
        means = [self.keys[:, interval == i].mean(1, keepdims=True).astype(np.float16) for i in np.unique(interval)]
        self.interval = interval - interval[0]
        self.means = np.concatenate(means, axis=1).astype(np.float32)

    def products(self, keys: np.ndarray) -> np.ndarray:
        return self.scale * np.einsum("hgrd,hnd->hgrn", self.q, keys, optimize=True)

    def top(self, score: np.ndarray, count: int | None = None) -> np.ndarray:
        """Mask [kv_heads, rows, n] of the highest scores of every row."""
        count = min(count or self.count, self.n)
        mask = np.zeros(score.shape, bool)
        np.put_along_axis(mask, np.argpartition(-score, count - 1, axis=-1)[..., :count], True, axis=-1)
        return mask

    def judge(self, chosen: np.ndarray, keys: np.ndarray | None = None, values: np.ndarray | None = None) -> list[float]:
        recall = (chosen & self.exact).sum() / self.exact.sum()
        inside = self.weights[..., self.body]
        mass = (1 - inside.sum(-1) + (inside * chosen[:, None]).sum(-1)).mean()
        logits, v = self.logits.copy(), self.v
        if keys is not None:
            logits[..., self.body] = self.products(keys)
        if values is not None:
            v = v.copy()
            v[:, self.body] = values
        logits[..., self.body] = np.where(chosen[:, None], logits[..., self.body], -1e30)
        difference = np.linalg.norm(softmax(logits) @ v[:, None] - self.output, axis=-1)
        return [float(recall), float(mass), float((difference / np.linalg.norm(self.output, axis=-1)).mean())]

    def reduce(self, logits: np.ndarray, how: str) -> np.ndarray:
        """One score per kv head from those of its query heads [kv_heads, group, rows, n]."""
        return {"mean": logits.mean, "max": logits.max, "sum_softmax": softmax(logits).sum}[how](1)

    def centroid_keys(self, x: np.ndarray, source: np.ndarray) -> np.ndarray:
        """Keys [kv_heads, n, dim] replaced by the centroids of their sign codes, which are learnt from `source`."""
        codes, out = signs.sign_codes(x), np.empty_like(x)
        for head in range(self.heads):
            other = signs.sign_codes(source[head])
            for g in range(self.dim // 4):
                part, sub = slice(4 * g, 4 * g + 4), source[head, :, 4 * g : 4 * g + 4]
                total = np.maximum(np.bincount(other[:, g], minlength=16), 1)
                book = np.stack([np.bincount(other[:, g], sub[:, i], 16) for i in range(4)], axis=1) / total[:, None]
                out[head, :, part] = book[codes[head, :, g]]
        return out


def recipes(layer: Layer, sinks: int, calibration: np.ndarray | None, key_bits: int, bits: int, random: np.random.Generator) -> dict:
    """Figures of every way to choose: name -> [recall, mass, error]."""
    found, x, n = {}, layer.keys, layer.n

    def sign_scan(name, mean, source, reductions, turn=lambda a: a, bias=None):
        logits = layer.products(turn(layer.centroid_keys(turn(x - mean), turn(source))))
        logits = logits if bias is None else logits + bias
        for how in reductions:
            found[f"{name}, {how}"] = layer.judge(layer.top(layer.reduce(logits, how)))
        return logits

    found["exact"] = layer.judge(layer.exact)
    found["random"] = layer.judge(layer.top(random.random(layer.exact.shape)))
    pages = n // 32
    paged = x[:, : pages * 32].reshape(layer.heads, pages, 32, layer.dim)
    bound = sum(np.maximum(layer.q, 0)[..., None, i] * paged.max(2)[:, None, None, :, i] + np.minimum(layer.q, 0)[..., None, i]
                * paged.min(2)[:, None, None, :, i] for i in range(layer.dim))  # fmt: skip
    best = np.repeat(layer.top(bound.max(1), max(1, round(layer.count / 32))), 32, axis=-1)
    found["pages of 32 tokens (min, max)"] = layer.judge(np.pad(best, ((0, 0), (0, 0), (0, n - best.shape[-1]))))

    everything = layer.k[:, : layer.body.stop]
    mean = everything.mean(1, keepdims=True)
    sign_scan("signs, statistics of all tokens", mean, everything - mean, ["mean", "sum_softmax"])
    mean = x.mean(1, keepdims=True)
    sign_scan("signs, without sinks", mean, x - mean, ["mean", "max", "sum_softmax"])
    if calibration is not None:
        other = calibration[:, sinks:].astype(np.float32)
        away = other.mean(1, keepdims=True)
        sign_scan("signs, calibrated on another text", away, other - away, ["sum_softmax"])
    sign_scan("Hadamard, signs, without sinks", mean, x - mean, ["mean", "sum_softmax"], hadamard)
    if calibration is not None:
        sign_scan("Hadamard, signs, calibrated", away, other - away, ["sum_softmax"], hadamard)
    slot_mean = layer.means[:, layer.interval]
    bias = layer.products(layer.means)[..., layer.interval]
    name = "Hadamard, signs, mean per interval"
    sign_scan(name, slot_mean, x - slot_mean, ["sum_softmax"], hadamard, bias)

    table_scores = np.empty(layer.exact.shape, np.int32)  # the integer scores of the cache itself
    spread = hadamard(x - slot_mean)
    codes = signs.sign_codes(spread)
    for head in range(layer.heads):
        book, seen = np.zeros((layer.dim // 4, 16, 4), np.float32), np.zeros((layer.dim // 4, 16), np.float32)
        signs.learn(book, seen, spread[head], codes[head])
        for row in range(table_scores.shape[1]):
            together = np.float32(layer.scale) * layer.q[head, :, row].sum(0)
            table, step = signs.score_table(hadamard(together), book)
            shift = signs.interval_bias(together, layer.means[head], layer.means.shape[1] - 1, step)
            table_scores[head, row] = signs.scan(table, codes[head]) + shift[layer.interval]
    found[f"{name}, 6-bit table of the mean"] = layer.judge(layer.top(table_scores))

    values = hadamard(refitted(hadamard(layer.v[:, layer.body]), bits))
    magnitude, pairs = quantise(np.abs(spread), key_bits)
    pairs = unbiased(np.abs(spread), magnitude, pairs)
    positive = np.where(spread >= 0, 1, -1)
    keys = hadamard(positive * dequantise(magnitude, pairs, layer.dim)) + slot_mean
    ranked = {f"{factor} x k": factor * layer.count for factor in (1, 2, 4, 8)} | {"as many as by default": candidates_for(layer.count, None)}
    for words, candidates in ranked.items():
        among, weight = layer.top(table_scores, candidates), np.full(table_scores.shape, -1, np.float32)
        for head, row in np.ndindex(table_scores.shape[:2]):
            at, query = np.flatnonzero(among[head, row]), layer.q[head, :, row]
            stored = magnitude[head, at], pairs[head, at], positive[head, at], key_bits, layer.means[head], layer.interval[at]
            weight[head, row, at] = ranking.weights(ranking.scores(query, hadamard(query), *stored, layer.scale, 0.0), 0.0)
        found[f"... re-ranked from {words}, +quantised"] = layer.judge(layer.top(weight), keys, values)

    centred = x - mean
    for alpha, divisor in (("max", np.abs(centred).max(1, keepdims=True)), ("mean", np.abs(centred).mean(1, keepdims=True))):
        plain = np.where(centred >= 0, 1, -1) * published_quantiser(np.abs(centred / divisor), 2) * divisor + mean
        found[f"exact choice, 2-bit keys as published, alpha = {alpha}"] = layer.judge(layer.exact, plain)
    found[f"exact choice, {key_bits}-bit keys of the cache"] = layer.judge(layer.exact, keys)
    shrunk = hadamard(np.where(spread >= 0, 1, -1) * refitted(np.abs(spread), key_bits)) + slot_mean
    found[f"exact choice, {key_bits}-bit keys of least squares"] = layer.judge(layer.exact, shrunk)
    all_tokens = np.ones_like(layer.exact)
    for width in (2, 3, 4):
        magnitude, pairs = quantise(np.abs(spread), width)
        packed = hadamard(positive * dequantise(magnitude, unbiased(np.abs(spread), magnitude, pairs), layer.dim)) + slot_mean
        found[f"everything, {width}-bit magnitudes of keys"] = layer.judge(all_tokens, packed)
    for width in (2, 3, 4, 8):
        packed = hadamard(refitted(hadamard(layer.v[:, layer.body]), width))
        found[f"everything, {width}-bit values"] = layer.judge(all_tokens, None, packed)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="Hugging Face directory or .gguf file")
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--calibration", type=Path, help="another text, for statistics fixed beforehand")
    parser.add_argument("--depths", default="2048,4096,8192")
    parser.add_argument("--share", type=float, default=0.075, help="k as a share of the depth")
    parser.add_argument("--sinks", type=int, default=64)
    parser.add_argument("--rows", type=int, default=16, help="query rows per depth, evenly spread over the last interval")
    parser.add_argument("--key-bits", type=int, choices=(2, 4), default=2)
    parser.add_argument("--value-bits", type=int, choices=(2, 4, 8), default=4)
    parser.add_argument("--layers", help="for example 0,5,10 (default: all)")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "edgekv")
    parser.add_argument("--json", type=Path, help="write every figure of every layer here")
    options = parser.parse_args()
    options.cache.mkdir(parents=True, exist_ok=True)
    depths = [int(x) for x in options.depths.split(",")]
    if min(depths) < 2 * INTERVAL + options.sinks:
        sys.exit(f"Depths below {2 * INTERVAL + options.sinks} leave no body to retrieve from.")
    data = capture(options.model, options.text, max(depths), depths, options.cache)
    other = capture(options.model, options.calibration, max(depths), depths, options.cache)["k"] if options.calibration else None
    layers = [int(x) for x in options.layers.split(",")] if options.layers else range(len(data["k"]))
    step = INTERVAL // options.rows
    random, report = np.random.default_rng(0), {}
    for at, depth in enumerate(depths):
        rows = at * INTERVAL + np.arange(step - 1, INTERVAL, step)
        figures = {}
        for i in layers:
            layer = Layer(data["q"][i], data["k"][i], data["v"][i], depth, rows, options.sinks, options.share)
            calibration = other[i] if other is not None else None
            for name, row in recipes(layer, options.sinks, calibration, options.key_bits, options.value_bits, random).items():
                figures.setdefault(name, []).append(row)
        print(f"\n{depth} tokens, k = {max(1, round(options.share * depth))}, {options.sinks} sinks, {len(layers)} layers")
        print(f"{'':62s} recall    mass  lowest   error")
        for name, rows_of in figures.items():
            recall, mass, error = np.mean(rows_of, axis=0)
            print(f"{name:62s} {recall:6.3f}  {mass:6.4f}  {min(row[1] for row in rows_of):6.4f}  {error:6.4f}", flush=True)
        report[depth] = {"layers": list(layers), "recall_mass_error": figures}
    if options.json:
        unfinished = options.json.with_suffix(".part")
        unfinished.write_text(json.dumps(report))
        os.replace(unfinished, options.json)


if __name__ == "__main__":
    main()
