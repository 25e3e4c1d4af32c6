"""What an engine whose layers are states of plugins/layout/state_layout.h says about them, wherever their memory is."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from edgekv import layout
from edgekv.bundle import Bundle
from edgekv.engine import Occupancy


def occupancy(bundle: Bundle, headers: Iterable[np.ndarray], tail: int) -> Occupancy:
    """How full the states are. headers: one layout.HEADER array of one item per layer; tail: committed tokens behind the last boundary."""
    used, most = 0, None
    for layer, header in zip(bundle.layers, headers, strict=True):
        params, body, evicted = layer["params"], int(header["body_count"][0]), int(header["evicted"][0])
        in_full = tail + (min(params["sinks"], int(header["tail_base"][0])) if layout.is_selfindex(params) else 0)
        whole = params["kv_heads"] * (params["key_dim"] + params["value_dim"]) * layout.element_bytes(params)
        kept = body + in_full
        used += body * layout.kept_bytes(params) + in_full * whole
        if most is None or kept > most[0]:
            most = kept, evicted
    return Occupancy(bundle.arena_bytes, used, *most)


def combined(hashes: Iterable[int]) -> int:
    """One 64-bit hash of those of all layers, in order."""
    digest = 0
    for one in hashes:
        digest = (digest * 1099511628211 + one) % (1 << 64)
    return digest
