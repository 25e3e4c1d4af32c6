"""One line of NVIDIA's tegrastats, read strictly: what does not have exactly the form of a known field is not a figure.

Forms differ between L4T releases: with and without timestamp and EMC field, `off` engines, sensors that read -256C, sensor names
in upper or lower case, one to three temperatures and power values. A field that occurs twice with different contents is
ambiguous and is dropped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_ENGINES = r"(?:NVENC|NVDEC|NVJPG|NVDLA|OFA|VIC|PVA|APE|MTS|SE|MSENC|ISP)\d?(?:_FREQ)?"
_RAILS = r"(?:VDD|VIN|POM|VDDQ)[A-Z0-9_]*"
_EDGE = r"(?<!\S)", r"(?!\S)"


def _find(pattern: str, line: str) -> tuple[str, ...] | None:
    """Groups of the only distinct match between white space, None when there is none or there are different ones."""
    found = {match.groups(default="") for match in re.finditer(_EDGE[0] + pattern + _EDGE[1], line, re.ASCII)}
    return found.pop() if len(found) == 1 else None


@dataclass(frozen=True)
class TegraLine:
    """Figures of one line; None or empty where the line does not have them.

    ram, swap: (used, total) MiB. cpu: per core (percent, MHz), None for a core that is off. emc_percent: of emc_mhz.
    gpu_percent and gpu_mhz: of GR3D, one clock per GPC group. engines: name -> (percent, MHz), each None when not stated; an
    engine that is off is absent. temperatures: sensor -> degrees Celsius. power: rail -> mW now.
    """

    timestamp: str | None = None
    ram: tuple[int, int] | None = None
    swap: tuple[int, int] | None = None
    cpu: tuple[tuple[int, int] | None, ...] = ()
    emc_percent: int | None = None
    emc_mhz: int | None = None
    gpu_percent: int | None = None
    gpu_mhz: tuple[int, ...] = ()
    engines: dict[str, tuple[int | None, int | None]] = field(default_factory=dict)
    temperatures: dict[str, float] = field(default_factory=dict)
    power: dict[str, int] = field(default_factory=dict)

    def dram_gbps(self, bus_bits: float, emc_mhz: float | None = None) -> float | None:
        """DRAM traffic in GB/s: percent of the current EMC clock x 2 transfers x bus width. emc_mhz: when the line lacks it."""
        clock = self.emc_mhz if self.emc_mhz is not None else emc_mhz
        if self.emc_percent is None or clock is None:
            return None
        return self.emc_percent / 100 * clock * 2 * bus_bits / 8 / 1000

    @property
    def total_milliwatts(self) -> int | None:
        """Power of the whole module: its input rail, or on AGX Orin the sum of its three rails; None when neither is there."""
        for rail in ("VDD_IN", "POM_5V_IN", "VIN"):
            if rail in self.power:
                return self.power[rail]
        parts = ("VDD_GPU_SOC", "VDD_CPU_CV", "VIN_SYS_5V0")
        return sum(self.power[rail] for rail in parts) if all(rail in self.power for rail in parts) else None


def parse(line: str) -> TegraLine:
    """Never raises on any string."""
    stamp = re.match(r"\s*(\d\d-\d\d-\d{4} \d\d:\d\d:\d\d)\s", line, re.ASCII)
    emc = _find(r"EMC_FREQ (\d{1,3})%(?:@(\d{1,5}))?", line)
    emc_percent, emc_mhz = (_percent(emc[0]), int(emc[1]) if emc[1] else None) if emc else (None, None)
    if emc_percent is None:
        emc_mhz = None
    gpu_percent, gpu_mhz = _gpu(line)
    return TegraLine(
        timestamp=stamp.group(1) if stamp else None,
        ram=_pair(r"RAM (\d{1,7})/(\d{1,7})MB", line),
        swap=_pair(r"SWAP (\d{1,7})/(\d{1,7})MB", line),
        cpu=_cores(line),
        emc_percent=emc_percent,
        emc_mhz=emc_mhz,
        gpu_percent=gpu_percent,
        gpu_mhz=gpu_mhz,
        engines=_engines(line),
        temperatures=_temperatures(line),
        power=_power(line),
    )


def _percent(text: str) -> int | None:
    return int(text) if text and int(text) <= 100 else None


def _pair(pattern: str, line: str) -> tuple[int, int] | None:
    found = _find(pattern, line)
    if not found or int(found[0]) > int(found[1]):
        return None
    return int(found[0]), int(found[1])


def _cores(line: str) -> tuple[tuple[int, int] | None, ...]:
    core = r"(?:off|\d{1,3}%@\d{1,5})"
    found = _find(rf"CPU \[({core}(?:,{core}){{0,255}})\]", line)
    cores = [None if part == "off" else tuple(map(int, part.split("%@"))) for part in found[0].split(",")] if found else []
    return tuple(cores) if all(c is None or c[0] <= 100 for c in cores) else ()


def _gpu(line: str) -> tuple[int | None, tuple[int, ...]]:
    found = _find(r"GR3D_FREQ (?:(\d{1,3})%)?(?:@(\d{1,5}|\[\d{1,5}(?:,\d{1,5}){0,15}\]))?", line)
    if not found or not any(found) or (found[0] and _percent(found[0]) is None):
        return None, ()
    clocks = tuple(map(int, found[1].strip("[]").split(","))) if found[1] else ()
    return _percent(found[0]), clocks


def _named(pattern: str, line: str) -> dict[str, tuple[str, ...]]:
    """name -> groups for all matches of a pattern whose first group is the name; ambiguous names are dropped."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for match in re.finditer(_EDGE[0] + pattern + _EDGE[1], line, re.ASCII):
        found.setdefault(match.group(1), set()).add(match.groups(default="")[1:])
    return {name: values.pop() for name, values in found.items() if len(values) == 1}


def _engines(line: str) -> dict[str, tuple[int | None, int | None]]:
    engines = {}
    for name, (percent, clock, alone) in _named(rf"({_ENGINES}) (?:(?:(\d{{1,3}})%)?@(\d{{1,5}})|(\d{{1,5}}))", line).items():
        if not percent or _percent(percent) is not None:
            engines[name] = (_percent(percent), int(clock or alone))
    return engines


def _temperatures(line: str) -> dict[str, float]:
    number = r"-?\d{1,3}(?:\.\d{1,4})?"
    readings = _named(rf"([A-Za-z][A-Za-z0-9_-]{{0,30}})@({number})C(?:/{number}C){{0,2}}", line)
    return {name: float(value) for name, (value,) in readings.items() if -60 <= float(value) <= 200}  # -256: sensor is off


def _power(line: str) -> dict[str, int]:
    rails = _named(rf"({_RAILS}) (\d{{1,7}})(?:mW)?(?:/\d{{1,7}}(?:mW)?){{0,2}}", line)
    return {name: int(value) for name, (value,) in rails.items()}
