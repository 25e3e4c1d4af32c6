"""DRAM traffic and power on Jetson from tegrastats: percent of the current memory clock, in steps of one percent."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time

from edgekv.memory.counters.base import Reading, integrate
from edgekv.memory.counters.tegrastats_line import parse

INTERVAL_MS = 100


class Tegrastats:
    """bus_bits: width of the memory bus (profile: memory.bus_width). emc_mhz: clock to assume where the line lacks it."""

    name = "tegrastats"

    def __init__(self, bus_bits: float | None = None, emc_mhz: float | None = None, program: str = "tegrastats"):
        self.bus_bits, self.emc_mhz, self.program = bus_bits, emc_mhz, program

    def unavailable(self) -> str | None:
        if shutil.which(self.program) is None:
            return "tegrastats is not installed; it exists on Jetson only."
        if self.bus_bits is None:
            return "The width of the memory bus is unknown; name the device with --device."
        return None

    def start(self) -> None:
        command = [self.program, "--interval", str(INTERVAL_MS)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace")
        self._began = time.perf_counter()
        self._traffic: list[tuple[float, float]] = []
        self._power: list[tuple[float, float]] = []
        self._details: dict = {}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for text in self._process.stdout:
            now, line = time.perf_counter() - self._began, parse(text)
            rate, power = line.dram_gbps(self.bus_bits, self.emc_mhz), line.total_milliwatts
            if rate is not None:
                self._traffic.append((now, rate))
            if power is not None:
                self._power.append((now, power / 1000))
            for key, value in (("emc_mhz", line.emc_mhz), ("gpu_mhz", line.gpu_mhz), ("gpu_percent", line.gpu_percent)):
                if value not in (None, ()):
                    self._details[key] = value

    def stop(self) -> Reading:
        seconds = time.perf_counter() - self._began
        self._process.terminate()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()
        self._process.stdout.close()
        gigabytes = integrate(self._traffic, seconds)
        return Reading(
            counter=self.name,
            seconds=seconds,
            dram_bytes=None if gigabytes is None else gigabytes * 1e9,
            joules=integrate(self._power, seconds),
            covers="everything on the chip that uses DRAM",
            resolution=f"1 % of the memory clock, every {INTERVAL_MS} ms",
            samples=tuple(self._traffic),
            details=self._details,
        )
