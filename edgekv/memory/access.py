"""The order in which a decode step touches memory, at block granularity: what the residency simulator is driven by.

Per layer: the layer's weights, then the attention op on the layer's state, kv head by kv head and tile by tile: keys of the tile,
then its values. The addresses are those of the real layout, so set conflicts are the real ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from edgekv import layout
from edgekv.memory.residency import Access
from edgekv.memory.traffic import TILE, committed


def state_accesses(params: Mapping, base: int, position: int, mode: str = "normal", body_count: int | None = None) -> Iterator[Access]:
    """One-row attention step of one layer with a dense body of whole or projected keys whose state starts at address `base`, without a sliding window of the model.

    body_count: filled body slots; default as after feeding `position` tokens from the start of the text.
    """
    at = layout.state_layout(params)
    tail_base, count = committed(params, position)
    count = count if body_count is None else body_count
    tail = position - (tail_base if body_count is None else body_count)
    element = layout.element_bytes(params)
    yield Access("kv_header", base, layout.HEADER.itemsize, mode)
    for head in range(params["kv_heads"]):
        row = base + at.tail_v + (head * params["tail_slots"] + tail) * params["value_dim"] * element
        yield Access("kv_write", row, params["value_dim"] * element, mode, write=True)
        block = base + at.tail_k + (head * params["tail_slots"] + tail // layout.LANES * layout.LANES) * params["key_dim"] * element
        yield Access("kv_write", block, layout.LANES * params["key_dim"] * element, mode, write=True)
    for head in range(params["kv_heads"]):
        for keys, values, slots, used in ((at.body_k, at.body_v, params["body_slots"], count), (at.tail_k, at.tail_v, params["tail_slots"], tail + 1)):
            for first in range(0, used, TILE):
                size = min(TILE, used - first)
                blocks = (size + layout.LANES - 1) // layout.LANES * layout.LANES
                key_bytes, value_bytes = params["key_dim"] * element, params["value_dim"] * element
                yield Access("kv_keys", base + keys + (head * slots + first) * key_bytes, blocks * key_bytes, mode)
                yield Access("kv_values", base + values + (head * slots + first) * value_bytes, size * value_bytes, mode)


def decode_step(
    layers: Sequence[Mapping],
    weights: Sequence[tuple[int, int]],
    states: Sequence[int],
    position: int,
    weight_mode: str = "normal",
    cache_mode: str = "normal",
    body_count: int | None = None,
) -> list[Access]:
    """All accesses of one decode step. weights: (address, bytes) per layer, last entry may be the output matrix; states: addresses."""
    step: list[Access] = []
    for index, (address, size) in enumerate(weights):
        if size:
            step.append(Access("weights", address, size, weight_mode))
        if index < len(layers):
            step.extend(state_accesses(layers[index], states[index], position, cache_mode, body_count))
    return step
