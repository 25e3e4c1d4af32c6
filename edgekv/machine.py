"""What the machine we run on offers: cores, memory, load. Read-only and cheap; values are of the moment of the call."""

from __future__ import annotations

import ctypes
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


def populate(folder: Path) -> None:
    """Brings what this process has mapped of the files in `folder` into its memory now, instead of page by page at first use.

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
                libc.madvise(first, last - first, _POPULATE_READ)


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
