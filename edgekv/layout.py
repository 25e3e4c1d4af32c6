"""The bytes of one layer's cache state, seen from NumPy.

This mirrors plugins/layout/state_layout.h and attributes.def, which define the layout; tests/reference compares the two.
A state is one block of bytes, 256-byte aligned, holding a 256-byte header and planes that each start on a 64-byte boundary.
Everything here takes `params`: a mapping with the fields of attributes.def (missing ones take their defaults).
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from edgekv.errors import UserError

LAYOUT_VERSION = 1
STATE_MAGIC = 0x31564B45  # "EKV1", little endian
LANES = 16  # tokens interleaved in a key block

ELEMENTS = {"fp32": 0, "fp16": 1}
KEEPS = {"full": 0, "window": 1, "heavy": 2}
POSITIONS = {"original": 0, "cache": 1}

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
        ("reserved1", "u1", (76,)),
        ("traffic", "<u8", (16,)),
    ]
)
COMMITTED_HEADER_BYTES = HEADER.fields["traffic"][1]  # what precedes the counters is committed state


class Layout(NamedTuple):
    """Byte offsets of every plane and the size of the block; a plane that is not asked for is empty."""

    body_pos: int
    body_score: int
    body_seen: int
    body_k: int
    body_v: int
    tail_k: int
    tail_v: int
    tail_q: int
    bytes: int


def complete(params: Mapping) -> dict:
    """All fields of attributes.def, with defaults filled in and other keys dropped."""
    return {name: params.get(name, default) for name, _, default in FIELDS}


def _align(count: int, to: int) -> int:
    return (count + to - 1) // to * to


def element_bytes(params: Mapping) -> int:
    return 2 if params.get("element", 1) == ELEMENTS["fp16"] else 4


def state_layout(params: Mapping) -> Layout:
    """Offsets of the planes for these parameters, in bytes from the start of the block."""
    p = complete(params)
    kv, body, tail, size = p["kv_heads"], p["body_slots"], p["tail_slots"], element_bytes(p)
    heavy = p["keep"] == KEEPS["heavy"]
    scored = kv * body * 4 if heavy else 0
    queries = p["q_heads"] * p["observe"] * p["key_dim"] * size if heavy else 0
    offsets = [HEADER.itemsize]
    for plane in (
        kv * body * 4,
        scored,
        scored,
        kv * body * p["key_dim"] * size,
        kv * body * p["value_dim"] * size,
        kv * tail * p["key_dim"] * size,
        kv * tail * p["value_dim"] * size,
        queries,
    ):
        offsets.append(offsets[-1] + _align(plane, 64))
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
    heavy = p["keep"] == KEEPS["heavy"]
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
        (p["sinks"] >= 0 and not (bounded and p["sinks"] > p["body_slots"]), "sinks must fit the body"),
        (
            p["window"] >= 0 and not (heavy and p["sinks"] + p["window"] > p["body_slots"]),
            "sinks + window must fit the body",
        ),
        (0 <= p["observe"] <= p["tail_slots"], "observe must be between 0 and tail_slots"),
        (p["sliding_window"] >= 0, "sliding_window must not be negative"),
        (p["positions"] in POSITIONS.values(), "positions must be 0 (original) or 1 (cache)"),
        (
            0 <= p["rotary_dim"] <= p["key_dim"] and p["rotary_dim"] % 2 == 0,
            "rotary_dim must be even and at most key_dim",
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
    body_pos    int32 [kv_heads, body_slots], -1 = empty
    body_score, body_seen   float32 [kv_heads, body_slots], with no slots unless keep = heavy
    body_k      element [kv_heads, body_slots/16, key_dim, 16]
    body_v      element [kv_heads, body_slots, value_dim]
    tail_k, tail_v          the same with tail_slots
    tail_q      element [q_heads, observe, key_dim], with no rows unless keep = heavy
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
        element = np.dtype("<f2" if p["element"] == ELEMENTS["fp16"] else "<f4")
        heavy = p["keep"] == KEEPS["heavy"]
        kv, body, tail = p["kv_heads"], p["body_slots"], p["tail_slots"]

        def plane(offset: int, dtype, *shape: int) -> np.ndarray:
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            return block[offset : offset + size].view(dtype).reshape(shape)

        self.header = block[: HEADER.itemsize].view(HEADER).reshape(())
        self.body_pos = plane(at.body_pos, "<i4", kv, body)
        self.body_score = plane(at.body_score, "<f4", kv, body if heavy else 0)
        self.body_seen = plane(at.body_seen, "<f4", kv, body if heavy else 0)
        self.body_k = plane(at.body_k, element, kv, body // LANES, p["key_dim"], LANES)
        self.body_v = plane(at.body_v, element, kv, body, p["value_dim"])
        self.tail_k = plane(at.tail_k, element, kv, tail // LANES, p["key_dim"], LANES)
        self.tail_v = plane(at.tail_v, element, kv, tail, p["value_dim"])
        self.tail_q = plane(at.tail_q, element, p["q_heads"], p["observe"] if heavy else 0, p["key_dim"])

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
