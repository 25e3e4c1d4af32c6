"""Device profiles: what is known about a device, from where, and how surely.

A profile is one YAML file of device_profiles/ (or of the user). Every figure is {value, unit, source, confidence}; units are
fixed by profile.schema.json; unknown is null. Confidence: `read` in a public source, `computed` from other figures, `measured`
by edgekv on the device, `unsure` (sources disagree or none was confirmed), `unknown` (value null).
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from edgekv.errors import UserError
from edgekv.memory.schema import first_error

MAX_PROFILE_BYTES = 1 << 20
KIB, MIB = 1 << 10, 1 << 20
NOT_FOUND = "not found on this machine"


def figure(value: float | int | None, unit: str, source: str, confidence: str = "read") -> dict[str, Any]:
    """A figure as a profile's data holds it; an unknown value (None) has no source and no confidence."""
    if value is None:
        source, confidence = NOT_FOUND, "unknown"
    return {"value": value, "unit": unit, "source": source, "confidence": confidence}


@dataclass(frozen=True)
class Figure:
    """One number of a profile; value None means unknown."""

    value: float | None
    unit: str
    source: str
    confidence: str

    def __str__(self) -> str:
        if self.value is None:
            return "unknown"
        return f"{self.value:g} {self.unit}" if self.unit not in ("count", "sm") else f"{self.value:g}"


@dataclass(frozen=True)
class Profile:
    """A checked profile. `mode` is the chosen power mode's name, None for the maximum clocks the profile states.

    memory_override: bytes the system sees, where the profile does not know it (boards sold with several sizes).
    """

    data: Mapping[str, Any]
    mode: str | None = None
    memory_override: int | None = None

    @property
    def name(self) -> str:
        return self.data["name"] + (f":{self.mode}" if self.mode else "")

    @property
    def title(self) -> str:
        return self.data["title"] + (f", power mode {self.mode}" if self.mode else "")

    def figure(self, path: str) -> Figure | None:
        """The figure at a dotted path ('memory.total', 'gpu.l2', 'cpu.0.l3'); None when the section is null."""
        node: Any = self.data
        for part in path.split("."):
            if node is None:
                return None
            node = node[int(part)] if isinstance(node, list) else node.get(part)
        return None if node is None else Figure(node["value"], node["unit"], node["source"], node["confidence"])

    def value(self, path: str) -> float | None:
        figure = self.figure(path)
        return None if figure is None else figure.value

    # ------------------------------------------------------------------------------------------------ derived figures

    def _mode_entry(self) -> Mapping[str, Any] | None:
        return next((m for m in self.data["power_modes"] if m["name"] == self.mode), None)

    @property
    def memory_clock_mhz(self) -> float | None:
        entry = self._mode_entry()
        return entry["memory_clock"]["value"] if entry else self.value("memory.clock")

    @property
    def peak_gbps(self) -> float | None:
        """Peak DRAM bandwidth, GB/s (1e9), at the power mode's memory clock."""
        bandwidth, full, clock = self.value("memory.bandwidth"), self.value("memory.clock"), self.memory_clock_mhz
        if self.mode is None or bandwidth is None:
            return bandwidth
        return None if clock is None or full is None else bandwidth * clock / full

    @property
    def compute_scale(self) -> float | None:
        """GPU clock of the power mode over the clock that the compute rates are stated for; 1 without a mode."""
        entry = self._mode_entry()
        if entry is None:
            return 1.0
        clock, full = entry["gpu_clock"]["value"], self.value("gpu.clock")
        return None if clock is None or full is None else clock / full

    def tflops(self, bits: int = 16) -> float | None:
        """Dense tensor rate in 1e12 operations per second for 16-bit or 8-bit operands, at the power mode's clock."""
        rate = self.value("gpu.fp16_dense" if bits == 16 else "gpu.int8_dense")
        return None if rate is None or self.compute_scale is None else rate * self.compute_scale

    @property
    def total_bytes(self) -> int | None:
        """Memory the system sees, bytes."""
        total = self.value("memory.total")
        return self.memory_override if total is None else int(total * MIB)

    @property
    def idle_bytes(self) -> int | None:
        """Memory in use before anything of ours runs, bytes."""
        idle = self.value("memory.idle_use")
        return None if idle is None else int(idle * MIB)

    @property
    def last_level_bytes(self) -> int | None:
        """Last on-chip cache the decoding processor reads DRAM through: GPU L2, or the CPU's last cache level; bytes."""
        if self.data["decode_on"] == "gpu":
            size = self.value("gpu.l2")
        else:
            first = self.data["cpu"][0]
            size = first["l3"]["value"] or first["l2"]["value"]
        return None if size is None else int(size * KIB)

    @property
    def persisting_bytes(self) -> int:
        """L2 that CUDA may set aside for persisting accesses, bytes; 0 when there is none or nobody has queried it."""
        size = self.value("gpu.persisting_l2") if self.data["decode_on"] == "gpu" else None
        return int((size or 0) * KIB)

    @property
    def cores(self) -> int | None:
        counts = [cluster["cores"]["value"] for cluster in self.data["cpu"]]
        return None if None in counts else sum(counts)


# -------------------------------------------------------------------------------------------------------------- reading


@cache
def profiles_folder() -> Any:
    """The folder of the profiles: the installed package edgekv.device_profiles, or the source tree's device_profiles/."""
    beside = Path(__file__).resolve().parents[2] / "device_profiles"
    if (beside / "profile.schema.json").is_file():
        return beside
    return resources.files("edgekv.device_profiles")


@cache
def schema() -> dict:
    return json.loads(profiles_folder().joinpath("profile.schema.json").read_text(encoding="utf-8"))


def parse_profile(text: str, origin: str) -> Profile:
    """Checks the text of a profile; UserError names the file and the field that is missing, in the wrong unit or absurd."""
    try:
        data = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        where = getattr(error, "problem_mark", None)
        line = f" (line {where.line + 1})" if where else ""
        raise UserError(f"The device profile {origin} is not valid YAML{line}.") from None
    if not isinstance(data, dict):
        raise UserError(f"The device profile {origin} must be a YAML mapping with named fields.")
    error = first_error(data, schema()) or _unknown_mismatch(data)
    if error:
        raise UserError(f"The device profile {origin} is wrong: {error}.")
    return Profile(data)


def _unknown_mismatch(node: Any, path: str = "") -> str | None:
    """A null must be marked unknown and a number must not be: confidence is the point of a profile."""
    if isinstance(node, dict):
        if "confidence" in node and (node["value"] is None) != (node["confidence"] == "unknown"):
            return f"{path}.confidence must be 'unknown' exactly when the value is null"
        children = ((f"{path}.{key}" if path else str(key), child) for key, child in node.items())
    elif isinstance(node, list):
        children = ((f"{path}[{index}]", child) for index, child in enumerate(node))
    else:
        return None
    return next((error for name, child in children if (error := _unknown_mismatch(child, name))), None)


def load_file(path: str | Path) -> Profile:
    path = Path(path)
    try:
        if path.stat().st_size > MAX_PROFILE_BYTES:
            raise UserError(f"The device profile {path} is larger than 1 MiB; that is no profile.")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"The device profile {path} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise UserError(f"The device profile {path} is not a text file.") from None
    return parse_profile(text, str(path))


@cache
def known() -> dict[str, Profile]:
    """All profiles that come with edgekv, by name."""
    files = sorted((f for f in profiles_folder().iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    profiles = [parse_profile(f.read_text(encoding="utf-8"), f.name) for f in files if f.name != "jetpack.yaml"]
    return {profile.data["name"]: profile for profile in profiles}


@cache
def jetpack_table() -> list[dict[str, Any]]:
    """Releases of JetPack: jetpack, l4t, python, cuda, tensorrt, supported."""
    return yaml.safe_load(profiles_folder().joinpath("jetpack.yaml").read_text(encoding="utf-8"))["releases"]


def load(name: str, memory: int | None = None) -> Profile:
    """The profile called `name` ('orin-nano-8gb', an alias, 'orin-nano-8gb:15W' for a power mode, or a .yaml file).

    memory: bytes the system sees, used where the profile does not know it. UserError names the nearest devices or modes.
    """
    if name.endswith((".yaml", ".yml")) or "/" in name:
        return replace(load_file(name), memory_override=memory)
    base, _, mode = name.partition(":")
    key = base.strip().lower().replace("_", "-").removeprefix("jetson-") if base.lower() != "jetson-nano" else "jetson-nano"
    names = {alias: profile for profile in known().values() for alias in (profile.data["name"], *profile.data.get("aliases", ()))}
    profile = names.get(base.strip().lower()) or names.get(key)
    if profile is None:
        near = difflib.get_close_matches(key, names, n=3, cutoff=0.4) or sorted(known())[:3]
        raise UserError(
            f"There is no profile of a device called {base!r}; nearest: {', '.join(near)} "
            "(`edgekv devices` lists all, `edgekv devices detect` writes one of this machine)."
        )
    if mode:
        modes = {entry["name"].lower(): entry["name"] for entry in profile.data["power_modes"]}
        if mode.lower() not in modes:
            known_modes = ", ".join(modes.values()) or "none: its profile names no power modes"
            raise UserError(f"{profile.name} has no power mode {mode!r}; it has {known_modes}.")
        profile = replace(profile, mode=modes[mode.lower()])
        if profile.peak_gbps is None:
            raise UserError(f"The clocks of power mode {profile.mode} of {profile.data['name']} are unknown; use another mode.")
    return replace(profile, memory_override=memory)
