"""Engines run one bundle; generation sees only this protocol.

An engine owns the arena (all cache states in one allocation) and the model. It holds no text and takes no decision: the
session above it says which tokens stand where, and when a boundary is reached.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from edgekv.bundle import Bundle
from edgekv.retrieval import Retrieval

KINDS = ("onnxruntime", "tensorrt")


class Occupancy(NamedTuple):
    """How full the cache is at a committed position."""

    allocated: int  # bytes of the arena
    used: int  # bytes of keys and values of committed tokens, all layers
    kept: int  # tokens kept, in the layer that keeps most
    evicted: int  # tokens dropped so far, in the layer that keeps most


class Reads(NamedTuple):
    """What the attention steps of a compressed cache read since the cache was emptied, counted by the kernels."""

    steps: int  # of the model
    index_bytes: int  # sign codes that were scanned, all layers
    payload_bytes: int  # records of compressed tokens, all layers
    retrieved: int  # compressed tokens that a generated token attends to now, in the layer that holds most
    compressed: int  # compressed tokens there

    def since(self, before: Reads) -> Reads:
        """What was read after `before`."""
        more = (now - then for now, then in zip(self[:3], before[:3], strict=True))
        return Reads(*more, self.retrieved, self.compressed)


class Engine(Protocol):
    """What a session needs. All calls come from one thread."""

    bundle: Bundle
    boundary: int  # E: tokens between compactions, a power of two or any multiple of 16
    chunk: int  # most rows of one step
    max_rows: int  # most rows of logits of one step
    vocab: int  # logits per row
    capacity: int | None  # tokens that fit into a fresh cache; None: no end
    observe: int  # tokens at the end of an interval whose queries decide what compaction keeps; 0: none
    threads: int
    arena: np.ndarray  # uint8 [bytes], the memory of all states
    retrieval: Retrieval | None  # compressed tokens that a row of `step` attends to; None: the cache is not compressed

    def step(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        """Runs T tokens that follow `position` committed ones; returns logits of the wanted rows.

        tokens  int64 [T], 1 <= T <= chunk, and T never reaches past the next boundary
        rows    int64 [R], 1 <= R <= max_rows, indices below T
        returns float32 [R, vocab], a view that the next step overwrites

        Commits nothing: calling again with the same position overwrites the rows written here.
        Raises NativeError when the cache refuses (position does not fit its tail).
        """
        ...

    def read(self, tokens: np.ndarray, position: int, rows: np.ndarray) -> np.ndarray:
        """As step, for tokens of a prompt: every row attends to all compressed tokens. Only for engines with a retrieval.

        So the state after a prompt does not depend on how it was cut into blocks, a last block of one token included.
        """
        ...

    def retrieve(self, amount: Retrieval, rerank: int | None = None) -> None:
        """From now on rows of `step` attend to so many compressed tokens; rerank None: as before. Only for engines with a retrieval."""
        ...

    def reads(self) -> Reads:
        """What was read so far. Only for engines with a retrieval."""
        ...

    def look(self, window: int | None, tokens: np.ndarray | None = None) -> int:
        """Until the next call, steps see the first 16 slots of each layer's body, its newest `window` and the tail; None: all.
        In a compressed layer they see the sinks, the tail and `window` tokens that the codes alone choose.

        tokens (int64 [n]) names those whose logits are wanted; the others may come as -infinity. The same array again costs nothing.
        Returns the bytes of weights that a step leaves out for it.

        Cheaper and less exact steps, for drafting. Must be None again before anything is committed.
        """
        ...

    def hold_queries(self) -> None:
        """Remembers the queries in the last `observe` slots of the tail as they are now, committed or not: they decide what the next
        compaction keeps, in place of those that lie there then. Only for engines with observe > 0.
        """
        ...

    def compact(self, position: int) -> None:
        """Moves the tail into the body; `position` is a multiple of `boundary` and becomes the new base of the tail.

        Raises CacheFullError when a layer that keeps everything has no room.
        """
        ...

    def reset(self) -> None:
        """Empties the cache; the next step starts at position 0. Allocates nothing."""
        ...

    def state_hash(self, position: int) -> int:
        """64-bit hash of all committed cache bytes at this position, traffic counters left out."""
        ...

    def occupancy(self, position: int) -> Occupancy: ...

    def close(self) -> None:
        """Gives the memory back; the engine cannot be used afterwards."""
        ...


def load(
    bundle: Bundle,
    threads: int | None = None,
    max_rows: int = 1,
    beside: Bundle | None = None,
    kind: str = "onnxruntime",
) -> Engine:
    """The engine for this bundle.

    kind         one of KINDS: ONNX Runtime (on the GPU when `onnxruntime_cuda.refusal` finds nothing against it, else on the CPU), or
                 TensorRT with the plan that `edgekv build` left beside the bundle
    max_rows     sizes the logits buffer, allocated once
    beside       a bundle that will be loaded too: both must fit the memory
    """
    if kind == "tensorrt":
        from edgekv.engine.tensorrt import TensorRTEngine

        return TensorRTEngine(bundle, max_rows=max_rows)
    from edgekv.engine import onnxruntime_cuda
    from edgekv.engine.onnxruntime import OnnxRuntimeEngine

    if onnxruntime_cuda.refusal(bundle) is None:
        return onnxruntime_cuda.OnnxRuntimeCudaEngine(bundle, max_rows=max_rows)
    return OnnxRuntimeEngine(bundle, threads=threads, max_rows=max_rows, beside=beside)
