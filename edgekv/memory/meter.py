"""Where every byte of a run goes: an engine that counts, between generation and the real one.

Per step: KV bytes as the kernels counted them (state headers); weights, activations and logits by formula; the split between
on-chip memory and DRAM by the residency model of the device. Over the whole run, hardware counters where the machine has them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from edgekv import layout
from edgekv.memory import counters, detect, estimate
from edgekv.memory.model import shape_from_bundle
from edgekv.memory.profiles import Profile
from edgekv.memory.weights import streams, weight_format

OWNERS = ("weights", "kv_index", "kv_payload", "kv_write", "compaction", "activations", "logits")
_PAYLOAD = [layout.TRAFFIC.index(f"read_{plane}") for plane in ("body_keys", "body_values", "tail_keys", "tail_values", "body_meta")]
_INDEX, _WRITE = layout.TRAFFIC.index("read_body_index"), layout.TRAFFIC.index("write_tail")
_COMPACT = [layout.TRAFFIC.index("compact_read"), layout.TRAFFIC.index("compact_write")]


class Step(NamedTuple):
    """One call of the engine. kind: prefill (more than one row of which one is wanted), decode or compaction; sizes in bytes."""

    kind: str
    began: float  # seconds since the meter was made
    seconds: float
    rows: int
    position: int
    bytes: dict[str, int]
    on_chip: float

    @property
    def dram(self) -> float:
        return sum(self.bytes.values()) - self.on_chip


@dataclass(frozen=True)
class Measured:
    """A counter's reading beside what the model says for the same time."""

    reading: counters.Reading
    modelled: float

    @property
    def ratio(self) -> float | None:
        """Measured over modelled DRAM bytes."""
        return None if self.reading.dram_bytes is None or not self.modelled else self.reading.dram_bytes / self.modelled


class MeteredEngine:
    """Wraps an engine of edgekv.engine; everything it does not count is passed on. `finish` ends the hardware counters."""

    def __init__(self, engine: Any, profile: Profile, hardware: bool = True):
        self._engine, self.profile = engine, profile
        shape = shape_from_bundle(engine.bundle.folder)
        name = str(engine.bundle.manifest.get("weights", {}).get("format", "int4"))
        stored = weight_format(name)
        self.weight_format = stored.name
        self._weights = sum(streams(shape, stored, profile.data["decode_on"]).values())
        rows = 2 * shape.hidden + 3 * shape.intermediate + 4 * max(g.q_heads * g.given_dim for g in shape.layers)
        self._activations, self._vocab = 8 * rows * len(shape.layers), shape.vocab
        self._rows = self._counters_of(engine)
        self.steps: list[Step] = []
        self.conditions = {"before": detect.clocks()}
        usable, self.unavailable = counters.usable(counters.all_counters(profile.value("memory.bus_width"), profile.memory_clock_mhz)) if hardware else ([], {})
        self._running = usable
        for counter in usable:
            counter.start()
        self._began = time.perf_counter()
        self.measured: list[Measured] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @staticmethod
    def _counters_of(engine: Any) -> list[np.ndarray]:
        """Views of the traffic counters in every state's header. UserError where the arena is not in this process's memory."""
        from edgekv.errors import UserError

        arena = engine.arena
        if arena is not engine.arena:
            raise UserError("--traffic reads the counters in the cache, which a TensorRT engine keeps on the GPU; use --engine onnxruntime.")
        views, start = [], 0
        for layer in engine.bundle.layers:
            views.append(arena[start : start + layout.HEADER.itemsize].view(layout.HEADER)["traffic"][0])
            start += -(-layer["bytes"] // 256) * 256
        return views

    def _counted(self) -> np.ndarray:
        return np.sum(self._rows, axis=0, dtype=np.uint64)

    def step(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        return self._metered(tokens, position, len(rows), lambda: self._engine.step(tokens, position, rows))

    def read(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        return self._metered(tokens, position, len(rows), lambda: self._engine.read(tokens, position, rows), "prefill")

    def _metered(self, tokens: np.ndarray, position: int, rows: int, run: Callable[[], Any], kind: str | None = None) -> Any:
        before, began = self._counted(), time.perf_counter()
        result = run()
        seconds = time.perf_counter() - began
        moved, count = (self._counted() - before).tolist(), len(tokens)
        sizes = {
            "weights": self._weights,
            "kv_index": moved[_INDEX],
            "kv_payload": sum(moved[i] for i in _PAYLOAD),
            "kv_write": moved[_WRITE],
            "activations": self._activations * count,
            "logits": 8 * self._vocab * rows,
        }
        kind = kind or ("prefill" if count > 1 and rows == 1 else "decode")
        self.steps.append(Step(kind, began - self._began, seconds, count, position, sizes, self._on_chip(sizes)))
        return result

    def compact(self, position: int) -> None:
        before, began = self._counted(), time.perf_counter()
        self._engine.compact(position)
        moved = (self._counted() - before).tolist()
        sizes = {"compaction": sum(moved[i] for i in _COMPACT)}
        self.steps.append(Step("compaction", began - self._began, time.perf_counter() - began, 0, position, sizes, 0.0))

    def _on_chip(self, sizes: dict[str, int]) -> float:
        """Modelled bytes served on chip: KV hits between steps, and what is written and read again within the step."""
        moved = estimate.StepBytes(sizes["weights"], sizes["kv_index"], sizes["kv_payload"], sizes["kv_write"], 0, 0)
        stay = estimate.residency(self.profile, moved)
        everything = stay.replacement == "lru" and moved.weights + moved.kv_read <= stay.capacity
        within = sizes["activations"] + sizes["logits"]
        capacity = self.profile.last_level_bytes or 0
        return stay.hit * moved.kv_read + (moved.weights if everything else 0) + (within if within <= capacity else 0)

    def finish(self) -> None:
        """Stops the hardware counters; called once, also after an error."""
        modelled = sum(step.dram for step in self.steps)
        for counter in self._running:
            self.measured.append(Measured(counter.stop(), modelled))
        self._running = []
        self.conditions["after"] = detect.clocks()

    # ---------------------------------------------------------------------------------------------------------- results

    def totals(self, kind: str) -> dict[str, Any]:
        """Sums over the steps of a kind: steps, rows, seconds, bytes by owner, on chip, DRAM."""
        steps = [s for s in self.steps if s.kind == kind]
        sizes = {owner: sum(s.bytes.get(owner, 0) for s in steps) for owner in OWNERS}
        return {
            "steps": len(steps),
            "rows": sum(s.rows for s in steps),
            "seconds": sum(s.seconds for s in steps),
            "bytes": {owner: size for owner, size in sizes.items() if size},
            "on_chip": sum(s.on_chip for s in steps),
            "dram": sum(s.dram for s in steps),
        }

    def joules_per_token(self) -> float | None:
        """Energy of the whole run per token fed or generated, from the first counter that measures energy."""
        rows = sum(s.rows for s in self.steps)
        joules = next((m.reading.joules for m in self.measured if m.reading.joules), None)
        return joules / rows if joules and rows else None

    def to_json(self, steps: bool = True) -> dict[str, Any]:
        """The whole account. Everything under `steps` and `totals` but KV bytes is modelled; KV bytes are counted."""
        return {
            "device": self.profile.name,
            "labels": {
                "kv_index": "counted by the kernels", "kv_payload": "counted by the kernels", "kv_write": "counted by the kernels",
                "compaction": "counted by the kernels", "weights": f"modelled: {self.weight_format} matrices, once per step",
                "activations": "modelled", "logits": "modelled", "on_chip": "modelled residency", "dram": "modelled residency",
                "measured": "hardware counters",
            },  # fmt: skip
            "totals": {kind: self.totals(kind) for kind in ("prefill", "decode", "compaction")},
            "residency": self.sentence(),
            "measured": [
                {
                    "counter": m.reading.counter, "seconds": m.reading.seconds, "dram_bytes": m.reading.dram_bytes, "modelled_dram_bytes": m.modelled,
                    "ratio": m.ratio, "joules": m.reading.joules, "covers": m.reading.covers, "resolution": m.reading.resolution, "details": m.reading.details,
                }
                for m in self.measured
            ],
            "unavailable": self.unavailable,
            "joules_per_token": self.joules_per_token(),
            "conditions": self.conditions,
            "steps": [s._asdict() | {"dram": s.dram} for s in self.steps] if steps else [],
        }  # fmt: skip

    def sentence(self) -> str:
        """What stays on chip in the last decode step, in words."""
        last = next((s for s in reversed(self.steps) if s.kind == "decode"), None)
        if last is None:
            return "No decode step was run."
        sizes = last.bytes
        return estimate.residency(self.profile, estimate.StepBytes(sizes["weights"], sizes["kv_index"], sizes["kv_payload"], sizes["kv_write"], 0, 0)).sentence
