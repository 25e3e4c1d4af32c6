"""DRAM traffic on Jetson from the memory controller's activity counter in sysfs (root): percent = activity // clock in kHz."""

from __future__ import annotations

from pathlib import Path

from edgekv.memory.counters.base import Poller, Reading, integrate

RATES = ("sys/kernel/debug/bpmp/debug/clk/emc/rate", "sys/class/devfreq/bwmgr/cur_freq")
ACTIVITIES = (
    "sys/kernel/debug/cactmon/mc_all",
    "sys/kernel/debug/bpmp/debug/actmon/mc_all_avg_activity",
    "sys/kernel/actmon_avg_activity/mc_all",
)
INTERVAL = 0.02


def read_number(path: Path) -> int | None:
    """The first whole number in a file; None when it cannot be read or holds none."""
    try:
        words = path.read_text(errors="replace").split()
        return int(words[0]) if words else None
    except (OSError, ValueError):
        return None


class EmcSysfs:
    """bus_bits: width of the memory bus (profile: memory.bus_width). root: where /sys is, for tests."""

    name = "emc-sysfs"

    def __init__(self, bus_bits: float | None = None, root: str | Path = "/"):
        self.bus_bits, self.root = bus_bits, Path(root)

    def _first(self, names: tuple[str, ...]) -> Path | None:
        return next((self.root / name for name in names if read_number(self.root / name) is not None), None)

    def unavailable(self) -> str | None:
        if self._first(ACTIVITIES) is None or self._first(RATES) is None:
            return "The memory controller's activity cannot be read in /sys (Jetson only, and as root)."
        if self.bus_bits is None:
            return "The width of the memory bus is unknown; name the device with --device."
        return None

    def gbps(self) -> float | None:
        """Traffic now, GB/s."""
        activity, hertz = read_number(self._activity), read_number(self._rate)
        if activity is None or not hertz:
            return None
        percent = activity // (hertz // 1000) if hertz >= 1000 else None
        return None if percent is None or percent > 100 else percent / 100 * hertz * 2 * self.bus_bits / 8 / 1e9

    def start(self) -> None:
        self._activity, self._rate = self._first(ACTIVITIES), self._first(RATES)
        self._poller = Poller(self.gbps, INTERVAL)
        self._poller.start()

    def stop(self) -> Reading:
        seconds = self._poller.stop()
        gigabytes = integrate(self._poller.values, seconds)
        return Reading(
            counter=self.name,
            seconds=seconds,
            dram_bytes=None if gigabytes is None else gigabytes * 1e9,
            covers="everything on the chip that uses DRAM",
            resolution=f"1 % of the memory clock, every {INTERVAL * 1e3:.0f} ms",
            samples=tuple(self._poller.values),
            details={"emc_mhz": (read_number(self._rate) or 0) / 1e6 or None},
        )
