"""The bytes of one layer's cache state, seen from NumPy.

This mirrors plugins/layout/state_layout.h and attributes.def, which define the layout; tests/reference compares the two.
A state is one block of bytes, 256-byte aligned, holding a 256-byte header and planes that each start on a 64-byte boundary.
Everything here takes `params`: a mapping with the fields of attributes.def (missing ones take their defaults).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from edgekv.errors import UserError

LAYOUT_VERSION = 5
STATE_MAGIC = 0x31564B45  # "EKV1", little endian
LANES = 16  # tokens interleaved in a key block
INDEX_TOKENS = 32  # tokens side by side in the index plane
GROUP = 32  # numbers that share a zero point and a scale
MOST_LATENT = 4096  # numbers of a token's keys, of all kv heads, that latent keys can stand for

ELEMENTS = {"fp32": 0, "fp16": 1}
BY_HEAD = 2  # fused_rotary of a layer whose rotary tables have columns for every kv head
KEEPS = {"full": 0, "window": 1, "heavy": 2}
POSITIONS = {"original": 0, "cache": 1}
SCORES = {"attention": 0, "keys": 1}
FORMATS = {"dense": 0, "selfindex": 1}

# attributes.def, in order: (name, struct code, default).
FIELDS: tuple[tuple[str, str, float], ...] = (
    ("layer", "i", 0),
    ("q_heads", "i", 0),
    ("kv_heads", "i", 0),
    ("key_dim", "i", 0),
    ("value_dim", "i", 0),
    ("body_slots", "i", 0),
    ("tail_slots", "i", 0),
    ("element", "i", 1),
    ("keep", "i", 0),
    ("sinks", "i", 0),
    ("window", "i", 0),
    ("observe", "i", 0),
    ("score_normalise", "i", 0),
    ("score_decay", "f", 1.0),
    ("sliding_window", "i", 0),
    ("scale", "f", 0.0),
    ("softcap", "f", 0.0),
    ("positions", "i", 0),
    ("rotary_dim", "i", 0),
    ("rotary_interleaved", "i", 0),
    ("fused_rotary", "i", 0),
    ("score", "i", 0),
    ("format", "i", 0),
    ("value_bits", "i", 4),
    ("intervals", "i", 0),
    ("head_dim", "i", 0),
    ("latent", "i", 0),
    ("key_bits", "i", 2),
)

# Entries of the header's traffic counters, in bytes (the last named one counts steps).
TRAFFIC = (
    "read_body_keys",
    "read_body_values",
    "read_tail_keys",
    "read_tail_values",
    "read_body_index",
    "read_body_meta",
    "write_tail",
    "compact_read",
    "compact_write",
    "steps",
)

HEADER = np.dtype(
    [
        ("magic", "<u4"),
        ("layout_version", "<u4"),
        ("params_hash", "<u8"),
        ("tail_base", "<i8"),
        ("rank_base", "<i8"),
        ("evicted", "<i8"),
        ("body_count", "<i4"),
        ("hidden_from", "<i4"),
        ("hidden_to", "<i4"),
        ("retrieve", "<i4"),
        ("candidates", "<i4"),
        ("reserved1", "u1", (68,)),
        ("traffic", "<u8", (16,)),
    ]
)
COMMITTED_HEADER_BYTES = HEADER.fields["hidden_from"][1]  # what precedes the runtime's own fields and the counters


class Layout(NamedTuple):
    """Byte offsets of every plane and the size of the block; a plane that is not asked for is empty."""

    body_pos: int
    body_score: int
    body_seen: int
    body_k: int
    body_v: int
    body_z: int
    index: int
    payload: int
    mean: int
    codebook: int
    code_seen: int
    sink_k: int
    sink_v: int
    tail_k: int
    tail_v: int
    tail_z: int
    tail_q: int
    bytes: int


def complete(params: Mapping) -> dict:
    """All fields of attributes.def, with defaults filled in and other keys dropped."""
    return {name: params.get(name, default) for name, _, default in FIELDS}


def _align(count: int, to: int) -> int:
    return (count + to - 1) // to * to


def element_dtype(element: int) -> np.dtype:
    return np.dtype("<f2" if element == ELEMENTS["fp16"] else "<f4")


def element_bytes(params: Mapping) -> int:
    return 2 if params.get("element", 1) == ELEMENTS["fp16"] else 4


def given_dim(params: Mapping) -> int:
    """Numbers per key and query head as a step receives them; key_dim of them are stored, projected or as they come."""
    return params.get("head_dim", 0) or params["key_dim"]


def keeps_scores(params: Mapping) -> bool:
    """Whether attention scores and the queries that make them are stored."""
    return params.get("keep", 0) == KEEPS["heavy"] and params.get("score", 0) == SCORES["attention"]


def ranks_by_keys(params: Mapping) -> bool:
    """Whether a compaction that evicts ranks tokens by their keys."""
    return params.get("keep", 0) == KEEPS["heavy"] and params.get("score", 0) == SCORES["keys"]


def is_selfindex(params: Mapping) -> bool:
    """Whether the body is compressed."""
    return params.get("format", 0) == FORMATS["selfindex"]


def record_parts(params: Mapping) -> tuple[int, int, int, int]:
    """Bytes of the parts of a selfindex record: key magnitudes, value codes, key pairs, value pairs."""
    keys, values = -(-params["key_dim"] // GROUP), -(-params["value_dim"] // GROUP)
    if params.get("latent", 0):
        keys = 0  # they lie in planes of their own
    return 4 * params.get("key_bits", 2) * keys, 4 * params.get("value_bits", 4) * values, 4 * keys, 4 * values


def record_bytes(params: Mapping) -> int:
    """Bytes of a selfindex record with its padding."""
    return _align(sum(record_parts(params)), 8 if params.get("latent", 0) else 16)


def packs_latents(params: Mapping) -> bool:
    """Whether latents are quantised, token by token."""
    return is_selfindex(params) and params.get("latent", 0) > 0


def latent_code_bytes(params: Mapping) -> int:
    """Bytes of the codes of a quantised latent."""
    return -(-params["latent"] // 16) * 8


def latent_bytes(params: Mapping) -> int:
    """Bytes of what stands for the keys of all kv heads of a token; 0 when nothing does. Quantised in a compressed body: codes, then pairs."""
    latent = params.get("latent", 0)
    if not is_selfindex(params):
        return latent * element_bytes(params)
    return latent_code_bytes(params) + 4 * -(-latent // GROUP) if latent else 0


def token_bytes(params: Mapping) -> int:
    """Bytes of one body token of one kv head, without position and score: index and record, or dense key and value (none of a latent key,
    which is one for all kv heads)."""
    if is_selfindex(params):
        return params["key_dim"] // 8 + record_bytes(params)
    return ((0 if params.get("latent", 0) else params["key_dim"]) + params["value_dim"]) * element_bytes(params)


def kept_bytes(params: Mapping) -> int:
    """Bytes of one body token of all kv heads, without positions and scores."""
    return params["kv_heads"] * token_bytes(params) + latent_bytes(params)


def key_numbers(params: Mapping) -> int:
    """Numbers that a dense body stores for the keys of one token, of all kv heads."""
    return params.get("latent", 0) or params["kv_heads"] * params["key_dim"]


def held_tokens(params: Mapping) -> int:
    """Tokens a layer can hold beside its tail; the sinks of a dense body are among its slots."""
    return params["body_slots"] + (params.get("sinks", 0) if is_selfindex(params) else 0)


def planes(params: Mapping) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Type and shape of every plane behind the header, in order; a plane that is not asked for holds nothing."""
    p = complete(params)
    kv, body, tail, dim, out = p["kv_heads"], p["body_slots"], p["tail_slots"], p["key_dim"], p["value_dim"]
    packed, scored = is_selfindex(p), keeps_scores(p)
    dense, compressed = (0, body) if packed else (body, 0)
    sinks = _align(p["sinks"], LANES) if packed else 0
    element = element_dtype(p["element"])
    i4, f4, f2, u1 = (np.dtype(name) for name in ("<i4", "<f4", "<f2", "u1"))

    def latents(slots: int) -> tuple[np.dtype, tuple[int, ...]]:
        return (u1, (slots, latent_bytes(p))) if packed else (element, (slots // LANES, p["latent"], LANES))

    return {
        "body_pos": (i4, (kv, body)),
        "body_score": (f4, (kv, body if scored else 0)),
        "body_seen": (f4, (kv, body if scored else 0)),
        "body_k": (element, (kv, 0 if p["latent"] else dense // LANES, dim, LANES)),
        "body_v": (element, (kv, dense, out)),
        "body_z": latents(body),
        "index": (u1, (kv, compressed // INDEX_TOKENS, dim // 4, 16)),
        "payload": (u1, (kv, compressed, record_bytes(p))),
        "mean": (f2, (kv, p["intervals"] if packed else 0, dim)),
        "codebook": (f4, (kv if packed else 0, dim // 4, 16, 4)),
        "code_seen": (f4, (kv if packed else 0, dim // 4, 16)),
        "sink_k": (element, (kv, sinks // LANES, dim, LANES)),
        "sink_v": (element, (kv, sinks, out)),
        "tail_k": (element, (kv, tail // LANES, dim, LANES)),
        "tail_v": (element, (kv, tail, out)),
        "tail_z": latents(tail),
        "tail_q": (element, (p["q_heads"], p["observe"] if scored else 0, dim)),
    }


def itemised_bytes(params: Mapping) -> dict[str, int]:
    """Bytes of the header and of every plane with its padding to 64 bytes; their sum, rounded up to 256, is the state."""
    items = {"header": HEADER.itemsize}
    for name, (dtype, shape) in planes(params).items():
        items[name] = _align(math.prod(shape) * dtype.itemsize, 64)
    return items


# Whose bytes a plane's are, for reports; what is not named here is positions and headers.
_OWNERS = {
    "body_score": "scores",
    "body_seen": "scores",
    "body_k": "body",
    "body_v": "body",
    "body_z": "body",
    "index": "index",
    "payload": "compressed records",
    "mean": "interval means",
    "codebook": "codebook",
    "code_seen": "codebook",
    "sink_k": "sinks",
    "sink_v": "sinks",
    "tail_k": "tail",
    "tail_v": "tail",
    "tail_z": "tail",
    "tail_q": "observed queries",
}
OWNERS = (*dict.fromkeys(_OWNERS.values()), "positions and headers")


def bytes_by_owner(params: Mapping) -> dict[str, int]:
    """Bytes of the state by owner, in the order of OWNERS, owners of nothing left out; their sum is state_bytes(params)."""
    owners = dict.fromkeys(OWNERS, 0)
    for name, size in itemised_bytes(params).items():
        owners[_OWNERS.get(name, OWNERS[-1])] += size
    owners[OWNERS[-1]] += state_bytes(params) - sum(owners.values())
    return {owner: size for owner, size in owners.items() if size}


def state_layout(params: Mapping) -> Layout:
    """Offsets of the planes for these parameters, in bytes from the start of the block."""
    offsets = list(itertools.accumulate(itemised_bytes(params).values()))
    return Layout(*offsets[:-1], _align(offsets[-1], 256))


def state_bytes(params: Mapping) -> int:
    """Size of the whole block in bytes: header, body, tail, scores, observed queries and alignment."""
    return state_layout(params).bytes


def pack_params(params: Mapping) -> bytes:
    """The LayerParams struct of state_layout.h, little endian."""
    p = complete(params)
    return b"".join(struct.pack("<" + code, int(p[name]) if code == "i" else p[name]) for name, code, _ in FIELDS)


def params_hash(params: Mapping) -> int:
    """FNV-1a (64 bit) over LayerParams with `layer` = 0, so that layers of one shape share a hash."""
    value = 1469598103934665603
    for byte in pack_params({**params, "layer": 0}):
        value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return value


def check_params(params: Mapping) -> str | None:
    """None when the parameters make sense, otherwise one sentence that names the field (as check_params in the header)."""
    p = complete(params)
    bounded = p["keep"] != KEEPS["full"]
    heavy, packed, latent = p["keep"] == KEEPS["heavy"], is_selfindex(p), p["latent"]
    rules = (
        (1 <= p["q_heads"] <= 4096, "q_heads must be between 1 and 4096"),
        (p["kv_heads"] >= 1 and p["q_heads"] % max(p["kv_heads"], 1) == 0, "kv_heads must divide q_heads"),
        (1 <= p["key_dim"] <= 1024, "key_dim must be between 1 and 1024"),
        (1 <= p["value_dim"] <= 1024, "value_dim must be between 1 and 1024"),
        (0 <= p["body_slots"] <= 1 << 27 and p["body_slots"] % LANES == 0, "body_slots must be a multiple of 16"),
        (
            LANES <= p["tail_slots"] <= 1 << 20 and p["tail_slots"] % LANES == 0,
            "tail_slots must be a positive multiple of 16",
        ),
        (p["element"] in ELEMENTS.values(), "element must be 0 (float32) or 1 (float16)"),
        (p["keep"] in KEEPS.values(), "keep must be 0 (full), 1 (window) or 2 (heavy)"),
        (p["score"] in SCORES.values(), "score must be 0 (attention) or 1 (keys)"),
        (p["format"] in FORMATS.values(), "format must be 0 (dense) or 1 (selfindex)"),
        (not packed or p["key_dim"] % 4 == 0, "key_dim must be a multiple of 4"),
        (not packed or p["body_slots"] % INDEX_TOKENS == 0, "body_slots must be a multiple of 32"),
        (not packed or p["key_bits"] in (2, 4), "key_bits must be 2 or 4"),
        (not packed or p["value_bits"] in (2, 4, 8), "value_bits must be 2, 4 or 8"),
        (not packed or 1 <= p["intervals"] <= 1 << 20, "intervals must be between 1 and 1048576"),
        (
            not packed or p["positions"] == POSITIONS["original"],
            "positions must be 0 (original): compressed keys cannot be turned",
        ),
        (
            0 <= p["sinks"] <= 1 << 20 and (packed or not bounded or p["sinks"] <= p["body_slots"]),
            "sinks must fit the body",
        ),
        (
            p["window"] >= 0 and not (heavy and p["window"] > p["body_slots"] - (0 if packed else p["sinks"])),
            "sinks + window must fit the body",
        ),
        (0 <= p["observe"] <= p["tail_slots"], "observe must be between 0 and tail_slots"),
        (
            p["score"] != SCORES["keys"] or not (p["observe"] or p["score_normalise"]),
            "observe and score_normalise must be 0 when score is 1 (keys): no query is observed",
        ),
        (p["sliding_window"] >= 0, "sliding_window must not be negative"),
        (p["positions"] in POSITIONS.values(), "positions must be 0 (original) or 1 (cache)"),
        (p["head_dim"] == 0 or p["key_dim"] <= p["head_dim"] <= 1024, "head_dim must be 0 or between key_dim and 1024"),
        (p["head_dim"] == 0 or p["positions"] == POSITIONS["original"], "positions must be 0 (original): projected keys cannot be turned"),
        (
            0 <= latent <= min(MOST_LATENT, p["kv_heads"] * p["key_dim"]),
            "latent must be between 0 and the numbers of all keys of a token, at most 4096",
        ),
        (not latent or p["head_dim"] == 0, "latent keys need head_dim 0"),
        (
            not latent or not packed or not ranks_by_keys(p),
            "latent keys of format 1 (selfindex) cannot be ranked: keep must be 0 (full) or 1 (window)",
        ),
        (not latent or p["positions"] == POSITIONS["original"], "positions must be 0 (original): latent keys cannot be turned"),
        (not latent or not keeps_scores(p), "latent keys cannot be ranked by attention: score must be 1 (keys)"),
        (not latent or not p["rotary_dim"] or p["fused_rotary"], "latent keys need fused_rotary: they are made before the rotation"),
        (not latent or p["kv_heads"] * p["key_dim"] <= MOST_LATENT, "latent keys need kv_heads * key_dim of at most 4096"),
        (
            0 <= p["rotary_dim"] <= given_dim(p) and p["rotary_dim"] % 2 == 0,
            "rotary_dim must be even and at most the size of a head",
        ),
        (0 <= p["fused_rotary"] <= BY_HEAD, "fused_rotary must be 0, 1 or 2 (tables for every kv head)"),
        (p["fused_rotary"] != BY_HEAD or not latent, "fused_rotary must be 0 or 1 with latent keys: all heads turn alike"),
        (
            p["fused_rotary"] != BY_HEAD or p["positions"] == POSITIONS["original"],
            "positions must be 0 (original): keys that turn by head are not turned again",
        ),
        (0.0 <= p["score_decay"] <= 1.0, "score_decay must be between 0 and 1"),
        (p["softcap"] >= 0.0, "softcap must not be negative"),
    )
    return next((sentence for holds, sentence in rules if not holds), None)


class StateView:
    """NumPy views of every plane of one state block; writing to them writes the block.

    params   mapping with the fields of attributes.def
    block    writable uint8 (or int8) array [state_bytes(params)]

    header      HEADER scalar view, shape ()
    and every plane of planes() under its name, for example
    body_pos    int32 [kv_heads, body_slots], -1 = empty
    body_k      element [kv_heads, body_slots/16, key_dim, 16]
    """

    def __init__(self, params: Mapping, block: np.ndarray):
        self.params = p = complete(params)
        sentence = check_params(p)
        if sentence:
            raise UserError(f"The cache parameters of layer {p['layer']} are wrong: {sentence}.")
        self.layout = at = state_layout(p)
        if block.ndim != 1 or block.dtype.itemsize != 1 or block.size != at.bytes or not block.flags.c_contiguous:
            raise UserError(f"A cache state of layer {p['layer']} must be one block of {at.bytes} bytes.")
        self.block = block = block.view(np.uint8)
        self.header = block[: HEADER.itemsize].view(HEADER).reshape(())
        for (name, (dtype, shape)), offset in zip(planes(p).items(), at):
            plane = block[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).reshape(shape)
            setattr(self, name, plane)

    def initialise(self) -> None:
        """Empty cache at position 0: all bytes zero but the header and the positions of the empty slots (-1)."""
        self.block[:] = 0
        self.header["magic"] = STATE_MAGIC
        self.header["layout_version"] = LAYOUT_VERSION
        self.header["params_hash"] = params_hash(self.params)
        self.body_pos[:] = -1


def read_keys(plane: np.ndarray, first: int, last: int) -> np.ndarray:
    """Keys of slots first..last-1 of an interleaved plane [heads, blocks, dim, 16], as a float32 copy [heads, slots, dim]."""
    slots = np.arange(first, last)
    return plane[:, slots // LANES, :, slots % LANES].astype(np.float32).transpose(1, 0, 2)


def write_keys(plane: np.ndarray, first: int, keys: np.ndarray) -> None:
    """Store keys [heads, slots, dim] into an interleaved plane from slot `first` on, rounded to the plane's element."""
    slots = np.arange(first, first + keys.shape[1])
    plane[:, slots // LANES, :, slots % LANES] = keys.transpose(1, 0, 2)


def new_state(params: Mapping) -> StateView:
    """An empty state in memory of its own."""
    view = StateView(params, np.zeros(state_bytes(params), np.uint8))
    view.initialise()
    return view
