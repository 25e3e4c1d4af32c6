"""What the machine we run on offers: cores, memory, load. Read-only and cheap; values are of the moment of the call."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
from pathlib import Path

import psutil

_CGROUP = Path("/sys/fs/cgroup")


def default_threads() -> int:
    """Physical cores this process may use: never more than its CPU affinity or its control group's CPU quota."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    physical = psutil.cpu_count(logical=False) or allowed
    return max(1, min(physical, allowed, _cpu_quota() or allowed))


def _cpu_quota() -> int | None:
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return max(1, int(quota) // int(period))
    except (OSError, ValueError):
        return None


def available_memory() -> int:
    """Bytes that can be allocated without swapping: what the kernel calls available, within the control group's limit."""
    available = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cached = sum(
            int(line.split()[1])
            for line in (_CGROUP / "memory.stat").read_text().splitlines()
            if line.startswith(("inactive_file ", "active_file "))
        )
    except (OSError, ValueError):
        return available
    return min(available, max(0, limit - used + cached))


def peak_rss() -> int:
    """Largest resident set of this process so far, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if platform.system() == "Darwin" else peak * 1024


def rss() -> int:
    """Resident set of this process now, in bytes."""
    return psutil.Process().memory_info().rss


_POPULATE_READ = 22  # madvise(2): page in for reading, Linux 5.14 and newer


def populate(folder: Path, ranges: list[tuple[int, int]] | None = None) -> None:
    """Brings what this process has mapped of the files in `folder` into its memory now, instead of page by page at first use. ranges:
    only these (offset, bytes) of each file.

    A table that is looked up row by row would otherwise grow the resident set for as long as new rows come up, and each new row
    would wait for the disk. Older kernels refuse; then nothing changes.
    """
    start = f"{folder.resolve()}{os.sep}"
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            fields = line.rstrip("\n").split(maxsplit=5)
            if len(fields) == 6 and fields[5].startswith(start):
                first, last = (int(number, 16) for number in fields[0].split("-"))
                offset = int(fields[2], 16)
                for begin, size in ranges if ranges is not None else [(offset, last - first)]:
                    low, high = max(begin, offset) // mmap.PAGESIZE * mmap.PAGESIZE, min(begin + size, offset + last - first)
                    if low < high:
                        libc.madvise(first + low - offset, high - low, _POPULATE_READ)


_HUGEPAGE, _COLLAPSE = 14, 25  # madvise(2): use huge pages, and make them of what is there (Linux 6.1 and newer)


def huge_pages(least: int = 4 << 20) -> int:
    """Turns this process's large blocks of memory into huge pages; returns the bytes that were.

    A decode step walks through all weights, and with pages of 4 KiB the processor spends a part of it on finding where they are: on
    two cores of a virtual machine huge pages made int4 decoding 7 % faster. Only private memory of at least `least` bytes that is
    resident already, so the resident set does not grow. Where the kernel has no such pages or refuses, nothing changes.
    """
    libc = ctypes.CDLL(None)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    turned = 0
    for first, last, resident in _large_blocks(least):
        if resident >= (last - first) * 15 // 16 and libc.madvise(first, last - first, _HUGEPAGE) == 0:
            turned += (last - first) if libc.madvise(first, last - first, _COLLAPSE) == 0 else 0
    return turned


def _large_blocks(least: int) -> list[tuple[int, int, int]]:
    """(first address, last address, resident bytes) of the private, writable, unnamed mappings of at least `least` bytes."""
    found: list[tuple[int, int, int]] = []
    block: tuple[int, int] | None = None
    try:
        lines = Path("/proc/self/smaps").read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return found
    for line in lines:
        fields = line.split(maxsplit=5)
        if "-" in fields[0] and not fields[0].endswith(":"):
            first, last = (int(number, 16) for number in fields[0].split("-"))
            ours = fields[1] == "rw-p" and (len(fields) == 5 or fields[5] == "[heap]") and last - first >= least
            block = (first, last) if ours else None
        elif block is not None and fields[0] == "Rss:":
            found.append((*block, int(fields[1]) * 1024))
    return found


def cpu_model() -> str:
    """Name of the processor as the kernel gives it, or the architecture when it gives none (most ARM boards)."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            key, _, value = line.partition(":")
            if key.strip() in ("model name", "Model"):
                return value.strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def load() -> float:
    """Runnable tasks, averaged by the kernel over the last minute."""
    return os.getloadavg()[0]


def describe(threads: int) -> dict[str, object]:
    """Facts that belong beside every measured figure."""
    return {
        "cpu": cpu_model(),
        "architecture": platform.machine(),
        "cores": psutil.cpu_count(logical=False),
        "threads": threads,
        "memory_bytes": psutil.virtual_memory().total,
        "load_1min": round(load(), 2),
        "system": f"{platform.system()} {platform.release()}",
    }
