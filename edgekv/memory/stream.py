"""How fast this machine reads DRAM, and how much it holds on chip: short stream tests, the frame of every prediction made for it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from edgekv import machine

LEAST_READ = 32 << 20  # bytes that a thread reads between two looks at the clock
SECONDS = 0.6  # per repetition set; the best repetition counts, as in every stream benchmark


def read_gbps(threads: int | None = None, last_level_bytes: int = 32 << 20) -> float:
    """Best rate, GB/s (1e9), at which all threads together read memory that no cache holds.

    Every thread sums the squares of its own float32 array (a BLAS dot of the array with itself: each line is loaded once) of at
    least four times the last-level cache, within a quarter of the memory that is free.
    """
    threads = threads or machine.default_threads()
    size = min(max(4 * last_level_bytes, 64 << 20), machine.available_memory() // (4 * threads))
    return _rate(size, threads, SECONDS)


def held_on_chip(nominal_bytes: int, threads: int | None = None) -> int:
    """Bytes that are read again at on-chip speed: what the last cache level really holds for us, at most nominal_bytes.

    A virtual machine is told the whole cache of the processor and gets a share of it. All threads together read footprints that
    double from a 32nd of the nominal size (at least 1 MiB) to twice that size; the result is the largest whose rate lies above the geometric mean of the fastest
    and the slowest. Where no footprint is much slower than another (less than 1.5 times), the nominal size is all there is to say.
    """
    threads = threads or machine.default_threads()
    most = min(2 * nominal_bytes, machine.available_memory() // 4)
    sizes = [max(nominal_bytes // 32 >> 20, 1) << 20]
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    rates = [_rate(size // threads, threads, SECONDS / 4) for size in sizes]
    if max(rates) < 1.5 * min(rates):
        return nominal_bytes
    border = (max(rates) * min(rates)) ** 0.5
    return min(nominal_bytes, next((size for size, rate in zip(reversed(sizes), reversed(rates)) if rate >= border), sizes[0]))


def _rate(size: int, threads: int, seconds: float) -> float:
    """Best rate, GB/s, at which `threads` threads read `size` bytes each, over and over for this long."""
    arrays = [np.ones(max(size // 4, 1 << 16), np.float32) for _ in range(threads)]
    passes = max(LEAST_READ // arrays[0].nbytes, 1)  # small arrays are read often enough that handing out work costs nothing
    total = passes * sum(array.nbytes for array in arrays)
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        end = time.perf_counter() + seconds
        while True:
            began = time.perf_counter()
            list(pool.map(lambda array: [float(np.dot(array, array)) for _ in range(passes)], arrays))
            now = time.perf_counter()
            best = max(best, total / (now - began) / 1e9)
            if now > end:
                return best
