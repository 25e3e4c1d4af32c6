"""The shape of a model, from its config.json or from a bundle: what is stored, what a step reads, what each layer caches.

No weights are needed. A Hugging Face folder gives its config.json (other files are ignored); a bundle gives its manifest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgekv.errors import UserError
from edgekv.geometry import LayerGeometry
from edgekv.memory.families import ALIASES, FAMILIES, LLAMA, Family

MAX_CONFIG_BYTES = 16 << 20


@dataclass(frozen=True)
class Matrix:
    """One kind of weight matrix: who owns it, its outputs and inputs, and how many of them there are."""

    owner: str  # attention, mlp, head, embedding, positions
    outputs: int
    inputs: int
    count: int = 1

    @property
    def parameters(self) -> int:
        return self.outputs * self.inputs * self.count


@dataclass(frozen=True)
class ModelShape:
    """What planning needs to know of a model.

    matrices: every weight matrix; a tied head appears once, as owner `head`, and serves as embedding table too.
    vectors: parameters that are no matrix (norms, biases). notes: assumptions that were made, one sentence each.
    """

    name: str
    architecture: str
    hidden: int
    vocab: int
    context: int
    intermediate: int
    tied: bool
    layers: tuple[LayerGeometry, ...]
    matrices: tuple[Matrix, ...]
    vectors: int
    notes: tuple[str, ...] = ()
    bundle: Any = field(default=None, compare=False)

    @property
    def parameters(self) -> int:
        return sum(m.parameters for m in self.matrices) + self.vectors

    @property
    def step_parameters(self) -> int:
        """Matrix parameters multiplied in every step: all but tables of which one row is looked up."""
        return sum(m.parameters for m in self.matrices if m.owner not in ("embedding", "positions"))

    def kv_bytes_per_token(self, element_bytes: int = 2) -> int:
        """Key and value bytes of one token over all layers (kv heads, not the hidden size)."""
        return sum(layer.token_bytes(element_bytes) for layer in self.layers)


# ------------------------------------------------------------------------------------------------------------- from config


class _Config:
    """Typed, range-checked access to an untrusted config.json."""

    def __init__(self, data: Mapping[str, Any], origin: str):
        self.data, self.origin = data, origin

    def integer(self, *names: str, default: int | None = None, high: int = 1 << 24) -> int:
        for name in names:
            value = self.data.get(name)
            if value is not None:
                if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= high:
                    raise UserError(f"{self.origin}: {name} must be a whole number from 1 to {high}, not {str(value)[:40]}.")
                return value
        if default is None:
            raise UserError(f"{self.origin} has no field {' or '.join(names)}; is it the config.json of a language model?")
        return default

    def number(self, *names: str, default: float) -> float:
        for name in names:
            value = self.data.get(name)
            if value is not None:
                if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 <= value < 1e12:
                    raise UserError(f"{self.origin}: {name} must be a number that is not negative, not {str(value)[:40]}.")
                return float(value)
        return default

    def boolean(self, name: str, default: bool) -> bool:
        value = self.data.get(name)
        return default if value is None else value is True


def shape_from_config(data: Any, name: str, origin: str = "config.json") -> ModelShape:
    """ModelShape of a config.json's contents; UserError when it is not the config of a dense causal language model."""
    if not isinstance(data, Mapping):
        raise UserError(f"{origin} must be a JSON object with named fields.")
    text = data.get("text_config") or data.get("llm_config")
    notes = []
    if isinstance(text, Mapping):
        notes.append("Only the language model of this multimodal model is counted.")
        data = {"model_type": data.get("model_type"), "tie_word_embeddings": data.get("tie_word_embeddings"), **text}
    config = _Config(data, origin)
    for expert in ("num_experts", "num_local_experts", "n_routed_experts"):
        if data.get(expert):
            raise UserError(f"{origin} describes a mixture of experts ({expert}); only dense models can be planned.")
    kind = str(data.get("model_type"))[:40]
    family = FAMILIES.get(ALIASES.get(kind, kind))
    if family is None:
        notes.append(f"The model type {kind!r} is not known: weights are counted as for a Llama-like model.")
        family = LLAMA

    hidden = config.integer("hidden_size", "n_embd", "d_model", high=1 << 18)
    count = config.integer("num_hidden_layers", "n_layer", high=4096)
    q_heads = config.integer("num_attention_heads", "n_head", high=4096)
    kv_heads = config.integer("num_key_value_heads", default=q_heads, high=4096)
    head = config.integer("head_dim", default=max(hidden // q_heads, 1), high=1024)
    vocab = config.integer("vocab_size")
    context = config.integer("max_position_embeddings", "n_positions", "n_ctx", default=2048, high=1 << 30)
    inner = config.integer("intermediate_size", "n_inner", "ffn_dim", default=4 * hidden)
    tied = config.boolean("tie_word_embeddings", family.tied)
    layers = tuple(_layer(config, family, i, count, q_heads, kv_heads, head) for i in range(count))

    attention = [Matrix("attention", q_heads * head, hidden, count), Matrix("attention", kv_heads * head, hidden, 2 * count)]
    attention.append(Matrix("attention", hidden, q_heads * head, count))
    mlp = [Matrix("mlp", inner, hidden, (2 if family.gated else 1) * count), Matrix("mlp", hidden, inner, count)]
    tables = [Matrix("head", vocab, hidden)] if tied else [Matrix("embedding", vocab, hidden), Matrix("head", vocab, hidden)]
    if family.learned_positions is not None:
        tables.append(Matrix("positions", context + family.learned_positions, hidden))
    vectors = count * _layer_vectors(config, family, hidden, q_heads * head, kv_heads * head, head, inner)
    vectors += family.norm * hidden if family.final_norm else 0
    return ModelShape(
        name=name,
        architecture=kind,
        hidden=hidden,
        vocab=vocab,
        context=context,
        intermediate=inner,
        tied=tied,
        layers=layers,
        matrices=(*attention, *mlp, *tables),
        vectors=vectors,
        notes=tuple(notes),
    )


def _layer(config: _Config, family: Family, index: int, count: int, q_heads: int, kv_heads: int, head: int) -> LayerGeometry:
    scale = head**-0.5
    if family.scaled_by == "query_pre_attn_scalar":
        scale = max(config.number("query_pre_attn_scalar", default=head), 1e-6) ** -0.5
    elif family.scaled_by:
        scale = config.number(family.scaled_by, default=scale)
    rope = config.data.get("rope_parameters") or config.data.get("rope_scaling") or {}
    rope = _Config(rope if isinstance(rope, Mapping) else {}, config.origin)
    part = config.number("partial_rotary_factor", "rotary_pct", default=rope.number("partial_rotary_factor", default=1.0))
    rotary = 0 if family.learned_positions is not None else int(head * min(part, 1.0)) // 2 * 2
    theta = max(config.number("rope_theta", "rotary_emb_base", default=rope.number("rope_theta", default=10000.0)), 1.0)
    return LayerGeometry(
        q_heads=q_heads,
        kv_heads=kv_heads,
        key_dim=head,
        value_dim=head,
        scale=scale,
        softcap=config.number("attn_logit_softcapping", default=0.0),
        sliding_window=_window(config, index, count),
        rotary_dim=rotary,
        inv_freq=tuple(theta ** (-2 * i / rotary) for i in range(rotary // 2)),
    )


def _window(config: _Config, index: int, count: int) -> int:
    """The model's own sliding window of layer `index`, 0 for full attention."""
    size = config.data.get("sliding_window")
    if size is None or config.data.get("use_sliding_window") is False:
        return 0
    size = config.integer("sliding_window", high=1 << 30)
    kinds = config.data.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == count:
        return size if kinds[index] == "sliding_attention" else 0
    pattern = config.data.get("sliding_window_pattern") or config.data.get("_sliding_window_pattern")
    if isinstance(pattern, int) and pattern > 1:
        return 0 if (index + 1) % pattern == 0 else size
    return size


def _layer_vectors(config: _Config, family: Family, hidden: int, q: int, kv: int, head: int, inner: int) -> int:
    total = family.norm * family.norms * hidden
    if family.qkv_bias or config.boolean("attention_bias", False):
        total += q + 2 * kv
    if family.out_bias or config.boolean("attention_bias", False):
        total += hidden
    if family.mlp_bias or config.boolean("mlp_bias", False):
        total += inner + hidden + (inner if family.gated else 0)
    return total + {"head": 2 * head, "full": q + kv, "": 0}[family.qk_norm]


# ------------------------------------------------------------------------------------------------------------- from files


def load_shape(path: str | Path) -> ModelShape:
    """ModelShape of a bundle, of a Hugging Face folder, or of a config.json itself; UserError says what was expected."""
    path = Path(path)
    if (path / "manifest.json").is_file():
        return shape_from_bundle(path)
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        what = f"{path} has no config.json" if path.is_dir() else f"There is no file or folder {path}"
        raise UserError(f"{what}; give a bundle, a Hugging Face model folder or a config.json (weights are not needed).")
    try:
        if file.stat().st_size > MAX_CONFIG_BYTES:
            raise UserError(f"{file} is larger than 16 MiB; that is no config.json.")
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):
        raise UserError(f"{file} is not valid JSON.") from None
    name = path.resolve().name if path.is_dir() else path.resolve().parent.name
    return shape_from_config(data, name, str(file))


def shape_from_bundle(path: str | Path) -> ModelShape:
    """ModelShape of a bundle: cache geometry from its layers, sizes from its files (verified by name and size, not hashed)."""
    from edgekv.bundle import open_bundle

    bundle = open_bundle(path, verify=False)
    model = bundle.model
    keys = ("q_heads", "kv_heads", "key_dim", "value_dim", "softcap", "sliding_window", "rotary_dim", "head_dim", "latent")
    layers = []
    for index, entry in enumerate(bundle.layers):
        params = entry["params"]
        fields = {key: params[key] for key in keys if key in params}
        scale = params.get("scale") or params.get("key_dim", 1) ** -0.5
        interleaved = bool(params.get("rotary_interleaved"))
        layers.append(LayerGeometry(scale=scale, rotary_interleaved=interleaved, inv_freq=tuple(bundle.inv_freq(index)), **fields))
    hidden, vocab = model["hidden"], model["vocab"]
    parameters, tied = model.get("parameters"), model.get("tied_embedding") is not False
    known = isinstance(parameters, int) and not isinstance(parameters, bool) and 0 < parameters < 1 << 50
    attention = sum(hidden * (g.q_heads + g.kv_heads) * (g.given_dim + g.value_dim) for g in layers)
    tables = [Matrix("head", vocab, hidden)] + ([] if tied else [Matrix("embedding", vocab, hidden)])
    rest = max(parameters - attention - len(tables) * hidden * vocab, 0) if known else 0
    return ModelShape(
        name=model["name"],
        architecture=str(model.get("architecture", "")),
        hidden=hidden,
        vocab=vocab,
        context=model["context"],
        intermediate=max(rest // (3 * hidden * len(layers)), 1),
        tied=tied,
        layers=tuple(layers),
        matrices=(Matrix("attention", attention // hidden, hidden), Matrix("mlp", rest // hidden, hidden), *tables),
        vectors=0,
        notes=() if known else ("The bundle does not say how many parameters the model has.",),
        bundle=bundle,
    )


def rows_per_step_flops(shape: ModelShape, rows: int, depth: int) -> float:
    """Multiply-adds x 2 of a step of `rows` tokens at `depth` cached tokens: matrices, then q.k and p.v."""
    matrices = 2.0 * rows * (shape.step_parameters - shape.hidden * shape.vocab) + 2.0 * shape.hidden * shape.vocab
    seen = [min(depth, g.sliding_window) if g.sliding_window else depth for g in shape.layers]
    attention = sum(2.0 * rows * n * g.q_heads * (g.key_dim + g.value_dim) for n, g in zip(seen, shape.layers, strict=True))
    return matrices + attention


__all__ = ["Matrix", "ModelShape", "load_shape", "rows_per_step_flops", "shape_from_bundle", "shape_from_config"]
