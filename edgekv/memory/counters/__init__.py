"""Hardware counters: one file each, one line each in `all_counters`. See base.py for the protocol."""

from __future__ import annotations

from edgekv.memory.counters.base import Counter, Reading
from edgekv.memory.counters.emc_sysfs import EmcSysfs
from edgekv.memory.counters.perf import Perf
from edgekv.memory.counters.rapl import Rapl
from edgekv.memory.counters.resctrl import Resctrl
from edgekv.memory.counters.tegrastats import Tegrastats

__all__ = ["Counter", "Reading", "all_counters", "usable"]


def all_counters(bus_bits: float | None = None, emc_mhz: float | None = None) -> list[Counter]:
    """Every counter there is. bus_bits and emc_mhz: from the device profile, for Jetson's counters."""
    return [Tegrastats(bus_bits, emc_mhz), EmcSysfs(bus_bits), Resctrl(), Perf(), Rapl()]


def usable(counters: list[Counter]) -> tuple[list[Counter], dict[str, str]]:
    """Counters that work here, and for the others the sentence that says why not."""
    reasons = {counter.name: counter.unavailable() for counter in counters}
    return [c for c in counters if reasons[c.name] is None], {name: why for name, why in reasons.items() if why}
