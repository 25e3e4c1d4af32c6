"""The cache states of all layers in device memory, for every engine that runs the CUDA kernels: one arena, compaction, reports.

The host never reads keys and values, only the headers, and those for reports. How many tokens a body holds follows from the position.
"""

from __future__ import annotations

import numpy as np

from edgekv import layout, native
from edgekv.bundle import Bundle
from edgekv.engine import Occupancy, Reads, accounting
from edgekv.engine.device import ON_DEVICE, Device
from edgekv.engine.device_memory import ALIGNMENT, DeviceMemory, padded
from edgekv.engine.index import Index
from edgekv.errors import CacheFullError, NativeError
from edgekv.retrieval import Retrieval


class DeviceCache:
    """States as plugins/layout/state_layout.h describes them, one per layer.

    tensors     name of a graph's input or output -> address: a state and its output are the same memory
    contiguous  whether all states lie in one block, which L2 can be told to keep
    """

    def __init__(self, bundle: Bundle, memory: DeviceMemory):
        self.bundle, self.memory = bundle, memory
        self._params = [native.LayerParams(**layer["params"]) for layer in bundle.layers]
        self._ranked = bundle.layers[0]["params"].get("positions") == layout.POSITIONS["cache"]
        self._rank_limit = max(p.body_slots for p in self._params)
        self._tail_base = 0
        sizes = [layer["bytes"] for layer in bundle.layers]
        self.nbytes = bundle.arena_bytes
        self._states, self.contiguous = memory.alloc_cache(sizes)
        self.address = self._states[0]
        self.tensors: dict[str, int] = {}
        for index, state in enumerate(self._states):
            self.tensors[f"state.{index}"] = self.tensors[f"state.{index}.out"] = state
        self._workspace = memory.alloc(max(memory.device.compact_workspace(p) for p in self._params))
        tables = [np.asarray(bundle.inv_freq(i), np.float32) for i in range(len(self._params))]
        self._inv_freq = [memory.upload(t) if t.size else 0 for t in tables]
        self._fresh = [self._beginning(p) for p in self._params]  # what reset copies; zeros follow
        self._headers = memory.host((len(self._params), layout.HEADER.itemsize), np.uint8)  # copies, as of the last look at them
        self._index = Index(bundle, self._headers)
        self._hidden = memory.host((len(self._params), 2), np.int32)  # hidden_from, hidden_to
        self.observe = max(p.observe if p.score == layout.SCORES["attention"] else 0 for p in self._params)
        self._held_queries: list[int] = []  # memory for what hold_queries finds, taken when it is first needed
        self._holds_queries = False

    @staticmethod
    def needed_bytes(bundle: Bundle, device: Device) -> int:
        """Device memory that the states and their compaction take."""
        params = [native.LayerParams(**layer["params"]) for layer in bundle.layers]
        return sum(padded(layer["bytes"]) for layer in bundle.layers) + max(device.compact_workspace(p) for p in params)

    def _beginning(self, params: native.LayerParams) -> np.ndarray:
        """The bytes of an empty state up to its last one that is not zero, page-locked."""
        fresh = native.new_state(params)
        part = fresh[: int(np.flatnonzero(fresh)[-1]) + 1]
        kept = self.memory.host(part.shape, np.uint8)
        kept[:] = part
        return kept

    def prepare(self, position: int, count: int) -> None:
        """Before a step of `count` tokens: nothing, the kernels read the position themselves."""

    def queue(self, count: int) -> None:
        """Copies that belong to a step: none."""

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Shapes of inputs of the cache that depend on the step: none."""
        return {}

    # ---- retrieval from compressed layers

    @property
    def retrieval(self) -> Retrieval | None:
        return self._index.amount

    def retrieve(self, amount: Retrieval, rerank: int | None) -> None:
        self._index.retrieve(amount, rerank)

    def reads(self) -> Reads:
        self._read_headers()
        return self._index.reads()

    def attend_to_all(self) -> bool:
        """Queues what makes the next steps attend to every compressed token; False: they do not retrieve."""
        self._send(self._index.attend_to_all())
        return False

    def choose(self) -> bool:
        """Queues what makes the next steps retrieve; whether they do."""
        self._send(self._index.choose())
        return any(self._fields(header)["retrieve"][0] for header in self._headers)

    @staticmethod
    def _fields(header: np.ndarray) -> np.ndarray:
        return header.view(layout.HEADER)

    def _send(self, changed: bool) -> None:
        at = layout.HEADER.fields["retrieve"][1]
        for params, state, header in zip(self._params, self._states, self._headers, strict=True):
            if changed and params.format == layout.FORMATS["selfindex"]:
                self.memory.write(state + at, header[at : at + 8])  # retrieve, candidates

    def _read_headers(self) -> None:
        for header, state in zip(self._headers, self._states, strict=True):
            self.memory.read(header, state)
        self.memory.wait()

    def _grown(self, position: int) -> None:
        """Bodies fill up before anything is evicted, so their counts need not be read."""
        self._tail_base = position
        for params, header in zip(self._params, self._headers, strict=True):
            apart = params.sinks if params.format == layout.FORMATS["selfindex"] else 0  # tokens with planes of their own
            self._fields(header)["body_count"] = min(max(position - apart, 0), params.body_slots)
        self._index.grown()

    @property
    def arena(self) -> np.ndarray:
        """A copy of all states, uint8 [bytes of the arena]; taking it waits for the device."""
        out, start = native.aligned_bytes(self.bundle.arena_bytes, ALIGNMENT), 0
        for state, layer in zip(self._states, self.bundle.layers, strict=True):
            self.memory.read(out[start : start + layer["bytes"]], state)
            start += padded(layer["bytes"])
        self.memory.wait()
        return out

    def look(self, window: int | None) -> None:
        lanes, at = layout.LANES, layout.HEADER.fields["hidden_from"][1]
        self._index.limit(window)
        for index, (params, state) in enumerate(zip(self._params, self._states, strict=True)):
            if params.format == layout.FORMATS["selfindex"]:
                continue
            kept = min(self._tail_base, params.body_slots)  # while everything fits everything is kept
            end = 0 if window is None else (kept - window) // lanes * lanes
            self._hidden[index] = (lanes, end) if end > lanes else 0
            self.memory.write(state + at, self._hidden[index])
        self.memory.wait()

    def _query_planes(self) -> list[tuple[int, int]]:
        """Address and bytes of the observed queries of each state."""
        planes = []
        for layer, state in zip(self.bundle.layers, self._states, strict=True):
            at = layout.state_layout(layer["params"])
            planes.append((state + at.tail_q, layer["bytes"] - at.tail_q if layout.keeps_scores(layer["params"]) else 0))
        return planes

    def _copy_queries(self, back: bool) -> None:
        for (plane, size), kept in zip(self._query_planes(), self._held_queries, strict=True):
            if size:
                to, source = (plane, kept) if back else (kept, plane)
                self.memory.device.copy(to, source, size, ON_DEVICE, self.memory.stream)

    def hold_queries(self) -> None:
        """See `edgekv.engine.Engine`; on the device."""
        if not self.observe:
            raise NativeError("this cache chooses by no queries")
        if not self._held_queries:
            self._held_queries = [self.memory.alloc(size) for _, size in self._query_planes()]
        self._copy_queries(back=False)
        self.memory.wait()
        self._holds_queries = True

    def compact(self, position: int) -> int:
        """Queues the compaction of every layer; returns by how much ranks now differ from places in the text."""
        rank = min(position, self._rank_limit) if self._ranked else position
        for params, layer in zip(self._params, self.bundle.layers, strict=True):
            held = layout.held_tokens(layer["params"])
            if params.keep == layout.KEEPS["full"] and position > held:
                raise CacheFullError(f"layer {params.layer} holds {held} tokens and evicts none")
        if self._holds_queries:
            self._copy_queries(back=True)
            self._holds_queries = False
        for params, table, state in zip(self._params, self._inv_freq, self._states, strict=True):
            self.memory.device.compact(params, table, state, position, rank, self._workspace, self.memory.stream)
        self._grown(position)
        return position - rank

    def reset(self) -> None:
        for state, layer, fresh in zip(self._states, self.bundle.layers, self._fresh, strict=True):
            self.memory.write(state, fresh)
            self.memory.clear(state + fresh.nbytes, layer["bytes"] - fresh.nbytes)
        self.memory.wait()
        self._grown(0)
        self._holds_queries = False

    def state_hash(self, position: int) -> int:
        arena, starts = self.arena, np.cumsum([0, *(padded(layer["bytes"]) for layer in self.bundle.layers)]).tolist()
        states = [arena[start : start + layer["bytes"]] for start, layer in zip(starts, self.bundle.layers, strict=False)]
        return accounting.combined(native.state_hash(p, state, position) for p, state in zip(self._params, states, strict=True))

    def occupancy(self, position: int) -> Occupancy:
        self._read_headers()
        return accounting.occupancy(self.bundle, map(self._fields, self._headers), position - self._tail_base)
