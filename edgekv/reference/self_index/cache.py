"""One layer's cache with compressed keys and values: a step scans the sign codes, re-ranks the best by their quantised keys and
attends to the winners; compaction compresses the tail."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from edgekv import layout
from edgekv.errors import CacheFullError, UserError
from edgekv.layout import KEEPS, read_keys, write_keys
from edgekv.reference.attention import key_scores, softmax, visible
from edgekv.reference.keep import RULES
from edgekv.reference.scores import key_ranking, observe, ranking
from edgekv.reference.self_index import index_plane, ranking as second_ranking, signs
from edgekv.reference.self_index.quantise import dequantise, pack, quantise, unbiased, unpack
from edgekv.reference.self_index.transform import hadamard


class SelfIndexCache:
    """The compressed cache of one decoder layer over one state block.

    params      fields of attributes.def, with format = selfindex
    retrieve    compressed tokens each row attends to; None: all of them (dense, as while a prompt is read)
    candidates  of the best by the scan so many are ranked again by their quantised keys; up to `retrieve`: the scan alone decides
    """

    def __init__(self, params: Mapping, retrieve: int | None = None, candidates: int = 0):
        if not layout.is_selfindex(params):
            raise UserError("The parameters are those of a dense cache.")
        self.state = layout.new_state(params)
        self.params, self.block = self.state.params, self.state.block
        self.retrieve, self.candidates = retrieve, candidates

    # ---- what is stored, in slot order: sinks, body, tail

    @property
    def count(self) -> int:
        """Compressed tokens per kv head."""
        return int(self.state.header["body_count"])

    @property
    def tail_base(self) -> int:
        return int(self.state.header["tail_base"])

    @property
    def sink_count(self) -> int:
        """Sinks that have left the tail."""
        return min(self.params["sinks"], self.tail_base)

    def codes(self) -> np.ndarray:
        """Sign codes of the body: uint8 [kv_heads, count, key_dim/4]."""
        return index_plane.read(self.state.index, 0, self.count)

    def body(self) -> tuple[np.ndarray, np.ndarray]:
        """Dequantised keys and values of the body: float32 [kv_heads, count, key_dim] and [..., value_dim]."""
        p = self.params
        magnitude, value, key_pairs, value_pairs = self._record_parts()
        magnitude = dequantise(unpack(magnitude, p["key_bits"]), as_pairs(key_pairs), p["key_dim"])
        value = dequantise(unpack(value, p["value_bits"]), as_pairs(value_pairs), p["value_dim"])
        keys = hadamard(signs.signs_of(self.codes()) * magnitude) + self._means_of_slots()
        return keys, hadamard(value)

    def _record_parts(self) -> list[np.ndarray]:
        """Magnitude codes, value codes, pairs of keys and of values of the body's records, bytes [kv_heads, count, ...]."""
        *ends, size = np.cumsum(layout.record_parts(self.params))
        return np.split(self.state.payload[:, : self.count, :size], ends, axis=-1)

    def everything(self, tail_rows: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Keys, values (float32) and positions (int64) [kv_heads, n, ...] of sinks, body and tail rows, in order of position."""
        s, heads = self.state, self.params["kv_heads"]
        body_keys, body_values = self.body()
        keys = [read_keys(s.sink_k, 0, self.sink_count), body_keys, read_keys(s.tail_k, 0, tail_rows)]
        values = [s.sink_v[:, : self.sink_count], body_values, s.tail_v[:, :tail_rows]]
        sinks, tail = np.arange(self.sink_count), self.tail_base + np.arange(tail_rows)
        where = [np.tile(sinks, (heads, 1)), s.body_pos[:, : self.count], np.tile(tail, (heads, 1))]
        return tuple(np.concatenate(parts, axis=1) for parts in (keys, [v.astype(np.float32) for v in values], where))

    # ---- the step

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, position: int) -> np.ndarray:
        """As ReferenceCache.attend: T rows of q, k, v, y float32 [T, q_heads, value_dim]. Every row retrieves for itself."""
        p, s = self.params, self.state
        first, rows = position - self.tail_base, len(q)
        if first < 0 or first + rows > p["tail_slots"] or rows < 1:
            raise UserError(f"{rows} rows at position {position} do not fit the interval that starts at {self.tail_base}.")
        write_keys(s.tail_k, first, k.transpose(1, 0, 2))
        s.tail_v[:, first : first + rows] = v.transpose(1, 0, 2)
        if layout.keeps_scores(p):
            for row in range(rows):
                observed = first + row - (p["tail_slots"] - p["observe"])
                if observed >= 0:
                    s.tail_q[:, observed] = q[row]
        keys, values, where = self.everything(first + rows)
        y = np.empty((rows, p["q_heads"], p["value_dim"]), np.float32)
        for row in range(rows):
            n = self.sink_count + self.count + first + row + 1
            query = q[row].astype(np.float32).reshape(p["kv_heads"], -1, p["key_dim"])
            seen = visible(where[:, :n], position + row, p["sliding_window"])
            scores = key_scores(query, keys[:, :n], p["scale"], p["softcap"])
            if self.retrieve is not None:
                self._retrieve(query, scores, seen)
            weights = softmax(scores, seen)
            y[row] = np.matmul(weights, values[:, :n]).reshape(p["q_heads"], p["value_dim"])
        return y

    def retrieved_slots(self, query: np.ndarray, seen: np.ndarray) -> list[np.ndarray]:
        """Body slots that one row attends to, ascending, one array per kv head.

        query float32 [kv_heads, group, key_dim]; seen bool [kv_heads, count] of the body.
        """
        p, chosen, codes, intervals = self.params, [], self.codes(), self._interval_of_slots()
        newest, means = max(self.tail_base // p["tail_slots"] - 1, 0), self.state.mean.astype(np.float32)
        for head in range(p["kv_heads"]):
            allowed = np.flatnonzero(seen[head])
            together = np.float32(p["scale"]) * query[head].sum(0, dtype=np.float32)
            table, step = signs.score_table(hadamard(together), self.state.codebook[head])
            bias = signs.interval_bias(together, means[head], newest, step)
            score = signs.scan(table, codes[head, allowed]) + bias[intervals[head, allowed]]
            wanted = min(self.retrieve, len(allowed))
            candidates = allowed[signs.best(score, max(wanted, self.candidates))]
            if len(candidates) > wanted:
                score = self.whole_scores(query, head, candidates)
                weight = second_ranking.weights(score, p["softcap"])
                candidates = candidates[signs.best(weight, wanted)]
            chosen.append(candidates)
        return chosen

    def whole_scores(self, query: np.ndarray, head: int, slots: np.ndarray) -> np.ndarray:
        """Scores of body slots for the query heads of a kv head, from whole numbers: float32 [group, len(slots)], see ranking.scores."""
        p = self.params
        magnitude, _, key_pairs, _ = self._record_parts()
        stored = unpack(magnitude[head, slots], p["key_bits"]), as_pairs(key_pairs[head, slots])
        return second_ranking.scores(
            query[head], hadamard(query[head]), *stored, signs.signs_of(self.codes()[head, slots]), p["key_bits"],
            self.state.mean[head].astype(np.float32), self._interval_of_slots()[head, slots], p["scale"], p["softcap"],
        )  # fmt: skip

    def _retrieve(self, query: np.ndarray, scores: np.ndarray, seen: np.ndarray) -> None:
        """Of the body, leaves only what one row retrieves in seen [kv_heads, n], and puts its scores from whole numbers into scores."""
        softcap, part = np.float32(self.params["softcap"]), slice(self.sink_count, self.sink_count + self.count)
        chosen = self.retrieved_slots(query, seen[:, part])
        seen[:, part] = False
        for head, slots in enumerate(chosen):
            score = self.whole_scores(query, head, slots)
            scores[head][:, self.sink_count + slots] = softcap * np.tanh(score) if softcap else score / second_ranking.LOG2_E
            seen[head, self.sink_count + slots] = True

    # ---- compaction

    def compact(self, position: int) -> None:
        """Compress the tail into the body; the first `sinks` tokens of the text go to the sink planes instead."""
        p, s = self.params, self.state
        rows = p["tail_slots"]
        if position != self.tail_base + rows or self.tail_base // rows >= p["intervals"]:
            raise UserError(f"compaction at position {position} is not possible: the last boundary was {self.tail_base}.")
        score, pairs = self._scores(rows)
        to_sinks = min(max(p["sinks"] - self.tail_base, 0), rows)
        candidates = self.count + rows - to_sinks
        if candidates > p["body_slots"] and p["keep"] == KEEPS["full"]:
            raise CacheFullError(f"The cache keeps every token and is full: {candidates} do not fit {p['body_slots']} slots.")
        tail_k, tail_v = read_keys(s.tail_k, 0, rows), s.tail_v.astype(np.float32)
        if to_sinks:
            write_keys(s.sink_k, self.tail_base, tail_k[:, :to_sinks])
            s.sink_v[:, self.tail_base : self.tail_base + to_sinks] = s.tail_v[:, :to_sinks]
        codes, records = self._compress(tail_k[:, to_sinks:], tail_v[:, to_sinks:])
        codes = np.concatenate([self.codes(), codes], axis=1)
        records = np.concatenate([s.payload[:, : self.count], records], axis=1)
        new = np.tile(np.arange(self.tail_base + to_sinks, position), (p["kv_heads"], 1))
        where = np.concatenate([s.body_pos[:, : self.count], new], axis=1)

        kept = np.tile(np.arange(candidates), (p["kv_heads"], 1))
        if candidates > p["body_slots"]:  # sinks have planes of their own, so the rule sees none
            ranks = ranking(score, pairs, bool(p["score_normalise"]))
            if layout.ranks_by_keys(p):
                ranks = key_ranking(np.concatenate([self.body()[0], tail_k[:, to_sinks:]], axis=1))
            kept = RULES[p["keep"]](p | {"sinks": 0}, ranks)
        count = kept.shape[1]
        index_plane.write(s.index, _take(codes, kept))
        s.payload[:, :count] = _take(records, kept)
        s.body_pos[:, :count] = _take(where, kept)
        if layout.keeps_scores(p):
            s.body_score[:, :count], s.body_seen[:, :count] = _take(score, kept), _take(pairs, kept)
        s.header["evicted"] += candidates - count
        s.header["body_count"] = count
        s.header["tail_base"] = s.header["rank_base"] = position

    def _compress(self, keys: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Sign codes and records of new tokens; stores their mean key and teaches the codebook."""
        p, s = self.params, self.state
        interval = self.tail_base // p["tail_slots"]
        if keys.shape[1]:
            s.mean[:, interval] = keys.mean(1, dtype=np.float32)
        spread = hadamard(keys - s.mean[:, interval, None].astype(np.float32))
        codes = signs.sign_codes(spread)
        for head in range(p["kv_heads"]):
            signs.learn(s.codebook[head], s.code_seen[head], spread[head], codes[head])
        magnitude, key_pairs = self._key_parts(spread)
        value, value_pairs = quantise(hadamard(values), p["value_bits"])
        records = np.concatenate([magnitude, pack(value, p["value_bits"]), key_pairs, _as_bytes(value_pairs)], axis=-1)
        return codes, np.pad(records, ((0, 0), (0, 0), (0, layout.record_bytes(p) - records.shape[-1])))

    def _key_parts(self, spread: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What records hold of transformed keys less their mean, float32 [kv_heads, n, key_dim]: magnitudes and pairs, bytes [kv_heads, n, ...]."""
        bits = self.params["key_bits"]
        magnitude, pairs = quantise(np.abs(spread), bits)
        return pack(magnitude, bits), _as_bytes(unbiased(np.abs(spread), magnitude, pairs))

    def _scores(self, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Scores and observing pairs of body and tail without sinks, as the dense cache has them: float32 [kv_heads, n]."""
        p, s, count = self.params, self.state, self.count
        keys, _, where = self.everything(rows)
        drop = self.sink_count + min(max(p["sinks"] - self.tail_base, 0), rows)
        score, pairs = np.zeros((2, p["kv_heads"], where.shape[1] - drop), np.float32)
        if not layout.keeps_scores(p):
            return score, pairs
        decay = np.float32(p["score_decay"])
        score[:, :count], pairs[:, :count] = s.body_score[:, :count] * decay, s.body_seen[:, :count] * decay
        query_pos = self.tail_base + rows - p["observe"] + np.arange(p["observe"])
        queries = s.tail_q.astype(np.float32)
        added = observe(queries, query_pos, keys, where, p["scale"], p["softcap"], p["sliding_window"])
        return score + added[0][:, drop:], pairs + added[1][:, drop:]

    def _interval_of_slots(self) -> np.ndarray:
        """Boundary interval of each body slot: int64 [kv_heads, count]."""
        return self.state.body_pos[:, : self.count] // self.params["tail_slots"]

    def _means_of_slots(self) -> np.ndarray:
        mean, interval = self.state.mean.astype(np.float32), self._interval_of_slots()
        return np.take_along_axis(mean, interval[..., None], axis=1)


def _take(plane: np.ndarray, slots: np.ndarray) -> np.ndarray:
    """Entries `slots` [heads, m] of every head's row of a plane [heads, n, ...]."""
    return np.take_along_axis(plane, slots.reshape(slots.shape + (1,) * (plane.ndim - 2)), axis=1)


def _as_bytes(pairs: np.ndarray) -> np.ndarray:
    """fp16 pairs [heads, n, groups, 2] as uint8 [heads, n, 4 * groups]."""
    return pairs.view(np.uint8).reshape(*pairs.shape[:2], 4 * pairs.shape[2])


def as_pairs(part: np.ndarray) -> np.ndarray:
    """Inverse of _as_bytes."""
    return np.ascontiguousarray(part).view(np.float16).reshape(*part.shape[:-1], part.shape[-1] // 4, 2)
