"""The CUDA kernels of plugins/cuda, compiled with g++ over plugins/emulation and called on NumPy arrays.

"Device" memory is ordinary memory here. The library is built once per state of its sources, under build/.
"""

from __future__ import annotations

import ctypes
import hashlib
import subprocess
from collections.abc import Mapping
from ctypes import c_char_p, c_int, c_longlong, c_uint64, c_void_p
from pathlib import Path

import numpy as np

from edgekv import layout
from edgekv.engine.device import CudaRows, CudaStep

ROOT = Path(__file__).resolve().parents[1]
PLUGINS = ROOT / "plugins"
FLAGS = ["-std=c++17", "-O2", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Werror"]


def native_flags() -> list[str]:
    """-march=native where it only speeds up what is exact anyway: float16 conversions and fma."""
    return ["-march=native"]


def build(name: str, sources: list[Path], watched: list[Path], flags: tuple[str, ...] = ()) -> Path:
    """Compile CUDA sources for the emulation into build/emulation/, unless that has been done for the same text."""
    digest = hashlib.sha256(" ".join(flags).encode())
    for path in sorted({*sources, *watched}):
        digest.update(path.read_bytes())
    folder = ROOT / "build" / "emulation"
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / f"{name}-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        part = library.with_suffix(f".{id(digest)}.part")
        command = ["g++", *FLAGS, *native_flags(), *flags, "-DEDGEKV_EMULATE", f"-I{PLUGINS}", "-x", "c++", *map(str, sources), "-o", str(part)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        part.replace(library)
    return library


def watched_sources() -> list[Path]:
    return [p for room in ("cuda", "layout", "emulation") for p in (PLUGINS / room).iterdir() if p.is_file()]


def aligned(size: int) -> np.ndarray:
    """Bytes on a 256-byte boundary, filled with a pattern that is NaN in every float format."""
    block = np.full(size + 256, 0xFF, np.uint8)
    start = -block.ctypes.data % 256
    return block[start : start + size]


class Emulated:
    """The library, with the scheduling order as a setting (see cuda_emulation.h)."""

    def __init__(self):
        self.lib = ctypes.CDLL(str(build("kernels", [PLUGINS / "cuda/api.cu", PLUGINS / "emulation/emulation.cpp"], watched_sources())))
        self.lib.edgekv_cuda_last_error.restype = c_char_p
        self.lib.emulation_error.restype = c_char_p
        self.lib.emulation_sites.restype = c_char_p
        self.lib.edgekv_cuda_step_workspace.restype = c_longlong
        self.lib.edgekv_cuda_retrieve_workspace.restype = c_longlong
        self.lib.edgekv_cuda_compact_workspace.restype = c_longlong
        self.lib.emulation_configure.argtypes = [c_int, c_uint64]

    def order(self, order: int, seed: int = 0) -> None:
        self.lib.emulation_configure(order, seed)

    def drop(self, place: str) -> None:
        """Remove the barrier at "file:line"; "" restores all."""
        name, _, line = place.partition(":")
        self.lib.emulation_drop(name.encode(), int(line or 0))

    def sites(self) -> list[str]:
        return self.lib.emulation_sites().decode().split()

    def check(self, failed: int) -> None:
        if failed:
            raise RuntimeError(f"{self.lib.edgekv_cuda_last_error().decode()}: {self.lib.emulation_error().decode()}")


class EmulatedCache:
    """One layer's cache, with the interface of edgekv.reference.ReferenceCache."""

    def __init__(self, library: Emulated, params: Mapping, inv_freq=(), block: np.ndarray | None = None):
        self.library, self.params = library, layout.complete(params)
        self.packed = ctypes.create_string_buffer(layout.pack_params(self.params))
        self.inv_freq = np.asarray(inv_freq, np.float32)
        self.block = aligned(layout.state_bytes(self.params))
        self.block[:] = layout.new_state(self.params).block if block is None else block

    @property
    def view(self) -> layout.StateView:
        return layout.StateView(self.params, self.block)

    def attend(self, q, k, v, position, *, slots=None, half=False, **how) -> np.ndarray:
        """As the oracle; slots uint32 [kv_heads, T, body_slots/32] as `retrieve` gives them; `how` as in _step."""
        p = self.params
        y = np.full((len(q), p["q_heads"], p["value_dim"]), 7, np.float16 if half else np.float32)
        workspace = aligned(self.library.lib.edgekv_cuda_step_workspace(self.packed, len(q)))
        step, _keep = self._step(q, k, v, position, half=half, **how)
        step.y, step.slots = y.ctypes.data, None if slots is None else slots.ctypes.data
        self.library.check(
            self.library.lib.edgekv_cuda_step(
                self.packed, c_void_p(self.block.ctypes.data), ctypes.byref(step), c_void_p(workspace.ctypes.data), None
            )
        )
        return y

    def retrieve(self, q, position, **how) -> np.ndarray:
        """The body slots that each row should attend to, as bits: uint32 [kv_heads, T, body_slots/32]."""
        p = self.params
        slots = np.full((p["kv_heads"], len(q), p["body_slots"] // 32), 0xA5A5A5A5, np.uint32)
        workspace = aligned(self.library.lib.edgekv_cuda_retrieve_workspace(self.packed, len(q)))
        step, _keep = self._step(q, q, q, position, **how)
        self.library.check(
            self.library.lib.edgekv_cuda_retrieve(
                self.packed,
                c_void_p(self.block.ctypes.data),
                ctypes.byref(step),
                c_void_p(slots.ctypes.data),
                c_void_p(workspace.ctypes.data),
                None,
            )
        )
        return slots

    @staticmethod
    def _step(q, k, v, position, *, cos=None, sin=None, heads_first=False, half=False, half_table=False) -> tuple[CudaStep, list]:
        """The structure for a step, and the arrays it points into. q, k, v are handed over as [heads, T, dim] with heads_first, and as
        float16 with half; cos and sin with half_table."""
        keep = []

        def rows(x):
            x = np.ascontiguousarray(x.transpose(1, 0, 2) if heads_first else x, np.float16 if half else np.float32)
            keep.append(x)
            _, second, dim = x.shape
            strides = (dim, second * dim) if heads_first else (second * dim, dim)
            return CudaRows(x.ctypes.data, *strides)

        def table(x):
            if x is None:
                return None
            keep.append(np.ascontiguousarray(x, np.float16 if half_table else np.float32))
            return keep[-1].ctypes.data

        keep.append(np.array([position], np.int64))
        where = keep[-1].ctypes.data
        width = 0 if cos is None else cos.shape[-1]
        return CudaStep(rows(q), rows(k), rows(v), int(half), len(q), table(cos), table(sin), width, int(half_table), where), keep

    def compact(self, position: int, rank_base: int | None = None) -> None:
        workspace = aligned(self.library.lib.edgekv_cuda_compact_workspace(self.packed))
        frequencies = self.inv_freq.ctypes.data if self.inv_freq.size else None
        self.library.check(
            self.library.lib.edgekv_cuda_compact(
                self.packed,
                c_void_p(frequencies),
                c_void_p(self.block.ctypes.data),
                c_longlong(position),
                c_longlong(position if rank_base is None else rank_base),
                c_void_p(workspace.ctypes.data),
                None,
            )
        )


def slots_of(bits: np.ndarray) -> list[np.ndarray]:
    """Bits of the slots of many rows, uint32 [..., words], as one ascending array of slots per row, in order of the rows."""
    flags = np.unpackbits(np.ascontiguousarray(bits).view(np.uint8), axis=-1, bitorder="little")
    return [np.flatnonzero(row) for row in flags.reshape(-1, flags.shape[-1])]


def bits_of(slots: np.ndarray, body_slots: int) -> np.ndarray:
    """Slots int32 [kv_heads, T, k] as the CPU kernels give them, -1 for none, as bits: uint32 [kv_heads, T, body_slots/32]."""
    flags = np.zeros((*slots.shape[:2], body_slots), np.uint8)
    heads, rows, which = np.nonzero(slots >= 0)
    flags[heads, rows, slots[heads, rows, which]] = 1
    return np.packbits(flags, axis=-1, bitorder="little").view(np.uint32)
