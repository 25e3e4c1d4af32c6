"""DRAM traffic from perf: memory-controller counters where the machine exposes them, else last-level misses of this process."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

from edgekv.memory.counters.base import Reading

LINE = 64  # bytes per last-level miss; every current x86 and Arm server or laptop part
PATIENCE = 3.0  # seconds for perf to end after a signal
LLC_EVENTS = ("LLC-load-misses", "LLC-store-misses")


def parse_stat(text: str) -> dict[str, float]:
    """Event -> count of `perf stat -x,` output; events that are not supported or not counted are absent.

    Memory-controller events come scaled with a unit (MiB), which is turned into bytes here.
    """
    counts: dict[str, float] = {}
    for line in text.splitlines():
        fields = line.split(",")
        if len(fields) < 3:
            continue
        try:
            value = float(fields[0])
        except ValueError:
            continue
        if value == value and value not in (float("inf"), float("-inf")) and value >= 0:
            unit = {"MiB": 2**20, "": 1.0}.get(fields[1])
            if unit is not None:
                counts[fields[2]] = counts.get(fields[2], 0.0) + value * unit
    return counts


class Perf:
    """root: where /sys is, for tests. Counts this process (last-level misses) or the whole socket (memory controllers)."""

    name = "perf"

    def __init__(self, root: str | Path = "/", program: str = "perf"):
        self.root, self.program = Path(root), program

    def _controllers(self) -> list[str]:
        """Read and write events of the memory controllers, as perf names them."""
        devices = self.root / "sys/bus/event_source/devices"
        events = []
        for device in sorted(devices.glob("uncore_imc*")) if devices.is_dir() else []:
            for event in ("cas_count_read", "cas_count_write", "data_reads", "data_writes"):
                if (device / "events" / event).is_file():
                    events.append(f"{device.name}/{event}/")
        return events

    def _command(self) -> tuple[list[str], str] | None:
        """perf command line that works here, and what it covers."""
        candidates = []
        if controllers := self._controllers():
            events = ",".join(controllers)
            candidates.append((["-a", "-e", events], "everything on the socket"))
        candidates.append((["-e", ",".join(LLC_EVENTS), "-p", str(os.getpid())], "this process, demand loads and stores that missed the last level"))
        for options, covers in candidates:
            probe = [*options[: options.index("-p")]] if "-p" in options else options
            tried = subprocess.run([self.program, "stat", "-x,", *probe, "true"], capture_output=True, text=True, errors="replace")
            if tried.returncode == 0 and parse_stat(tried.stderr):
                return [self.program, "stat", "-x,", *options], covers
        return None

    def unavailable(self) -> str | None:
        if shutil.which(self.program) is None:
            return "perf is not installed."
        if self._command() is None:
            return "perf has neither memory-controller nor last-level-cache events here (usual in virtual machines, or not permitted)."
        return None

    def start(self) -> None:
        command, self._covers = self._command()
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
        self._began = time.perf_counter()

    def stop(self) -> Reading:
        seconds = time.perf_counter() - self._began
        text = ""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):  # perf prints its counts when it is ended by a signal
            self._process.send_signal(number)
            try:
                _, text = self._process.communicate(timeout=PATIENCE)
                break
            except subprocess.TimeoutExpired:  # a process started with SIGINT ignored hands that on
                continue
        counts = parse_stat(text)
        misses = any(event in counts for event in LLC_EVENTS)
        total = sum(counts.values()) * (LINE if misses else 1) if counts else None
        resolution = f"{LINE} bytes per miss; hardware prefetches may be missing" if misses else "exact"
        return Reading(self.name, seconds, total, covers=self._covers, resolution=resolution, details=counts)
