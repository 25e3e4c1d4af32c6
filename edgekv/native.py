"""The native library through ctypes: thin functions on NumPy arrays, each raising NativeError with the library's own sentence.

A state is a contiguous uint8 array that starts on a 64-byte boundary (see `new_state`); it is changed in place.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_float, c_int, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from edgekv.errors import CacheFullError, NativeError
from edgekv.layout import Layout, element_dtype

LIBRARY = Path(__file__).resolve().parent / "_native" / "libedgekv.so"


def _load() -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(LIBRARY))
    except OSError as error:
        raise NativeError(
            f"The native library {LIBRARY} cannot be loaded ({error}); install edgekv with pip, or run `python setup.py build_ext --inplace`."
        ) from None


_lib = _load()
_lib.edgekv_schema.restype = c_char_p
SCHEMA: dict = json.loads(_lib.edgekv_schema())


class LayerParams(ctypes.Structure):
    """The fields of plugins/layout/attributes.def; unset ones take their defaults. `LayerParams(**layer_params(...))` works."""

    _fields_ = [(a["name"], c_int32 if a["type"] == "int" else c_float) for a in SCHEMA["attributes"]]

    def __init__(self, **fields):
        super().__init__(**({a["name"]: a["default"] for a in SCHEMA["attributes"]} | fields))


_FULL = 2  # edgekv_compact: a cache that keeps everything has no room
_PARAMS, _FLOATS, _INTS = POINTER(LayerParams), POINTER(c_float), POINTER(c_int32)
for _name, _result, _arguments in (
    ("edgekv_last_error", c_char_p, []),
    ("edgekv_isa", c_char_p, []),
    ("edgekv_set_isa", c_int, [c_char_p]),
    ("edgekv_check", c_char_p, [_PARAMS]),
    ("edgekv_state_bytes", c_int64, [_PARAMS]),
    ("edgekv_layout", c_int, [_PARAMS, POINTER(c_int64)]),
    ("edgekv_params_hash", c_uint64, [_PARAMS]),
    ("edgekv_state_init", c_int, [_PARAMS, c_void_p, c_int64]),
    (
        "edgekv_attend",
        c_int,
        [_PARAMS, *[_FLOATS] * 3, c_int64, c_int64, *[_FLOATS] * 2, c_int64, *[c_void_p] * 2, *[_FLOATS] * 3, c_void_p, c_int64, _INTS, c_int64, c_int, _FLOATS, c_int],
    ),
    ("edgekv_retrieved_slots", c_int64, [_PARAMS, c_void_p, c_int64, c_int64]),
    (
        "edgekv_retrieve",
        c_int,
        [_PARAMS, _FLOATS, c_int64, c_int64, *[_FLOATS] * 2, c_int64, c_void_p, c_void_p, c_int64, _INTS, c_int, c_int],
    ),
    ("edgekv_compact", c_int, [_PARAMS, _FLOATS, c_void_p, c_int64, c_int64, c_int64, c_int]),
    (
        "edgekv_compact_layers",
        c_int,
        [c_int64, POINTER(_PARAMS), POINTER(_FLOATS), POINTER(c_void_p), POINTER(c_int64), c_int64, c_int64, c_int],
    ),
    ("edgekv_state_hash", c_uint64, [_PARAMS, c_void_p, c_int64, c_int64]),
):
    _function = getattr(_lib, _name)
    _function.restype, _function.argtypes = _result, _arguments


def _refuse_if(failed) -> None:
    if failed:
        raise NativeError(_lib.edgekv_last_error().decode())


def _state(state: np.ndarray) -> tuple[int, int]:
    if state.dtype.itemsize != 1 or not state.flags.c_contiguous or not state.flags.writeable:
        raise NativeError("a state must be a writable, contiguous array of bytes")
    return state.ctypes.data, state.nbytes


def _contiguous(name: str, array: np.ndarray, shape: tuple[int, ...], dtype) -> np.ndarray:
    """The array as contiguous numbers of the type, after a check of its shape; -1 in `shape` matches any size."""
    array = np.ascontiguousarray(array, dtype)
    if array.ndim != len(shape) or any(want not in (-1, got) for want, got in zip(shape, array.shape)):
        raise NativeError(f"{name} has the shape {array.shape} and should have {shape}")
    return array


def _floats(name: str, array: np.ndarray | None, shape: tuple[int, ...]):
    return None if array is None else _contiguous(name, array, shape, np.float32).ctypes.data_as(_FLOATS)


def _map(name: str, array: np.ndarray | None, params: LayerParams, heads: int):
    """A map to thin keys [heads, head_dim, key_dim] as a pointer to numbers of the cache's element type."""
    shape = (heads, params.head_dim or params.key_dim, params.key_dim)
    return None if array is None else _contiguous(name, array, shape, element_dtype(params.element)).ctypes.data_as(c_void_p)


def _rotations(cos: np.ndarray | None, sin: np.ndarray | None, rows: int) -> tuple:
    """Pointers to both tables and their columns, for a step of `rows` rows."""
    columns = 0 if cos is None else cos.shape[-1]
    return _floats("cos", cos, (rows, -1)), _floats("sin", sin, (rows, -1 if cos is None else columns)), columns


def isa() -> str:
    """Name of the instruction set in use: "scalar", "avx2", "avx512" or "neon"."""
    return _lib.edgekv_isa().decode()


def set_isa(name: str) -> None:
    """Use another instruction set for everything that follows in this process; SCHEMA["isa"] lists what this machine can run."""
    _refuse_if(_lib.edgekv_set_isa(name.encode()))


def check(params: LayerParams) -> str | None:
    """None when the parameters make sense, otherwise one sentence that names the field."""
    sentence = _lib.edgekv_check(params)
    return sentence.decode() if sentence else None


def state_bytes(params: LayerParams) -> int:
    """Bytes of one layer's state."""
    size = _lib.edgekv_state_bytes(params)
    _refuse_if(size < 0)
    return size


def layout(params: LayerParams) -> dict[str, int]:
    """Byte offset of every plane, and under "bytes" the size of the state."""
    offsets = (c_int64 * len(Layout._fields))()
    _refuse_if(_lib.edgekv_layout(params, offsets))
    return dict(zip(Layout._fields, offsets, strict=True))


def params_hash(params: LayerParams) -> int:
    """The fingerprint of the parameters that a state's header carries; the layer index does not enter."""
    return _lib.edgekv_params_hash(params)


def aligned_bytes(count: int, alignment: int = 256) -> np.ndarray:
    """A zeroed uint8 array of `count` bytes whose first byte is aligned."""
    block = np.zeros(count + alignment, np.uint8)
    start = -block.ctypes.data % alignment
    return block[start : start + count]


def new_state(params: LayerParams) -> np.ndarray:
    """A fresh, empty state, uint8 [state_bytes(params)]."""
    state = aligned_bytes(state_bytes(params))
    state_init(params, state)
    return state


def state_init(params: LayerParams, state: np.ndarray) -> None:
    """Makes `state` an empty cache."""
    _refuse_if(_lib.edgekv_state_init(params, *_state(state)))


def state_hash(params: LayerParams, state: np.ndarray, position: int) -> int:
    """A 64-bit hash over everything committed before `position`; traffic counters and speculated tail slots do not enter."""
    value = _lib.edgekv_state_hash(params, *_state(state), position)
    _refuse_if(value == 0)
    return value


def attend(
    params: LayerParams,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    position: int,
    state: np.ndarray,
    *,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    query_map: np.ndarray | None = None,
    key_map: np.ndarray | None = None,
    key_encode: np.ndarray | None = None,
    key_decode: np.ndarray | None = None,
    inv_freq: np.ndarray | None = None,
    slots: np.ndarray | None = None,
    threads: int = 1,
) -> np.ndarray:
    """Append T rows after `position` committed tokens and attend: y float32 [T, q_heads, value_dim].

    q float32 [T, q_heads, key_dim], k [T, kv_heads, key_dim], v [T, kv_heads, value_dim]; with params.fused_rotary also cos and
    sin float32 [T, rotary_dim/2 or rotary_dim, or with fused_rotary 2 kv_heads * rotary_dim/2]. With params.head_dim, q and k have that many numbers per head, of which query_map and
    key_map [q_heads or kv_heads, head_dim, key_dim], taken in the cache's element type, make key_dim after the rotation. With params.latent, key_encode float32
    [kv_heads key_dim, latent], key_decode [kv_heads, latent + 1, key_dim] (the last row of a head is its mean key) and inv_freq
    [rotary_dim/2] make and rebuild latent keys. slots int32 [kv_heads, T, k], as retrieve() gives them: what each row attends to
    of a compressed body, beside sinks and tail; None or k = 0: all of it; with their scores if it gave them. Only tail slots from the committed length on change,
    and the traffic counters.
    """
    rows, given = len(q), params.head_dim or params.key_dim
    if slots is not None:
        slots = np.ascontiguousarray(slots, np.int32)
        scored = slots.ndim == 4 and slots.shape[2] == 1 + params.q_heads // params.kv_heads
        if (slots.ndim != 3 and not scored) or slots.shape[:2] != (params.kv_heads, rows):
            raise NativeError(f"slots has the shape {slots.shape} and should have {(params.kv_heads, rows, -1)}")
        slots = slots if slots.size else None
    y = np.empty((rows, params.q_heads, params.value_dim), np.float32)
    _refuse_if(
        _lib.edgekv_attend(
            params,
            _floats("q", q, (rows, params.q_heads, given)),
            _floats("k", k, (rows, params.kv_heads, given)),
            _floats("v", v, (rows, params.kv_heads, params.value_dim)),
            rows,
            position,
            *_rotations(cos, sin, rows),
            _map("query_map", query_map, params, params.q_heads),
            _map("key_map", key_map, params, params.kv_heads),
            _floats("key_encode", key_encode, (params.kv_heads * params.key_dim, params.latent)),
            _floats("key_decode", key_decode, (params.kv_heads, params.latent + 1, params.key_dim)),
            _floats("inv_freq", inv_freq, (params.rotary_dim // 2,)),
            *_state(state),
            None if slots is None else slots.ctypes.data_as(_INTS),
            0 if slots is None else slots.shape[-1],
            0 if slots is None else slots.ndim == 4,
            y.ctypes.data_as(_FLOATS),
            threads,
        )
    )
    return y


def retrieve(
    params: LayerParams,
    q: np.ndarray,
    position: int,
    state: np.ndarray,
    *,
    cos: np.ndarray | None = None,
    sin: np.ndarray | None = None,
    query_map: np.ndarray | None = None,
    scored: bool = False,
    threads: int = 1,
) -> np.ndarray:
    """Body slots that each of T rows should attend to, found by their sign codes: int32 [kv_heads, T, k], ascending, -1 behind the
    last where a row sees fewer than k.

    The header's `retrieve` and `candidates` say how: k = min(retrieve, body_count), and if that is more, `candidates` are ranked again by
    their stored keys. retrieve = 0 gives k = 0: attend to all. q, position, cos, sin and query_map as in attend(); of the state only the
    traffic counters change. scored: [kv_heads, T, 1 + group, k], each row's slots followed by the bits of their float32 scores for the
    query heads of the kv head, which attend() then need not find again.
    """
    rows, given = len(q), params.head_dim or params.key_dim
    count = _lib.edgekv_retrieved_slots(params, *_state(state), position)
    _refuse_if(count < 0)
    each = (1 + params.q_heads // params.kv_heads, count) if scored else (count,)
    slots = np.empty((params.kv_heads, rows, *each), np.int32)
    _refuse_if(
        _lib.edgekv_retrieve(
            params,
            _floats("q", q, (rows, params.q_heads, given)),
            rows,
            position,
            *_rotations(cos, sin, rows),
            _map("query_map", query_map, params, params.q_heads),
            *_state(state),
            slots.ctypes.data_as(_INTS),
            scored,
            threads,
        )
    )
    return slots


def compact(
    params: LayerParams,
    state: np.ndarray,
    position: int,
    rank_base: int | None = None,
    inv_freq: np.ndarray | None = None,
    threads: int = 1,
) -> None:
    """Move the whole tail into the body by the keep rule; `position` is the boundary just reached.

    rank_base is the rotary position of the next token: `position` (the default) with original positions, with positions = cache
    min(position, largest body of any layer). inv_freq float32 [rotary_dim/2] is needed for positions = cache. Raises
    CacheFullError when a cache that keeps everything has no room; a state that is refused has not changed.
    """
    failed = _lib.edgekv_compact(
        params,
        _floats("inv_freq", inv_freq, (params.rotary_dim // 2,)),
        *_state(state),
        position,
        position if rank_base is None else rank_base,
        threads,
    )
    _refuse_compaction(failed)


def _refuse_compaction(failed: int) -> None:
    if failed == _FULL:
        raise CacheFullError(_lib.edgekv_last_error().decode())
    _refuse_if(failed)


class Compactor:
    """compact() for all layers of a model at once, spread over threads; what does not change between boundaries is prepared once.

    params, states and inv_freq (arrays or None) have one entry per layer; `states` must stay where they are.
    """

    def __init__(self, params: Sequence[LayerParams], states: Sequence[np.ndarray], inv_freq: Sequence[np.ndarray | None]):
        self._kept = (params, states)
        blocks = [_state(state) for state in states]
        tables = [_floats("inv_freq", x, (p.rotary_dim // 2,)) for p, x in zip(params, inv_freq, strict=True)]
        count = len(blocks)
        if len(params) != count:
            raise NativeError(f"{len(params)} layers cannot share {count} states")
        self._layers = (
            count,
            (_PARAMS * count)(*(ctypes.pointer(p) for p in params)),
            (_FLOATS * count)(*(table or _FLOATS() for table in tables)),
            (c_void_p * count)(*(address for address, _ in blocks)),
            (c_int64 * count)(*(size for _, size in blocks)),
        )
        self._tables = tables

    def __call__(self, position: int, rank_base: int, threads: int = 1) -> None:
        """Compacts every layer. Raises what the first failing layer raises; the others have been compacted then."""
        _refuse_compaction(_lib.edgekv_compact_layers(*self._layers, position, rank_base, threads))
