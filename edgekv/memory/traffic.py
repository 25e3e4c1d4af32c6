"""Bytes that a layer's attention steps and compactions move, by formula: what the kernels' own counters must equal to the byte.

A step of T rows at `position` attends to the body and to the tail slots up to its own rows. Query rows that share a kv head are
handled in passes of up to ROWS_PER_PASS[isa]; a pass loads each tile of 128 slots once, keys in blocks of 16 tokens, values slot
by slot, from the first to the last slot that one of its rows may see. A decode step is one pass: every visible byte once.

Of latent keys a pass over the body reads what stands for the keys of all kv heads once per kv head; compaction moves it once.

A compaction reads and writes each kept token that changes its place or its rotation; with keep = heavy the observed queries pass
over all keys once per register block to update the scores, or, when tokens are ranked by their keys and some have to go, all keys
are read twice: for their sum and for their share in it. Compressed bodies are in packed_traffic.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence

from edgekv import layout
from edgekv.memory.packed_traffic import TILE, PackedBody

ROWS_PER_PASS = {"scalar": 32, "avx2": 48, "avx512": 96, "neon": 48}


def committed(params: Mapping, position: int) -> tuple[int, int]:
    """(tail_base, body_count) of a state with `position` committed tokens that was fed from the start of the text."""
    tail_base = position // params["tail_slots"] * params["tail_slots"]
    if position == tail_base and params["keep"] == layout.KEEPS["full"] and tail_base > layout.held_tokens(params):
        tail_base -= params["tail_slots"]  # a full cache's last interval stays in the tail
    beside = min(params["sinks"], tail_base) if layout.is_selfindex(params) else 0  # sinks in planes of their own
    return tail_base, min(tail_base - beside, params["body_slots"])


def kept_positions(params: Mapping, position: int) -> list[int] | None:
    """Positions in the body, ascending, of keep rules that do not depend on the text (full, window); None for heavy."""
    tail_base, count = committed(params, position)
    beside = min(params["sinks"], tail_base) if layout.is_selfindex(params) else 0
    if params["keep"] == layout.KEEPS["heavy"] and tail_base > count + beside:
        return None
    if layout.is_selfindex(params):
        return [*range(tail_base - count, tail_base)]
    sinks = min(params["sinks"], count) if tail_base > count else 0
    return [*range(sinks), *range(tail_base - (count - sinks), tail_base)]


def step_traffic(
    params: Mapping,
    position: int,
    rows: int = 1,
    isa: str = "avx2",
    kept: Sequence[Sequence[int]] | None = None,
    hidden: tuple[int, int] = (0, 0),
    retrieve: int = 0,
    candidates: int = 0,
    scored: bool = False,
) -> dict[str, int]:
    """Bytes by name of layout.TRAFFIC of one attention step of one layer.

    kept: positions in the body per kv head, needed only for keep = heavy on a layer with a sliding window smaller than its
    body, where what is visible depends on the text; default: the positions that full and window keep. hidden: body slots that
    the step leaves out (drafting with a part of the cache), as in the state's header. retrieve, candidates: as in the header too,
    for compressed bodies; where what heavy keeps is not told, its newest tokens stand for it. scored: the retrieval hands scores over, as
    the op for ONNX Runtime on a CPU does.
    """
    tail_base, count = committed(params, position)
    group, window = params["q_heads"] // params["kv_heads"], params["sliding_window"]
    element = layout.element_bytes(params)
    first_tail = position - tail_base
    total = dict.fromkeys(layout.TRAFFIC, 0) | {"steps": 1}
    known, packed = kept_positions(params, position), layout.is_selfindex(params)
    parts = [(0, hidden[0]), (hidden[1], count)] if hidden[0] < hidden[1] else [(0, count)]
    for head in range(params["kv_heads"]):
        body = kept[head] if kept is not None else known
        if packed:
            body = range(tail_base - count, tail_base) if body is None else body
            compressed = PackedBody(params, body, tail_base)
        if body is None and window:
            raise ValueError("what a heavy cache shows through a sliding window depends on the text: pass the kept positions")
        for first in range(0, rows * group, ROWS_PER_PASS[isa]):
            tokens = range(first // group, (min(first + ROWS_PER_PASS[isa], rows * group) - 1) // group + 1)
            oldest = [position + t - window if window else -1 for t in tokens]
            low = min(bisect_right(body, o) for o in oldest) if window else 0
            tail_low = max(0, min(oldest) - tail_base + 1) if window else 0
            seen = {"body": [_tiles(begin, end, low) for begin, end in parts]}
            seen["tail"] = [_tiles(0, first_tail + tokens[-1] + 1, tail_low)]
            if packed:
                seen["body"] = []
                seen["tail"].append(_tiles(0, min(params["sinks"], tail_base), min(oldest) + 1))
                if not retrieve:
                    compressed.whole(low)
            for plane, tiles in seen.items():
                numbers = params.get("latent", 0) if plane == "body" else 0  # read again for every kv head
                total[f"read_{plane}_keys"] += sum(blocks for blocks, _ in tiles) * layout.LANES * (numbers or params["key_dim"]) * element
                total[f"read_{plane}_values"] += sum(slots for _, slots in tiles) * params["value_dim"] * element
        if packed:
            for row in range(rows if retrieve and count else 0):
                heads = range(row * group, (row + 1) * group)
                compressed.chosen(
                    position + row - window if window else -1, retrieve, candidates,
                    passes=len({head // ROWS_PER_PASS[isa] for head in heads}), scored=scored,
                )  # fmt: skip
            for name, size in compressed.moved.items():
                total[name] += size
    observed = 0
    if layout.keeps_scores(params):
        observed = max(0, first_tail + rows - max(first_tail, params["tail_slots"] - params["observe"]))
    numbers = rows * params["kv_heads"] * (params["key_dim"] + params["value_dim"]) + observed * params["q_heads"] * params["key_dim"]
    encoded = rows
    if layout.packs_latents(params):  # in sixteens of tail slots, when the last one has come, from the keys in the tail
        encoded = ((first_tail + rows) // layout.LANES - first_tail // layout.LANES) * layout.LANES
        total["read_tail_keys"] += encoded * params["kv_heads"] * params["key_dim"] * element
    total["write_tail"] = numbers * element + encoded * layout.latent_bytes(params)
    return total


def _tiles(begin: int, end: int, low: int) -> tuple[int, int]:
    """Key blocks of 16 and value slots loaded of slots [begin, end), in tiles from `begin` on, to see those from `low` on."""
    blocks = slots = 0
    for at in range(begin, end, TILE):
        size = min(end - at, TILE)
        skipped = max(low - at, 0)
        if skipped < size:
            blocks += (size + layout.LANES - 1) // layout.LANES - skipped // layout.LANES
            slots += size - skipped
    return blocks, slots


def compaction_traffic(
    params: Mapping, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], position: int, turn: int = 0, isa: str = "avx2"
) -> tuple[int, int]:
    """(bytes read, bytes written) by the compaction of one layer at `position`.

    before, after: positions in the body per kv head, ascending. turn: by how many rotary positions a token that keeps its slot
    is re-rotated: (new rank base - new count) - (old rank base - old count); 0 with original positions.
    """
    if layout.is_selfindex(params):
        return _packed_compaction(params, before, after, position)
    element = layout.element_bytes(params)
    tail_base = position - params["tail_slots"]
    rotates = params["positions"] == layout.POSITIONS["cache"] and params["rotary_dim"] > 0
    latent = params.get("latent", 0)
    key_numbers = latent or params["key_dim"]  # those of a latent key are there once, and move with the first kv head
    moved = 0
    for head, (old, new) in enumerate(zip(before, after, strict=True)):
        slot_of = {p: i for i, p in enumerate(old)}
        source = [slot_of[p] if p < tail_base else len(old) + p - tail_base for p in new]  # index among body, then tail
        for first in range(0, 0 if latent and head else len(new), layout.LANES):
            lanes = range(first, min(first + layout.LANES, len(new)))
            turned = rotates and any(turn + i - source[i] for i in lanes)
            if turned or any(source[i] != i or source[i] >= len(old) for i in lanes):
                moved += len(lanes) * key_numbers * element
        moved_values = sum(source[i] != i or source[i] >= len(old) for i in range(len(new)))
        moved += moved_values * (params["value_dim"] * element + 4)
    read = written = moved
    heads, padded = params["kv_heads"], -(-len(before[0]) // layout.LANES) * layout.LANES + params["tail_slots"]
    if layout.ranks_by_keys(params) and len(before[0]) + params["tail_slots"] > params["body_slots"]:
        read += 2 * (1 if latent else heads) * padded * key_numbers * element
    if layout.keeps_scores(params):
        count = len(before[0])
        row_block = ROWS_PER_PASS[isa] // 8
        passes = -(-params["observe"] * (params["q_heads"] // heads) // row_block)
        read += passes * heads * padded * params["key_dim"] * element + heads * count * 8
        written += heads * len(after[0]) * 8
    return read, written


def _packed_compaction(params: Mapping, before: Sequence[Sequence[int]], after: Sequence[Sequence[int]], position: int) -> tuple[int, int]:
    """compaction_traffic of a compressed body: the tail is read, its sinks are copied, its other tokens are compressed and teach the
    codebook; body tokens that stay move when their slot changes; ranking reads the stored keys and the new ones once."""
    element, heads, dim, rows = layout.element_bytes(params), params["kv_heads"], params["key_dim"], params["tail_slots"]
    tail_base, full = position - rows, (dim + params["value_dim"]) * element
    to_sinks = min(max(params["sinks"] - tail_base, 0), rows)
    added, count = rows - to_sinks, len(before[0])
    token = layout.token_bytes(params) + 4
    moved = filled = latents = 0
    for old, new in zip(before, after, strict=True):
        slot_of = {p: i for i, p in enumerate(old)}
        moved += sum(p < tail_base and slot_of[p] != i for i, p in enumerate(new))
        filled += sum(p >= tail_base for p in new)
        latents = latents or (moved + filled) * layout.latent_bytes(params)  # there once, and moved with the first kv head
    taught = heads * dim * 80 if added else 0
    read = heads * rows * full + moved * token + taught + latents
    written = heads * to_sinks * full + (moved + filled) * token + taught + (heads * dim * 2 if added else 0) + latents
    scored = layout.keeps_scores(params)
    if scored or (layout.ranks_by_keys(params) and count + added > params["body_slots"]):
        magnitudes, _, pairs, _ = layout.record_parts(params)
        read += heads * (count * (dim // 8 + magnitudes + pairs) + added * dim * element)
    if scored:
        sinks = min(params["sinks"], position)
        read += (heads * sinks + params["observe"] * params["q_heads"]) * dim * element + heads * count * 8
        written += heads * len(after[0]) * 8
    return read, written
