"""Makes real but tiny bundles: a graph with the real attention operator, a byte-level tokenizer, a chat template.

The model reads bytes. Its residual stream is a one-hot code of the token plus whatever attention adds, so that with
`attention=0` the next token is exactly `follows[token]`, and with attention on it depends on the whole visible cache.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from edgekv import bundle, layout, policy
from edgekv.geometry import LayerGeometry

SPECIAL = ["<bos>", "<eos>", "<user>", "<bot>"]
VOCAB = 256 + len(SPECIAL)
BOS, EOS, USER, BOT = range(256, VOCAB)
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '<user>' if m.role != 'assistant' else '<bot>' }}{{ m.content }}"
    "{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def byte_tokenizer() -> Tokenizer:
    """Token i is byte i, in the order of the bytes themselves; then the special tokens."""
    table = _byte_symbols()
    tokenizer = Tokenizer(models.BPE(vocab={table[b]: b for b in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIAL])
    return tokenizer


def _byte_symbols() -> dict[int, str]:
    """The printable stand-ins that byte-level tokenizers use for bytes (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def follow(text: str, then: int = EOS) -> dict[int, int]:
    """`follows` of a model that says `text` (no byte twice) after <bot> or its first byte's predecessor, then `then`."""
    data = [BOT, *text.encode(), then]
    return dict(zip(data, data[1:], strict=False))


def make(
    folder,
    keep="window",
    kept=48,
    boundary=32,
    layers=2,
    positions="cache",
    sinks=4,
    element="fp16",
    attention=1.0,
    follows=None,
    chunk=32,
    context=4096,
    sliding_window=0,
    score="attention",
    template=TEMPLATE,
    generation=None,
    seed=0,
    tokenizer=None,
    files=None,
    cache="dense",
    key_bits=4,
    value_bits=2,
    retrieve="all",
    rerank=4,
    change=lambda manifest: None,
):
    """Writes a bundle to `folder` and returns it.

    `kept` body slots per layer; with cache = selfindex beside `sinks` planes, also for keep = full. `files` name -> bytes of further files; `change` may edit the manifest before sealing.
    """
    rng = np.random.default_rng(seed)
    heads, kv_heads, dim, rotary = 4, 2, 16, 16
    inv_freq = (1.0 / 100.0 ** (np.arange(0, rotary, 2) / rotary)).astype(np.float32)
    scored = keep == "heavy" and score == "attention"
    packed = {"format": cache, "key_bits": key_bits, "value_bits": value_bits, "retrieve": retrieve, "rerank": rerank} if cache == "selfindex" else {}
    rules = policy.CachePolicy(
        keep=keep, sinks=0 if keep == "full" and not packed else sinks, window=kept // 2 if keep == "heavy" else 0,
        score=score if keep == "heavy" else None, observe=16 if scored else 0, score_normalise=scored, score_decay=1.0,
        element=element, positions="original" if keep == "full" or packed else positions, boundary=boundary, **packed,
    )  # fmt: skip
    geometry = LayerGeometry(
        heads, kv_heads, dim, dim, dim**-0.5, sliding_window=sliding_window, rotary_dim=rotary, inv_freq=tuple(inv_freq.tolist())
    )
    params = [
        layout.complete(policy.layer_params(rules, geometry, index, kept, fused_rotary=True, context=context)) for index in range(layers)
    ]
    with bundle.create(folder) as partial:
        onnx.save_model(
            _graph(params, inv_freq, rng, attention, follows or {}),
            partial / "model.onnx", save_as_external_data=True, location="model.onnx.data", size_threshold=256,
        )  # fmt: skip
        (tokenizer or byte_tokenizer()).save(str(partial / "tokenizer.json"))
        for name, data in (files or {}).items():
            (partial / name).write_bytes(data)
        if template is not None:
            (partial / "chat_template.jinja").write_text(template)
        sizes = [layout.state_bytes(p) for p in params]
        manifest = {
            "model": {
                "name": "tiny", "architecture": "tiny", "layers": layers, "hidden": VOCAB, "vocab": VOCAB, "context": context,
                "bos_token_id": BOS, "eos_token_ids": [EOS], "parameters": None,
            },
            "graph": {"file": "model.onnx", "chunk": chunk, "opset": 21},
            "policy": {**rules.to_json(), "budget": f"{kept + boundary}tok"},
            "layers": [{"params": p, "bytes": b, "inv_freq": 0} for p, b in zip(params, sizes, strict=True)],
            "inv_freq": [inv_freq.tolist()],
            "memory": {"arena": sum(sizes)},
            "weights": {"format": "fp32", "bytes": (partial / "model.onnx.data").stat().st_size},
            "parity": None,
            "generation": generation or {},
        }  # fmt: skip
        change(manifest)
        bundle.seal(partial, manifest)
    return bundle.open_bundle(folder)


def _graph(params, inv_freq, rng, attention, follows):
    constants, nodes = {}, []

    def constant(name, value):
        constants[name] = numpy_helper.from_array(np.ascontiguousarray(value), name)
        return name

    def node(op, inputs, output, domain="", **attributes):
        nodes.append(helper.make_node(op, inputs, output if isinstance(output, list) else [output], domain=domain, **attributes))
        return output if isinstance(output, str) else output[0]

    zero, one = constant("zero", np.int64(0)), constant("one", np.int64(1))
    x = node("Gather", [constant("embedding", np.eye(VOCAB, dtype=np.float32)), "input_ids"], "x0")
    count = node("Squeeze", [node("Shape", ["input_ids"], "t1", start=1, end=2)], "t")
    places = node("Add", [node("Range", [zero, count, one], "r"), node("Sub", ["position", "shift"], "rank0")], "rank")
    angle = node("Mul", [node("Unsqueeze", [node("Cast", [places], "rankf", to=1), constant("last", np.array([1]))], "rank_column"),
                         constant("inv_freq", inv_freq[None])], "angle2")  # fmt: skip
    angle = node("Unsqueeze", [angle, constant("first", np.array([0]))], "angle")
    cos, sin = node("Cos", [angle], "cos"), node("Sin", [angle], "sin")
    for p in params:
        i = p["layer"]
        widths = {"q": p["q_heads"] * p["key_dim"], "k": p["kv_heads"] * p["key_dim"], "v": p["kv_heads"] * p["value_dim"]}
        q, k, v = (
            node("MatMul", [x, constant(f"w{n}{i}", rng.normal(0, 1, (VOCAB, w)).astype(np.float32))], f"{n}{i}")
            for n, w in widths.items()
        )
        attributes = {name: float(p[name]) if code == "f" else int(p[name]) for name, code, _ in layout.FIELDS}
        attributes |= {"inv_freq": [float(f) for f in inv_freq], "plugin_namespace": "", "plugin_version": "1"}
        given = [q, k, v, "position", f"state.{i}", cos, sin]
        if layout.is_selfindex(p):
            given = [*given, node("SignVQRetrieval", given, f"slots.{i}", "edgekv", **attributes)]
        y = node("BoundedCacheAttention", given, [f"y{i}", f"state.{i}.out"], "edgekv", **attributes)
        out = rng.normal(0, 0.03 * attention, (p["q_heads"] * p["value_dim"], VOCAB)).astype(np.float32)
        x = node("Add", [x, node("MatMul", [y, constant(f"wo{i}", out)], f"o{i}")], f"x{i + 1}")
    table = rng.normal(0, 1, (VOCAB, VOCAB)).astype(np.float32) if not follows else np.zeros((VOCAB, VOCAB), np.float32)
    for token, following in follows.items():
        table[token, following] = 30.0
    node("MatMul", [node("Gather", [x, "rows"], "wanted", axis=1), constant("head", table)], "logits")

    def tensor(name, kind, shape):
        return helper.make_tensor_value_info(name, kind, shape)

    ints = TensorProto.INT64
    inputs = [tensor("input_ids", ints, [1, "T"]), tensor("position", ints, [1]), tensor("rows", ints, ["R"]), tensor("shift", ints, [1])]
    outputs = [tensor("logits", TensorProto.FLOAT, [1, "R", VOCAB])]
    for p in params:
        size = layout.state_bytes(p)
        inputs.append(tensor(f"state.{p['layer']}", TensorProto.INT8, [size]))
        outputs.append(tensor(f"state.{p['layer']}.out", TensorProto.INT8, [size]))
    graph = helper.make_graph(nodes, "tiny", inputs, outputs, list(constants.values()))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("edgekv", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)
