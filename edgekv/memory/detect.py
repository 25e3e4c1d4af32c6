"""A profile of the machine we run on: what the kernel says of its caches, cores and memory, and what short tests measure.

On Jetson also module, L4T release, power mode and clocks, as far as files can be read; what cannot be read stays null.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Any

import psutil

from edgekv import machine
from edgekv.memory import cuda_query, profiles, stream
from edgekv.memory.counters.emc_sysfs import read_number
from edgekv.memory.profiles import figure

def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip("\x00\n ")
    except OSError:
        return ""


def cpu_list(text: str) -> list[int]:
    """[0, 1, 4] of the kernel's '0-1,4'; empty when it is no such list."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part.strip(), re.ASCII)
        if not match:
            return []
        found.extend(range(int(match[1]), int(match[2] or match[1]) + 1))
    return found


def _kib(text: str) -> float | None:
    match = re.fullmatch(r"(\d{1,9})([KM])", text, re.ASCII)
    return int(match[1]) * {"K": 1, "M": 1024}[match[2]] if match else None


def clusters(root: Path = Path("/")) -> list[dict[str, Any]]:
    """Clusters of equal cores that share their last cache, in the form of a profile's cpu section."""
    base = root / "sys/devices/system/cpu"
    groups: dict[tuple, list[int]] = {}
    for cpu in cpu_list(_text(base / "online")):
        levels: dict[int, tuple[float | None, int | None]] = {}
        for index in sorted((base / f"cpu{cpu}/cache").glob("index[0-9]")):
            if _text(index / "type") in ("Data", "Unified"):
                sharing = len(cpu_list(_text(index / "shared_cpu_list"))) or None
                levels[int(_text(index / "level") or 0)] = (_kib(_text(index / "size")), sharing)
        part = _text(base / f"cpu{cpu}/regs/identification/midr_el1")
        capacity = read_number(base / f"cpu{cpu}/cpu_capacity")
        groups.setdefault((part, capacity, tuple(sorted(levels.items()))), []).append(cpu)
    made = []
    for (_, _, levels), cpus in groups.items():
        sizes = dict(levels)
        entry: dict[str, Any] = {"core": machine.cpu_model(), "cores": figure(len(cpus), "count", "/sys/devices/system/cpu/online")}
        source = f"/sys/devices/system/cpu/cpu{cpus[0]}/cache"
        entry["l1d"] = figure(sizes.get(1, (None, None))[0], "KiB", source)
        for level in (2, 3):
            size, sharing = sizes.get(level, (None, None))
            entry[f"l{level}"] = figure(size, "KiB", source)
            entry[f"l{level}_shared_by"] = figure(sharing, "count", source)
        made.append(entry)
    if not made:
        none = {"l1d": figure(None, "KiB", "")}
        for level in (2, 3):
            none |= {f"l{level}": figure(None, "KiB", ""), f"l{level}_shared_by": figure(None, "count", "")}
        made.append({"core": machine.cpu_model(), "cores": figure(psutil.cpu_count() or 1, "count", "the operating system"), **none})
    return made


def _measure_last_level(cluster: dict[str, Any]) -> None:
    """Replaces the size of a cluster's last cache level where reads say that much less of it is ours, as in a virtual machine."""
    name = "l3" if cluster["l3"]["value"] else "l2"
    nominal = cluster[name]["value"]
    if not nominal:
        return
    held = stream.held_on_chip(int(nominal * 1024)) / 1024
    if held < nominal / 2:
        source = f"footprints up to this size are read at on-chip speed; the processor reports {nominal:g} KiB, which others share"
        cluster[name] = figure(held, "KiB", source, "measured")


def jetson_profile(root: Path = Path("/")) -> profiles.Profile | None:
    """The profile of the Jetson module this is, found by its device-tree model and MemTotal; None elsewhere."""
    model = _text(root / "proc/device-tree/model").lower()
    if "jetson" not in model:
        return None
    memory = psutil.virtual_memory().total / (1 << 20)
    words = set(re.findall(r"[a-z0-9]+", model)) - {"nvidia", "jetson", "developer", "kit", "engineering", "reference"}
    best = None
    for profile in profiles.known().values():
        title = set(re.findall(r"[a-z0-9]+", profile.data["title"].lower()))
        names = words & {"nano", "orin", "agx", "nx", "xavier", "thor"}
        if profile.data["family"] != "jetson" or names != title & {"nano", "orin", "agx", "nx", "xavier", "thor"}:
            continue
        total = profile.value("memory.total")
        gap = abs(total - memory) if total else 4096.0
        if best is None or gap < best[0]:
            best = gap, profile
    return best[1] if best else None


def _gpu(known: dict[str, Any], queried: dict[str, int] | None) -> dict[str, Any]:
    """The gpu section of the module's profile with what the driver of this very board says instead."""
    if not queried:
        return known
    source, gpu = "CUDA device attribute, queried on this machine", dict(known)
    for name, attribute, unit, factor in (
        ("sm_count", "sm_count", "count", 1),
        ("clock", "clock_khz", "MHz", 1e-3),
        ("l2", "l2_bytes", "KiB", 1 / 1024),
        ("persisting_l2", "persisting_l2_bytes", "KiB", 1 / 1024),
        ("shared_per_sm", "shared_per_sm_bytes", "KiB", 1 / 1024),
    ):
        if queried.get(attribute) is not None and (queried[attribute] > 0 or name == "persisting_l2"):
            value = queried[attribute] * factor
            gpu[name] = figure(int(value) if unit == "count" else round(value, 1), unit, source, "measured")
    return gpu


def l4t(root: Path = Path("/")) -> str | None:
    """NVIDIA's release of Linux on a Jetson, such as "R36 (release), REVISION: 4.0"; None elsewhere."""
    line = _text(root / "etc/nv_tegra_release").split("\n")[0]
    return line.lstrip("# ").split(", GCID")[0] or None


def power_mode(root: Path = Path("/")) -> str | None:
    """Name of the nvpmodel power mode that is set, from its status file and /etc/nvpmodel.conf; None elsewhere."""
    status = re.search(r"pmode:0*(\d+)", _text(root / "var/lib/nvpmodel/status"), re.ASCII)
    if not status:
        return None
    for number, name in re.findall(r"<\s*POWER_MODEL\s+ID=(\d+)\s+NAME=([\w.-]+)\s*>", _text(root / "etc/nvpmodel.conf"), re.ASCII):
        if int(number) == int(status[1]):
            return name
    return f"mode {int(status[1])}"


def clocks(root: Path = Path("/")) -> dict[str, Any]:
    """Power mode and clocks of this moment, MHz: what belongs beside a measured figure. Absent where it cannot be read."""
    found: dict[str, Any] = {"power_mode": power_mode(root)}
    for name, path, factor in (
        ("cpu_mhz", "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq", 1e-3),
        ("cpu_max_mhz", "sys/devices/system/cpu/cpu0/cpufreq/scaling_max_freq", 1e-3),
        ("emc_mhz", "sys/kernel/debug/bpmp/debug/clk/emc/rate", 1e-6),
        ("emc_mhz", "sys/class/devfreq/bwmgr/cur_freq", 1e-6),
    ):
        value = read_number(root / path)
        if value is not None:
            found.setdefault(name, round(value * factor))
    for gpu in sorted((root / "sys/class/devfreq").glob("*g[apv]*[0-9]*b")):  # 17000000.ga10b, 57000000.gpu, 17000000.gv11b
        value = read_number(gpu / "cur_freq")
        if value is not None:
            found.setdefault("gpu_mhz", round(value * 1e-6))
    governor = _text(root / "sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor:
        found["cpu_governor"] = governor
    return {name: value for name, value in found.items() if value is not None}


def detect(name: str = "this-machine", measure: bool = True, calibrate: bool = True) -> dict[str, Any]:
    """The contents of a profile of this machine. measure: run the stream test; calibrate: time edgekv's own kernels too."""
    memory = psutil.virtual_memory()
    base = jetson_profile()
    cpu = clusters()
    if measure:
        for entry in cpu:
            _measure_last_level(entry)
    last = max((entry["l3"]["value"] or entry["l2"]["value"] or 0) for entry in cpu)
    measured = round(stream.read_gbps(last_level_bytes=int(last * 1024)), 2) if measure else None
    test = f"stream test, {machine.default_threads()} threads, best of {stream.SECONDS:g} s, load {machine.load():.2f}"
    bus = dict(base.data["memory"]) if base else {}
    data: dict[str, Any] = {
        "format": "edgekv-device-profile",
        "version": 1,
        "name": name,
        "title": base.data["title"] if base else f"{machine.cpu_model()} ({platform.system()} {platform.machine()})",
        "family": "jetson" if base else "x86" if platform.machine() in ("x86_64", "AMD64") else "arm-board" if platform.machine() == "aarch64" else "other",
        "decode_on": base.data["decode_on"] if base else "cpu",
        "memory": {
            "total": figure(round(memory.total / (1 << 20)), "MiB", "the operating system (MemTotal)"),
            "idle_use": figure(round((memory.total - memory.available) / (1 << 20)), "MiB", "in use at the time of detection", "measured"),
            "bus_width": bus.get("bus_width", figure(None, "bit", "")),
            "clock": bus.get("clock", figure(None, "MHz", "")),
            "bandwidth": bus.get("bandwidth", figure(measured, "GB/s", "the measured bandwidth stands in: the peak is not visible to software", "unsure")),
            "measured_bandwidth": figure(measured, "GB/s", test, "measured"),
        },
        "gpu": _gpu(base.data["gpu"], cuda_query.query()) if base else None,
        "cpu": cpu,
        "calibration": None,
        "power_modes": base.data["power_modes"] if base else [],
        "software": base.data["software"] if base else {"jetpack": []},
        "notes": [f"{key.replace('_', ' ')}: {value}" for key, value in clocks().items()],
    }
    release = _text(Path("/etc/nv_tegra_release")).splitlines()
    if release:
        data["notes"].append("L4T: " + release[0].strip("# ")[:120])
    if calibrate and data["decode_on"] == "cpu":
        from edgekv.memory.calibrate import calibrate as run

        data["calibration"] = run(int(last * 1024))
    return data
