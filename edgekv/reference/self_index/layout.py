"""The bytes of a self-index state: planes after the common 256-byte header, each on a 64-byte boundary, in this order.

  body_pos    int32  [kv_heads][body_slots]                 position in the text of each compressed token, ascending; -1 = empty
  body_score  float  [kv_heads][body_slots]                 accumulated attention (keep = heavy only)
  body_seen   float  [kv_heads][body_slots]                 observing queries behind it (keep = heavy only)
  index       uint8  [kv_heads][body_slots/32][key_dim/4][16]   sign codes, 32 tokens side by side: byte i of a group holds the code
                                                            of token i in its low and of token i + 16 in its high half
  payload     uint8  [kv_heads][body_slots][record]         one record per token, a multiple of 16 bytes
  mean        fp16   [kv_heads][intervals][key_dim]         mean key of each boundary interval of the text
  codebook    float  [kv_heads][key_dim/4][16][4]           centroids of the sign codes
  code_seen   float  [kv_heads][key_dim/4][16]              sub-vectors behind each centroid
  sink_k      elem   [kv_heads][ceil16(sinks)/16][key_dim][16]   the first `sinks` tokens of the text in full
  sink_v      elem   [kv_heads][ceil16(sinks)][value_dim]
  tail_k, tail_v, tail_q                                    as in a dense state

A record is, back to back: key magnitudes (8 bytes per 32 numbers), value codes (4 * value_bits bytes per 32 numbers), then the
fp16 pairs (zero point, scale) of the key's and of the value's groups of 32, padded to 16 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv.errors import UserError
from edgekv.layout import ELEMENTS, HEADER, KEEPS, LANES, POSITIONS
from edgekv.layout import complete as complete_dense
from edgekv.layout import check_params as check_dense
from edgekv.reference.self_index.quantise import GROUP

INDEX_TOKENS = 32  # tokens side by side in the index plane


def complete(params: Mapping) -> dict:
    """Dense parameters plus value_bits (2, 4 or 8) and intervals (boundary intervals the text may have)."""
    return complete_dense(params) | {"value_bits": params.get("value_bits", 4), "intervals": params.get("intervals", 1)}


def check_params(params: Mapping) -> str | None:
    """None when the parameters make sense, otherwise one sentence that names the field."""
    p = complete(params)
    dense = check_dense(p | {"sinks": 0})
    rules = (
        (dense is None, dense),
        (p["key_dim"] % 4 == 0, "key_dim must be a multiple of 4"),
        (p["body_slots"] % INDEX_TOKENS == 0, "body_slots must be a multiple of 32"),
        (p["value_bits"] in (2, 4, 8), "value_bits must be 2, 4 or 8"),
        (0 <= p["sinks"] <= 1 << 20, "sinks must be between 0 and 1048576"),
        (1 <= p["intervals"] <= 1 << 20, "intervals must be between 1 and 1048576"),
        (p["positions"] == POSITIONS["original"], "positions must be 0 (original): compressed keys cannot be turned"),
    )
    return next((sentence for holds, sentence in rules if not holds), None)


def groups_of(dim: int) -> int:
    return -(-dim // GROUP)


def record_parts(params: Mapping) -> tuple[int, int, int, int]:
    """Bytes of a record's parts: key magnitudes, value codes, key pairs, value pairs."""
    p = complete(params)
    key_groups, value_groups = groups_of(p["key_dim"]), groups_of(p["value_dim"])
    return 8 * key_groups, 4 * p["value_bits"] * value_groups, 4 * key_groups, 4 * value_groups


def record_bytes(params: Mapping) -> int:
    return -(-sum(record_parts(params)) // 16) * 16


def token_bytes(params: Mapping) -> int:
    """Bytes of one compressed token of one kv head: index and record, without position and score."""
    return complete(params)["key_dim"] // 8 + record_bytes(params)


def planes(params: Mapping) -> dict[str, tuple[np.dtype, tuple[int, ...]]]:
    """Type and shape of every plane, in order; the header is not among them."""
    p = complete(params)
    kv, body, tail, dim, out = p["kv_heads"], p["body_slots"], p["tail_slots"], p["key_dim"], p["value_dim"]
    element = np.dtype("<f2" if p["element"] == ELEMENTS["fp16"] else "<f4")
    sinks = -(-p["sinks"] // LANES) * LANES
    heavy = p["keep"] == KEEPS["heavy"]
    i4, f4, f2, u1 = (np.dtype(name) for name in ("<i4", "<f4", "<f2", "u1"))
    return {
        "body_pos": (i4, (kv, body)),
        "body_score": (f4, (kv, body if heavy else 0)),
        "body_seen": (f4, (kv, body if heavy else 0)),
        "index": (u1, (kv, body // INDEX_TOKENS, dim // 4, 16)),
        "payload": (u1, (kv, body, record_bytes(p))),
        "mean": (f2, (kv, p["intervals"], dim)),
        "codebook": (f4, (kv, dim // 4, 16, 4)),
        "code_seen": (f4, (kv, dim // 4, 16)),
        "sink_k": (element, (kv, sinks // LANES, dim, LANES)),
        "sink_v": (element, (kv, sinks, out)),
        "tail_k": (element, (kv, tail // LANES, dim, LANES)),
        "tail_v": (element, (kv, tail, out)),
        "tail_q": (element, (p["q_heads"], p["observe"] if heavy else 0, dim)),
    }


def itemised_bytes(params: Mapping) -> dict[str, int]:
    """Bytes of every plane with its padding to 64 bytes, and of the header; their sum, rounded up to 256, is the state."""
    items = {"header": HEADER.itemsize}
    for name, (dtype, shape) in planes(params).items():
        items[name] = -(-int(np.prod(shape)) * dtype.itemsize // 64) * 64
    return items


def state_bytes(params: Mapping) -> int:
    return -(-sum(itemised_bytes(params).values()) // 256) * 256


def views(params: Mapping, block: np.ndarray) -> dict[str, np.ndarray]:
    """Writable views of the header (shape ()) and of every plane of a state block, uint8 [state_bytes(params)]."""
    sentence = check_params(params)
    if sentence:
        raise UserError(f"The parameters of the compressed cache are wrong: {sentence}.")
    if block.shape != (state_bytes(params),) or block.dtype != np.uint8:
        raise UserError(f"A compressed cache state must be one block of {state_bytes(params)} bytes.")
    found, offset = {"header": block[: HEADER.itemsize].view(HEADER).reshape(())}, HEADER.itemsize
    for name, (dtype, shape) in planes(params).items():
        size = int(np.prod(shape)) * dtype.itemsize
        found[name] = block[offset : offset + size].view(dtype).reshape(shape)
        offset += -(-size // 64) * 64
    return found


def read_index(plane: np.ndarray, first: int, last: int) -> np.ndarray:
    """Sign codes uint8 [heads, slots, key_dim/4] of slots first..last-1 of the index plane."""
    slots = np.arange(first, last)
    byte = plane[:, slots // INDEX_TOKENS, :, slots % 16].transpose(1, 0, 2)
    high = (slots % INDEX_TOKENS >= 16)[None, :, None]
    return np.where(high, byte >> 4, byte & 15)


def write_index(plane: np.ndarray, codes: np.ndarray) -> None:
    """Write sign codes uint8 [heads, n, key_dim/4] to slots 0..n-1 and clear the rest of the last block of 32."""
    heads, n, groups = codes.shape
    blocks = -(-n // INDEX_TOKENS)
    padded = np.zeros((heads, blocks * INDEX_TOKENS, groups), np.uint8)
    padded[:, :n] = codes
    halves = padded.reshape(heads, blocks, 2, 16, groups)
    plane[:, :blocks] = (halves[:, :, 0] | halves[:, :, 1] << 4).transpose(0, 1, 3, 2)
