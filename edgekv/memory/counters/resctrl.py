"""DRAM traffic from the kernel's resource control (resctrl): bytes per last-level cache domain, where the CPU counts them."""

from __future__ import annotations

import time
from pathlib import Path

from edgekv.memory.counters.base import Reading
from edgekv.memory.counters.emc_sysfs import read_number


class Resctrl:
    """root: where /sys is, for tests. Counts every process of the default group."""

    name = "resctrl"

    def __init__(self, root: str | Path = "/"):
        self.folder = Path(root) / "sys/fs/resctrl/mon_data"

    def _bytes(self) -> int | None:
        files = sorted(self.folder.glob("mon_L3_*/mbm_total_bytes")) if self.folder.is_dir() else []
        counts = [read_number(file) for file in files]  # "Unavailable" reads as None
        return None if not counts or None in counts else sum(counts)

    def unavailable(self) -> str | None:
        if self._bytes() is None:
            return "The kernel's memory bandwidth monitor (resctrl, mbm_total_bytes) is not mounted or not supported by this CPU."
        return None

    def start(self) -> None:
        self._before, self._began = self._bytes(), time.perf_counter()

    def stop(self) -> Reading:
        seconds, after = time.perf_counter() - self._began, self._bytes()
        total = None if after is None or self._before is None or after < self._before else float(after - self._before)
        return Reading(self.name, seconds, total, covers="everything that runs in the default group", resolution="64 bytes")
