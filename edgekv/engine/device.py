"""The CUDA side through ctypes: device memory, streams, graphs and the cache's compaction, all from one library.

The library is edgekv/_native/libedgekv_trt.so (tools/build_plugin.py); it also is the plugin library that TensorRT loads. It carries
the CUDA runtime in itself, so no Python package for CUDA is needed.
"""

from __future__ import annotations

import ctypes
import json
from ctypes import c_char_p, c_int, c_longlong, c_void_p
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.errors import NativeError, UserError
from edgekv.native import LayerParams

LIBRARY = Path(__file__).resolve().parents[1] / "_native" / "libedgekv_trt.so"
TO_DEVICE, TO_HOST, ON_DEVICE = 0, 1, 2


class CudaRows(ctypes.Structure):
    """EdgekvRows of plugins/cuda/api.h."""

    _fields_ = [("data", c_void_p), ("row_stride", c_longlong), ("head_stride", c_longlong)]


class CudaStep(ctypes.Structure):
    """EdgekvStep of plugins/cuda/api.h."""

    _fields_ = [
        ("q", CudaRows),
        ("k", CudaRows),
        ("v", CudaRows),
        ("half", c_int),
        ("rows", c_int),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("table", c_int),
        ("table_half", c_int),
        ("position", c_void_p),
        ("y", c_void_p),
        ("slots", c_void_p),
    ]


class Device:
    """One GPU. Raises UserError when the library is missing or cannot be loaded, NativeError when a call fails."""

    def __init__(self, library: Path = LIBRARY):
        if not library.is_file():
            raise UserError(f"The CUDA library {library} has not been built; run `python tools/build_plugin.py` in a clone of edgekv.")
        try:
            self.lib = ctypes.CDLL(str(library))
        except OSError as error:
            raise UserError(f"The CUDA library {library} cannot be loaded ({error}); run `python tools/build_plugin.py` again.") from None
        self.path = library
        pointer, params = ctypes.POINTER(c_void_p), ctypes.POINTER(LayerParams)
        for name, result, arguments in (
            ("edgekv_device_error", c_char_p, []),
            ("edgekv_device_info", c_char_p, []),
            ("edgekv_device_alloc", c_int, [pointer, c_longlong]),
            ("edgekv_device_free", c_int, [c_void_p]),
            ("edgekv_host_alloc", c_int, [pointer, c_longlong]),
            ("edgekv_host_free", c_int, [c_void_p]),
            ("edgekv_stream_create", c_int, [pointer]),
            ("edgekv_stream_destroy", c_int, [c_void_p]),
            ("edgekv_stream_wait", c_int, [c_void_p]),
            ("edgekv_copy", c_int, [c_void_p, c_void_p, c_longlong, c_int, c_void_p]),
            ("edgekv_stream_persist", c_int, [c_void_p, c_void_p, c_longlong, ctypes.POINTER(c_longlong)]),
            ("edgekv_graph_begin", c_int, [c_void_p]),
            ("edgekv_graph_end", c_int, [c_void_p, pointer]),
            ("edgekv_graph_launch", c_int, [c_void_p, c_void_p]),
            ("edgekv_graph_destroy", c_int, [c_void_p]),
            ("edgekv_cuda_last_error", c_char_p, []),
            ("edgekv_cuda_step_workspace", c_longlong, [params, c_int]),
            ("edgekv_cuda_step", c_int, [params, c_void_p, ctypes.POINTER(CudaStep), c_void_p, c_void_p]),
            ("edgekv_cuda_retrieve_workspace", c_longlong, [params, c_int]),
            ("edgekv_cuda_retrieve", c_int, [params, c_void_p, ctypes.POINTER(CudaStep), c_void_p, c_void_p, c_void_p]),
            ("edgekv_cuda_compact_workspace", c_longlong, [params]),
            ("edgekv_cuda_compact", c_int, [params, c_void_p, c_void_p, c_longlong, c_longlong, c_void_p, c_void_p]),
        ):
            function = getattr(self.lib, name)
            function.restype, function.argtypes = result, arguments

    def info(self) -> dict[str, Any]:
        """Facts about the device and drivers (plugins/trt/device.h); {"count": 0, "reason"} where there is none."""
        return json.loads(self.lib.edgekv_device_info())

    def check(self, failed: int) -> None:
        if failed:
            raise NativeError(self.lib.edgekv_device_error().decode())

    def _made(self, function, *arguments) -> int:
        out = c_void_p()
        self.check(function(ctypes.byref(out), *arguments))
        return out.value or 0

    def alloc(self, size: int) -> int:
        """Address of zeroed device memory, at least 256-byte aligned."""
        return self._made(self.lib.edgekv_device_alloc, size)

    def free(self, address: int) -> None:
        self.check(self.lib.edgekv_device_free(address))

    def host_array(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """An array in page-locked memory, which copies do not have to pass through a buffer; given back by `free_host`."""
        count = int(np.prod(shape))
        address = self._made(self.lib.edgekv_host_alloc, max(count * np.dtype(dtype).itemsize, 1))
        block = (ctypes.c_uint8 * (count * np.dtype(dtype).itemsize)).from_address(address)
        return np.frombuffer(block, dtype).reshape(shape)

    def free_host(self, array: np.ndarray) -> None:
        self.check(self.lib.edgekv_host_free(array.ctypes.data))

    def stream(self) -> int:
        return self._made(self.lib.edgekv_stream_create)

    def destroy_stream(self, stream: int) -> None:
        self.check(self.lib.edgekv_stream_destroy(stream))

    def wait(self, stream: int) -> None:
        self.check(self.lib.edgekv_stream_wait(stream))

    def copy(self, to: int, source: int, size: int, kind: int, stream: int) -> None:
        self.check(self.lib.edgekv_copy(to, source, size, kind, stream))

    def persist(self, stream: int, memory: int, size: int) -> int:
        """Asks L2 to keep this memory; returns the bytes of L2 set aside for it, 0 where the device cannot."""
        kept = c_longlong()
        self.check(self.lib.edgekv_stream_persist(stream, memory, size, ctypes.byref(kept)))
        return kept.value

    def capture(self, stream: int, work) -> int:
        """Records what work() queues on the stream as a CUDA graph; NativeError when that is not possible."""
        self.check(self.lib.edgekv_graph_begin(stream))
        out = c_void_p()
        try:
            work()
        finally:
            failed = self.lib.edgekv_graph_end(stream, ctypes.byref(out))
        self.check(failed)
        return out.value or 0

    def launch(self, graph: int, stream: int) -> None:
        self.check(self.lib.edgekv_graph_launch(graph, stream))

    def destroy_graph(self, graph: int) -> None:
        self.check(self.lib.edgekv_graph_destroy(graph))

    def step_workspace(self, params: LayerParams, rows: int) -> int:
        """Bytes of working memory for steps of up to `rows` rows."""
        return self.lib.edgekv_cuda_step_workspace(params, rows)

    def step(
        self, params: LayerParams, state: int, q: int, k: int, v: int, rows: int, position: int, y: int, workspace: int, stream: int, slots: int = 0
    ) -> None:
        """Queues one step of one layer outside a model: q, k, v, y float32 [rows, heads, dim], position one int64, all addresses in
        device memory. Rotation is left to the caller (fused_rotary = 0). Of a compressed cache: slots that `retrieve` found, 0 for all."""
        step = self._rows(params, q, k, v, rows, position)
        step.y, step.slots = y, slots or None
        if self.lib.edgekv_cuda_step(params, state, ctypes.byref(step), workspace, stream):
            raise NativeError(self.lib.edgekv_cuda_last_error().decode())

    def retrieve_workspace(self, params: LayerParams, rows: int) -> int:
        """Bytes of working memory for retrieval of up to `rows` rows."""
        return self.lib.edgekv_cuda_retrieve_workspace(params, rows)

    def retrieve(self, params: LayerParams, state: int, q: int, rows: int, position: int, slots: int, workspace: int, stream: int) -> None:
        """Queues the choice of a compressed body's slots for up to 16 rows: uint32 [kv_heads, rows, body_slots / 32], one bit per slot."""
        step = self._rows(params, q, q, q, rows, position)
        if self.lib.edgekv_cuda_retrieve(params, state, ctypes.byref(step), slots, workspace, stream):
            raise NativeError(self.lib.edgekv_cuda_last_error().decode())

    @staticmethod
    def _rows(params: LayerParams, q: int, k: int, v: int, rows: int, position: int) -> CudaStep:
        widths = ((params.q_heads, params.key_dim), (params.kv_heads, params.key_dim), (params.kv_heads, params.value_dim))
        views = [CudaRows(address, heads * dim, dim) for address, (heads, dim) in zip((q, k, v), widths, strict=True)]
        return CudaStep(*views, 0, rows, None, None, 0, 0, position)

    def compact_workspace(self, params: LayerParams) -> int:
        """Bytes of working memory that a compaction of such a layer needs."""
        return self.lib.edgekv_cuda_compact_workspace(params)

    def compact(self, params: LayerParams, inv_freq: int, state: int, position: int, rank_base: int, workspace: int, stream: int) -> None:
        """Queues the compaction of one layer; addresses are device memory (inv_freq 0 when there is none)."""
        if self.lib.edgekv_cuda_compact(params, inv_freq or None, state, position, rank_base, workspace, stream):
            raise NativeError(self.lib.edgekv_cuda_last_error().decode())
