"""ONNX Runtime on an NVIDIA GPU (onnxruntime-gpu): the bundle's own graph, the CUDA kernels behind its attention, no engine to build.

The states stay in device memory and are bound as input and output on the same bytes; the host sees token ids, logits and, for
reports, headers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnxruntime as ort

from edgekv import layout
from edgekv.bundle import Bundle
from edgekv.engine import Occupancy
from edgekv.engine.device import Device
from edgekv.engine.device_cache import DeviceCache
from edgekv.engine.device_memory import DeviceMemory
from edgekv.engine.onnxruntime import open_session, run_bound, session_options
from edgekv.errors import NativeError, UserError

PROVIDER = "CUDAExecutionProvider"


def refusal(bundle: Bundle | None = None) -> str | None:
    """Why bundles, or this one, run on the CPU here; None when the GPU can run them."""
    if PROVIDER not in ort.get_available_providers():
        return "this ONNX Runtime has no CUDA provider: pip install onnxruntime-gpu in place of onnxruntime"
    try:
        info = Device().info()
    except UserError as error:
        return str(error)
    if not info["count"]:
        return f"no CUDA device ({info['reason']})"
    if bundle is not None and bundle.compressed:
        return "compressed caches have no CUDA operators in ONNX Runtime"
    params = [layout.complete(layer["params"]) for layer in bundle.layers] if bundle is not None else []
    if any(p["latent"] or p["head_dim"] for p in params):
        return "thin keys have no CUDA operators in ONNX Runtime"
    return None


class OnnxRuntimeCudaEngine:
    """Runs a bundle on the GPU; see `edgekv.engine.Engine` for what each method promises.

    max_rows   rows of logits that one step can give
    providers  ONNX Runtime's, with `place`, the name it has for their memory

    Raises UserError when device memory does not suffice, BundleError when the graph and the manifest disagree.
    """

    threads = 1

    def __init__(self, bundle: Bundle, max_rows: int = 1, *, device: Device | None = None, providers: Any = None, place: str = "cuda"):
        self.bundle, self.boundary, self.chunk = bundle, bundle.boundary, min(bundle.chunk, bundle.boundary)
        self.max_rows, self.vocab, self.capacity, self.retrieval = max_rows, bundle.model["vocab"], bundle.capacity, None
        self._device, self._place = device or Device(), place
        self._check_memory()
        # Only what is asked for: by default the provider doubles its pool, beside a cache whose size was planned.
        options = {"device_id": "0", "arena_extend_strategy": "kSameAsRequested"}
        session, self._has_shift, _ = open_session(
            bundle, session_options(1, library=self._device.path), providers or [(PROVIDER, options), "CPUExecutionProvider"]
        )
        self._session: ort.InferenceSession | None = session
        self._memory = DeviceMemory(self._device)
        try:
            self._cache = DeviceCache(bundle, self._memory)
        except BaseException:
            self.close()
            raise
        self.contiguous, self.observe = self._cache.contiguous, self._cache.observe
        self._logits = np.zeros((1, max_rows, self.vocab), np.float32)
        self._shift = 0
        self.reset()

    def _check_memory(self) -> None:
        free = self._device.info().get("free_bytes")
        cache, logits = DeviceCache.needed_bytes(self.bundle, self._device), self.max_rows * self.vocab * 4
        needed = self.bundle.weight_bytes + cache + logits
        if free is not None and needed > free:
            raise UserError(
                f"{self.bundle.folder} needs {needed >> 20} MiB of device memory (weights {self.bundle.weight_bytes >> 20} MiB, KV cache "
                f"{cache >> 20} MiB) and {free >> 20} MiB are free; close other programs or export with a smaller --kv-budget or "
                "smaller --weights."
            )

    @property
    def arena(self) -> np.ndarray:
        """A copy of the cache, uint8; taking it waits for the device."""
        return self._cache.arena

    def step(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        count, wanted = len(tokens), len(rows)
        if not (1 <= count <= self.chunk and 1 <= wanted <= self.max_rows):
            raise NativeError(f"a step of {count} tokens and {wanted} rows is outside 1..{self.chunk} and 1..{self.max_rows}")
        if not 0 <= position - self._tail_base <= self.boundary - count:
            raise NativeError(f"{count} tokens after position {position} do not fit the tail that starts at {self._tail_base}")
        # ONNX Runtime copies an input of the host to where its nodes are when it is bound, so the small ones are bound anew.
        binding, size = self._session.io_binding(), self._logits[:, :wanted]
        for name, values in (("input_ids", [tokens]), ("position", [position]), ("rows", rows), ("shift", [self._shift])):
            if name != "shift" or self._has_shift:
                binding.bind_cpu_input(name, np.ascontiguousarray(values, np.int64))
        for layer, params in enumerate(self.bundle.layers):
            for bind, name in ((binding.bind_input, f"state.{layer}"), (binding.bind_output, f"state.{layer}.out")):
                bind(name, self._place, 0, np.int8, [params["bytes"]], self._cache.tensors[name])
        binding.bind_output("logits", "cpu", 0, np.float32, size.shape, size.ctypes.data)
        run_bound(self._session, binding, self.bundle)
        return size[0]

    def look(self, window: int | None, tokens: np.ndarray | None = None) -> int:
        self._cache.look(window)
        return 0

    def hold_queries(self) -> None:
        self._cache.hold_queries()

    def compact(self, position: int) -> None:
        self._shift = self._cache.compact(position)
        self._memory.wait()  # the session has a stream of its own
        self._tail_base = position

    def reset(self) -> None:
        self._cache.reset()
        self._tail_base = self._shift = 0

    def state_hash(self, position: int) -> int:
        return self._cache.state_hash(position)

    def occupancy(self, position: int) -> Occupancy:
        return self._cache.occupancy(position)

    def close(self) -> None:
        self._session = self._cache = None
        self._memory.close()
