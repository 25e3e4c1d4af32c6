"""Energy of the CPU package from the kernel's powercap interface (x86; root on most systems)."""

from __future__ import annotations

import time
from pathlib import Path

from edgekv.memory.counters.base import Reading
from edgekv.memory.counters.emc_sysfs import read_number


class Rapl:
    """root: where /sys is, for tests."""

    name = "rapl"

    def __init__(self, root: str | Path = "/"):
        self.folder = Path(root) / "sys/class/powercap"

    def _microjoules(self) -> dict[Path, int]:
        zones = sorted(self.folder.glob("intel-rapl:[0-9]")) if self.folder.is_dir() else []
        readings = {zone: read_number(zone / "energy_uj") for zone in zones}
        return {zone: value for zone, value in readings.items() if value is not None}

    def unavailable(self) -> str | None:
        return None if self._microjoules() else "No energy counter of the CPU package can be read in /sys/class/powercap."

    def start(self) -> None:
        self._before, self._began = self._microjoules(), time.perf_counter()

    def stop(self) -> Reading:
        seconds, after = time.perf_counter() - self._began, self._microjoules()
        total = 0.0
        for zone, before in self._before.items():
            spent = after.get(zone, before) - before
            if spent < 0:  # the counter wrapped
                spent += (read_number(zone / "max_energy_range_uj") or 0) + 1
            total += spent / 1e6
        return Reading(self.name, seconds, joules=total, covers="the whole CPU package", resolution="about 1 ms of package power")
