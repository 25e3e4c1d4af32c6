"""The cache of an engine built without edgekv's plugin: keys and values of every layer as two tensors that TensorRT updates in place.

Where tokens lie and which of them a row sees is decided on the host, once per kind of layer (ring.py); nothing is moved at a boundary.
"""

from __future__ import annotations

import hashlib

import numpy as np

from edgekv import layout
from edgekv.bundle import Bundle
from edgekv.engine import Occupancy
from edgekv.engine.device_memory import DeviceMemory, padded
from edgekv.engine.ring import Ring
from edgekv.errors import CacheFullError, NativeError


def layer_rings(bundle: Bundle) -> list[Ring]:
    """One ring per layer; UserError for a policy that needs the plugin."""
    return [Ring(layer["params"]) for layer in bundle.layers]


class RingCache:
    """Rings of slots in device memory; the interface of DeviceCache.

    number  type of the stored numbers: that of the engine, float16 or float32
    chunk   most tokens of one step
    """

    def __init__(self, bundle: Bundle, memory: DeviceMemory, number: np.dtype, chunk: int):
        self.memory, self.number = memory, np.dtype(number)
        self._params = [layout.complete(layer["params"]) for layer in bundle.layers]
        self._rings = layer_rings(bundle)
        self._kinds = list({ring.key(): ring for ring in self._rings}.values())  # those of slot.0, mask.0, slot.1, ...
        self._shapes = [
            {name: (p["kv_heads"], ring.slots, p[f"{word}_dim"]) for name, word in (("k", "key"), ("v", "value"))}
            for p, ring in zip(self._params, self._rings, strict=True)
        ]
        names = [(f"{name}.{i}", shape) for i, shapes in enumerate(self._shapes) for name, shape in shapes.items()]
        sizes = [padded(int(np.prod(shape)) * self.number.itemsize) for _, shape in names]
        self.nbytes = sum(sizes)
        starts, self.contiguous = memory.alloc_cache(sizes)
        self.address = starts[0]
        self.tensors: dict[str, int] = {}
        for (name, _), address in zip(names, starts, strict=True):
            self.tensors[name] = self.tensors[f"{name}.out"] = address
        self._blocks = list(zip(starts, sizes, strict=True))
        self._slots = [memory.host((1,), np.int64) for _ in self._kinds]
        self._masks = [memory.host((chunk * ring.slots,), np.bool_) for ring in self._kinds]
        for index, (slot, mask) in enumerate(zip(self._slots, self._masks, strict=True)):
            self.tensors[f"slot.{index}"], self.tensors[f"mask.{index}"] = memory.alloc(slot.nbytes), memory.alloc(mask.nbytes)
        self._window: int | None = None
        self._tail_base = 0
        self.observe = 0  # these policies choose by no queries

    @staticmethod
    def needed_bytes(bundle: Bundle, number: np.dtype) -> int:
        """Device memory that keys and values take: up to two boundary intervals of slots more than with the plugin."""
        total = 0
        for layer, ring in zip(bundle.layers, layer_rings(bundle), strict=True):
            p = layer["params"]
            total += p["kv_heads"] * (p["key_dim"] + p["value_dim"]) * ring.slots * np.dtype(number).itemsize
        return total

    def prepare(self, position: int, count: int) -> None:
        """Says where `count` tokens at `position` go and what they see."""
        for ring, slot, mask in zip(self._kinds, self._slots, self._masks, strict=True):
            slot[0] = ring.slot(position)
            kept, hidden = len(ring.kept(self._tail_base)), (0, 0)
            if self._window is not None:
                hidden = layout.LANES, (kept - self._window) // layout.LANES * layout.LANES
            mask[: count * ring.slots] = ring.mask(position, count, self._tail_base, hidden).reshape(-1)

    def queue(self, count: int) -> None:
        """Copies what `prepare` wrote to the device, in stream order."""
        for index, (ring, slot, mask) in enumerate(zip(self._kinds, self._slots, self._masks, strict=True)):
            self.memory.write(self.tensors[f"slot.{index}"], slot)
            self.memory.write(self.tensors[f"mask.{index}"], mask[: count * ring.slots])

    def shapes(self, count: int) -> dict[str, tuple[int, ...]]:
        """Shapes of the inputs that depend on the step."""
        return {f"mask.{index}": (1, 1, count, ring.slots) for index, ring in enumerate(self._kinds)}

    @property
    def arena(self) -> np.ndarray:
        """A copy of all keys and values, uint8; taking it waits for the device."""
        out, start = np.empty(self.nbytes, np.uint8), 0
        for address, size in self._blocks:
            self.memory.read(out[start : start + size], address)
            start += size
        self.memory.wait()
        return out

    def look(self, window: int | None) -> None:
        self._window = window

    def hold_queries(self) -> None:
        raise NativeError("this cache chooses by no queries")

    def compact(self, position: int) -> int:
        for layer, (ring, p) in enumerate(zip(self._rings, self._params, strict=True)):
            if ring.full and position > p["body_slots"]:
                raise CacheFullError(f"layer {layer} holds {p['body_slots']} tokens and evicts none")
        self._tail_base = position
        return 0

    def reset(self) -> None:
        for address, size in self._blocks:
            self.memory.clear(address, size)
        self.memory.wait()
        self._tail_base, self._window = 0, None

    def _held(self, ring: Ring, position: int) -> np.ndarray:
        """Places in the text of all tokens that are kept at a committed position."""
        return np.concatenate([ring.kept(self._tail_base), np.arange(self._tail_base, position)])

    def state_hash(self, position: int) -> int:
        digest = hashlib.blake2b(position.to_bytes(8, "little"), digest_size=8)
        for layer, ring in enumerate(self._rings):
            held = self._held(ring, position)
            slots = [ring.slot(int(p)) for p in held]
            digest.update(held.tobytes())
            for name, shape in self._shapes[layer].items():
                block = np.empty(shape, self.number)
                self.memory.read(block, self.tensors[f"{name}.{layer}"])
                self.memory.wait()
                digest.update(np.ascontiguousarray(block[:, slots]).tobytes())
        return int.from_bytes(digest.digest(), "little")

    def occupancy(self, position: int) -> Occupancy:
        used, most = 0, None
        for ring, p in zip(self._rings, self._params, strict=True):
            kept = len(self._held(ring, position))
            used += kept * p["kv_heads"] * (p["key_dim"] + p["value_dim"]) * self.number.itemsize
            if most is None or kept > most[0]:
                most = kept, position - kept
        return Occupancy(self.nbytes, used, *most)
