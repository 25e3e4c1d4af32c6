"""What an engine was built from and for: engine.json beside engine.plan. An engine runs only where all of it still holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from edgekv.bundle import MANIFEST, Bundle, sha256_file
from edgekv.errors import UserError

FORMAT, VERSION = "edgekv-engine", 2
PLAN, DESCRIPTION = "engine.plan", "engine.json"
PLUGIN, STANDARD = LOWERINGS = "plugin", "standard"  # attention by edgekv's plugin, or by TensorRT's own operators


def default_folder(bundle: Bundle) -> Path:
    """Beside the bundle, so that the bundle itself stays what was exported."""
    return bundle.folder.with_name(bundle.folder.name + ".engine")


def bundle_id(bundle: Bundle) -> str:
    """The hash of the bundle's manifest, which itself holds the hash of every file."""
    return sha256_file(bundle.folder / MANIFEST)


def write(folder: Path, facts: dict[str, Any]) -> None:
    """Describes the engine.plan that lies in `folder`."""
    plan = folder / PLAN
    complete = {"format": FORMAT, "version": VERSION, **facts, "engine": {"bytes": plan.stat().st_size, "sha256": sha256_file(plan)}}
    (folder / DESCRIPTION).write_text(json.dumps(complete, indent=1) + "\n", encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """The description of an engine; UserError when there is none or the plan is damaged."""
    again = "build it again with `edgekv build`"
    try:
        facts = json.loads((folder / DESCRIPTION).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"There is no engine at {folder}; make one with `edgekv build`.") from None
    except (OSError, ValueError, RecursionError):
        raise UserError(f"{folder / DESCRIPTION} is damaged; {again}.") from None
    if not isinstance(facts, dict) or facts.get("format") != FORMAT or facts.get("version") != VERSION:
        raise UserError(f"{folder} holds no engine that this edgekv reads; {again}.")
    for name, kind in (("bundle", str), ("tensorrt", str), ("sm", int), ("precision", str), ("profiles", list), ("engine", dict)):
        if not isinstance(facts.get(name), kind):
            raise UserError(f"{folder / DESCRIPTION} is damaged: {name!r} is missing; {again}.")
    if facts.get("lowering") not in LOWERINGS or isinstance(facts.get("plugin"), str) != (facts["lowering"] == PLUGIN):
        raise UserError(f"{folder / DESCRIPTION} is damaged: it does not say whether the engine needs the plugin; {again}.")
    plan = folder / PLAN
    if not plan.is_file() or plan.stat().st_size != facts["engine"].get("bytes") or sha256_file(plan) != facts["engine"].get("sha256"):
        raise UserError(f"{plan} is missing or damaged; {again}.")
    return facts


def refuse_if_foreign(facts: dict[str, Any], bundle: Bundle, tensorrt: str, sm: int, plugin: str) -> None:
    """UserError with one sentence when the engine was built from another bundle or for something else than is here."""
    again = "build it here with `edgekv build --force" + ("`" if facts["lowering"] == PLUGIN else " --no-plugin`")
    if facts["bundle"] != bundle_id(bundle):
        raise UserError(f"The engine was built from another version of {bundle.folder}; {again}.")
    if facts["sm"] != sm:
        device = facts.get("device") or "a device"
        raise UserError(f"The engine was built for {device} (compute capability {facts['sm'] / 10:.1f}), this one has {sm / 10:.1f}; {again}.")
    if facts["tensorrt"] != tensorrt:
        raise UserError(f"The engine was built with TensorRT {facts['tensorrt']}, here is {tensorrt}; {again}.")
    if facts["lowering"] == PLUGIN and facts["plugin"] != plugin:
        raise UserError(f"The engine was built with another build of edgekv's plugin library; {again}.")
