"""How fast this machine reads DRAM: a short stream test, the ceiling of every prediction made for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv import machine

SECONDS = 0.6  # per repetition set; the best repetition counts, as in every stream benchmark


def read_gbps(threads: int | None = None, last_level_bytes: int = 32 << 20) -> float:
    """Best rate, GB/s (1e9), at which all threads together read memory that no cache holds.

    Every thread sums the squares of its own float32 array (a BLAS dot of the array with itself: each line is loaded once) of at
    least four times the last-level cache, within a quarter of the memory that is free.
    """
    threads = threads or machine.default_threads()
    size = min(max(4 * last_level_bytes, 64 << 20), machine.available_memory() // (4 * threads))
    arrays = [np.ones(max(size // 4, 1 << 16), np.float32) for _ in range(threads)]
    total = sum(array.nbytes for array in arrays)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + SECONDS
        while True:
            began = time.perf_counter()
            list(pool.map(lambda array: float(np.dot(array, array)), arrays))
            now = time.perf_counter()
            best = max(best, total / (now - began) / 1e9)
            if now > end:
                return best
