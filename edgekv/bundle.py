"""The bundle: one folder that holds everything a device needs to run a model inside its cache budget.

    manifest.json          what follows below; written last, so a folder without it is no bundle
    model.onnx             the graph, with its weights in model.onnx.data (external data)
    tokenizer.json         the `tokenizers` file
    chat_template.jinja    optional

Fields of manifest.json, format version 1:

    format, version        "edgekv-bundle", 1
    created_by             e.g. "edgekv 0.1.0"
    model                  name, architecture, layers, hidden, vocab (rows of the logits), context (trained positions),
                           bos_token_id (int or null), eos_token_ids (list of int), parameters (int or null)
    graph                  file, chunk (most rows of one prefill step), opset
    policy                 the fields of CachePolicy (retrieve and rerank are what a run starts with), and boundary (E), budget (as the user gave it), words (one sentence)
    layers                 per decoder layer: params (every field of plugins/layout/attributes.def), bytes (of its state),
                           inv_freq (index into the table below, or null)
    inv_freq               list of rotary frequency tables, radians per position, [rotary_dim / 2] each
    memory                 bytes by owner as the exporter predicts them, e.g. arena, tail, weights
    weights                format ("int4" ...), bytes
    parity                 figures of the exporter's comparison with the original model, or null when it was switched off
    generation             default sampling options of the model (temperature, top_k, ...), may be empty
    files                  name -> {bytes, sha256} of every other file

Reading trusts nothing: every file named must lie inside the folder, have the size and hash that the manifest states, and the
graph may only point to external data that the manifest names too.  All failures are `BundleError`, one sentence each.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from edgekv import __version__, layout, protobuf, thin_keys
from edgekv.cache_policy import CachePolicy
from edgekv.errors import BundleError, UserError
from edgekv.retrieval import MOST_RERANK, parse_retrieval

FORMAT = "edgekv-bundle"
VERSION = 1
MANIFEST = "manifest.json"
MAX_MANIFEST_BYTES = 64 << 20
_HASH_BLOCK = 4 << 20


def _is_int(value: Any, low: int = 0, high: int = 1 << 62) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def safe_name(name: Any) -> bool:
    """Whether `name` is a plain relative path that stays in the folder it is joined to (symbolic links not followed)."""
    if not isinstance(name, str) or not name or "\\" in name or "\0" in name or ":" in name:
        return False
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) == name


def _inside(folder: Path, path: Path) -> bool:
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file, read in blocks; raises OSError."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while block := file.read(_HASH_BLOCK):
            digest.update(block)
    return digest.hexdigest()


@dataclass(frozen=True)
class Bundle:
    """A bundle that was opened: its folder and its manifest, which has passed `open_bundle`."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def model(self) -> dict[str, Any]:
        return self.manifest["model"]

    @property
    def layers(self) -> list[dict[str, Any]]:
        return self.manifest["layers"]

    @property
    def graph_path(self) -> Path:
        return self.folder / self.manifest["graph"]["file"]

    @property
    def chunk(self) -> int:
        """Most rows of one step that the exporter planned for."""
        return self.manifest["graph"]["chunk"]

    @property
    def boundary(self) -> int:
        """E, tokens between compactions; the same for every layer."""
        return self.layers[0]["params"]["tail_slots"]

    @property
    def arena_bytes(self) -> int:
        """Bytes of all states together, each rounded up to 256."""
        return sum((layer["bytes"] + 255) // 256 * 256 for layer in self.layers)

    @property
    def capacity(self) -> int | None:
        """Tokens that a text may have; None: no end. A full body takes whole intervals only, then one more fits the tail."""
        params = [layer["params"] for layer in self.layers]
        full = [p for p in params if p.get("keep", 0) == layout.KEEPS["full"]]
        ends = [layout.held_tokens(p) // p["tail_slots"] * p["tail_slots"] + p["tail_slots"] for p in full]
        if params[0].get("positions", 0) != layout.POSITIONS["cache"]:  # rotations beyond the trained range would be noise
            ends.append(self.model["context"])
        return min(ends, default=None)

    @property
    def first_eviction(self) -> int | None:
        """Tokens that are read when the first one is dropped: a boundary beyond the smallest body. None: none ever is.

        Layers with a sliding window of the model's own are left out: nobody misses what no query can see.
        """
        bodies = [
            layout.held_tokens(p) for p in (layer["params"] for layer in self.layers)
            if p.get("keep", 0) != layout.KEEPS["full"] and not p.get("sliding_window")
        ]  # fmt: skip
        return (min(bodies) // self.boundary + 1) * self.boundary if bodies else None

    @property
    def compressed(self) -> list[dict[str, Any]]:
        """Parameters of the layers whose keys are compressed; empty for a dense cache."""
        return [layer["params"] for layer in self.layers if layout.is_selfindex(layer["params"])]

    @property
    def latent(self) -> bool:
        """Whether keys become latent ones when they leave the tail."""
        return any(layer["params"].get("latent") for layer in self.layers)

    @property
    def first_loss(self) -> int | None:
        """Tokens that are read when the cache first becomes an approximation: an eviction, a compression, or whole keys that become latent
        ones. None: never."""
        return self.boundary if self.compressed or self.latent else self.first_eviction

    @property
    def weight_bytes(self) -> int:
        """Bytes on disk of the graph and its weights."""
        return sum(entry["bytes"] for name, entry in self.manifest["files"].items() if name.startswith("model."))

    def inv_freq(self, layer: int) -> list[float]:
        """Rotary frequencies of a layer, empty for models that do not rotate."""
        index = self.layers[layer].get("inv_freq")
        return [] if index is None else self.manifest["inv_freq"][index]

    def file(self, name: str) -> Path | None:
        """Path of an optional file, None when the manifest does not list it."""
        return self.folder / name if name in self.manifest["files"] else None


# ---------------------------------------------------------------------------------------------------------------- reading


def open_bundle(path: str | os.PathLike[str], verify: bool = True) -> Bundle:
    """Opens and checks a bundle; with `verify` also the sha256 of every file (about 0.5 s per GB and core).

    Raises BundleError: not a bundle, another format version, a field missing or absurd, a file missing, damaged or outside.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    _check_manifest(manifest, folder)
    _check_files(folder, manifest["files"], verify)
    _check_external_data(folder, manifest)
    return Bundle(folder, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not folder.exists():
        raise BundleError(f"There is no bundle at {folder}; `edgekv export MODEL -o {folder}` makes one.")
    file = folder / MANIFEST
    if not folder.is_dir() or not file.is_file():
        raise BundleError(f"{folder} is not a bundle (a folder with a {MANIFEST}); `edgekv export` makes one.")
    try:
        if file.stat().st_size > MAX_MANIFEST_BYTES:
            raise BundleError(f"{file} is larger than {MAX_MANIFEST_BYTES >> 20} MiB; export the bundle again.")
        manifest = json.loads(file.read_text(encoding="utf-8"), parse_constant=_finite, parse_float=_finite)
    except OSError as error:
        raise BundleError(f"{file} cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError):  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise BundleError(f"{file} is damaged: it is not valid JSON; export the bundle again.") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise BundleError(f"{file} does not describe an edgekv bundle (its format is not {FORMAT!r}).")
    version = manifest.get("version")
    if version != VERSION or isinstance(version, bool):
        shown = version if _is_int(version, 0, 10**6) else "unknown"
        raise BundleError(
            f"{folder} has bundle format version {shown}, this edgekv ({__version__}) reads version {VERSION}; "
            "export the bundle again with this edgekv."
        )
    return manifest


def _finite(text: str) -> float:
    """A number of JSON; ValueError for what would become infinity, and for NaN."""
    if not math.isfinite(value := float(text)):
        raise ValueError(text)
    return value


_MODEL_INTS = {"layers": 1 << 12, "hidden": 1 << 20, "vocab": 1 << 24, "context": 1 << 40}


def _check_manifest(manifest: dict[str, Any], folder: Path) -> None:
    """Types and ranges of everything the device side relies on, so that later code may index without asking."""

    def demand(condition: bool, what: str) -> None:
        if not condition:
            raise BundleError(f"{folder / MANIFEST} is damaged: {what}; export the bundle again.")

    for section in ("model", "graph", "policy", "files"):
        demand(isinstance(manifest.get(section), dict), f"{section!r} is missing")
    for section, kind in (("memory", dict), ("weights", dict), ("generation", dict), ("parity", (dict, type(None)))):
        demand(isinstance(manifest.get(section, {}), kind), f"{section!r} has the wrong type")
    model, graph, layers = manifest["model"], manifest["graph"], manifest.get("layers")
    for name, high in _MODEL_INTS.items():
        demand(_is_int(model.get(name), 1, high), f"model.{name} is not a sensible number")
    demand(isinstance(model.get("name"), str), "model.name is missing")
    demand(model.get("bos_token_id") is None or _is_int(model["bos_token_id"]), "model.bos_token_id is not a token id")
    eos = model.get("eos_token_ids")
    demand(isinstance(eos, list) and all(_is_int(token) for token in eos), "model.eos_token_ids is not a list of token ids")
    demand(safe_name(graph.get("file")) and graph["file"] in manifest["files"], "graph.file is not one of the files")
    demand(_is_int(graph.get("chunk"), 1, 1 << 20), "graph.chunk is not a sensible number")
    demand(isinstance(layers, list) and len(layers) == model["layers"], "the layers do not match model.layers")

    demand(isinstance(manifest.get("weights", {}).get("format"), str), "weights.format is missing")
    if "draft" in manifest:
        draft = manifest["draft"] if isinstance(manifest["draft"], dict) else {}
        cover = draft.get("coverage", "missing")
        share = cover is None or isinstance(cover, int | float) and not isinstance(cover, bool) and 0 <= cover <= 1
        demand(_is_int(draft.get("head_tokens"), 1, 1 << 24) and share, "'draft' does not say which tokens it knows")
    if "keys" in manifest:
        demand(thin_keys.sensible(manifest["keys"], len(layers)), "'keys' does not say how keys are stored")
    tables = manifest.get("inv_freq")
    demand(isinstance(tables, list), "'inv_freq' is missing")
    for table in tables:
        good = isinstance(table, list) and all(
            isinstance(f, int | float) and not isinstance(f, bool) and math.isfinite(f) for f in table
        )
        demand(good, "a rotary frequency table does not hold numbers")
    for index, layer in enumerate(layers):
        demand(isinstance(layer, dict) and isinstance(layer.get("params"), dict), f"layer {index} has no params")
        _check_params(layer, index, demand)
        table = layer.get("inv_freq")
        demand(table is None or _is_int(table, 0, len(tables) - 1), f"layer {index}: there is no frequency table {table}")
        rotary = layer["params"].get("rotary_dim", 0)
        demand(table is None or len(tables[table]) * 2 == rotary, f"layer {index}: its frequencies do not fit rotary_dim")
    if "keys" in manifest:
        complete = [layout.complete(layer["params"]) for layer in layers]
        demand(thin_keys.fits(manifest["keys"], complete), "'keys' says another form or other ranks than the layers have")
    demand(len({layer["params"]["tail_slots"] for layer in layers}) == 1, "layers have different boundary intervals")
    if any(layout.is_selfindex(layer["params"]) for layer in layers):
        _check_retrieval(manifest["policy"], demand)
    try:
        cache_policy(manifest)
    except UserError as error:
        demand(False, f"policy: {str(error).rstrip('.')}")

    for name, entry in manifest["files"].items():
        demand(safe_name(name) and name != MANIFEST, f"the file name {name!r} leaves the bundle")
        good = isinstance(entry, dict) and _is_int(entry.get("bytes")) and isinstance(entry.get("sha256"), str)
        demand(good, f"the entry of {name!r} lacks its size or hash")


def cache_policy(manifest: dict[str, Any]) -> CachePolicy:
    """The policy of a manifest, which may hold more than the rules. Raises UserError when it makes no sense."""
    known = {field.name for field in dataclasses.fields(CachePolicy)}
    return CachePolicy.from_json({name: value for name, value in manifest["policy"].items() if name in known})


def _check_retrieval(policy: dict[str, Any], demand: Callable[[bool, str], None]) -> None:
    try:
        parse_retrieval(policy.get("retrieve"))
        good = True
    except UserError:
        good = False
    demand(good, "policy.retrieve does not say how many compressed tokens are attended to")
    rerank = policy.get("rerank")
    demand(rerank is None or _is_int(rerank, 1, MOST_RERANK), "policy.rerank is not a sensible number")


def _check_params(layer: dict[str, Any], index: int, demand: Callable[[bool, str], None]) -> None:
    kinds = {name: code for name, code, _ in layout.FIELDS}
    for name, value in layer["params"].items():
        demand(name in kinds, f"layer {index}: the parameter {name!r} is unknown to this edgekv")
        whole = _is_int(value, -(1 << 31), (1 << 31) - 1)
        number = whole or kinds[name] == "f" and isinstance(value, float) and abs(value) < 3e38  # not for NaN and infinity
        demand(number, f"layer {index}: {name} is not a sensible number")
    sentence = layout.check_params(layer["params"])
    demand(sentence is None, f"layer {index}: {sentence}")
    size = layout.state_bytes(layer["params"])
    demand(layer.get("bytes") == size, f"layer {index}: its cache needs {size} bytes, not {layer.get('bytes')!r}")


def _check_files(folder: Path, files: dict[str, Any], verify: bool) -> None:
    for name, entry in files.items():
        path = folder / name
        if not _inside(folder, path):
            raise BundleError(f"{path} is a link that leaves the bundle; a bundle may only hold its own files.")
        if not path.is_file():
            raise BundleError(f"{path} is missing; export or copy the bundle again.")
        if path.stat().st_size != entry["bytes"]:
            raise BundleError(
                f"{path} is damaged: it has {path.stat().st_size} bytes, the manifest says {entry['bytes']}; "
                "export or copy the bundle again."
            )
    if not verify:
        return
    # hashing releases the interpreter lock, and reading warms the page cache that loading the weights needs anyway
    with ThreadPoolExecutor() as pool:
        for name, digest in zip(files, pool.map(lambda name: _digest_or_none(folder / name), files), strict=True):
            if digest != files[name]["sha256"]:
                raise BundleError(f"{folder / name} is damaged: its sha256 differs from the manifest; export or copy it again.")


def _digest_or_none(path: Path) -> str | None:
    with contextlib.suppress(OSError):
        return sha256_file(path)
    return None


def _check_external_data(folder: Path, manifest: dict[str, Any]) -> None:
    graph = folder / manifest["graph"]["file"]
    try:
        locations, _ = protobuf.scan_model(graph)
    except (ValueError, OSError) as error:
        raise BundleError(f"{graph} is not a readable ONNX file ({error}); export the bundle again.") from None
    base = PurePosixPath(manifest["graph"]["file"]).parent  # ONNX resolves locations against the graph's own folder
    for location in sorted(locations):
        if not safe_name(location) or not _inside(folder, folder / base / location):
            raise BundleError(f"{graph} keeps weights in {location!r}, which is outside the bundle; it will not be loaded.")
        if str(base / location) not in manifest["files"]:
            raise BundleError(f"{graph} keeps weights in {location!r}, which the manifest does not list; it will not be loaded.")


# ---------------------------------------------------------------------------------------------------------------- writing


@contextlib.contextmanager
def create(target: str | os.PathLike[str], force: bool = False) -> Iterator[Path]:
    """Yields an empty folder to fill and `seal`; when the block ends well it is renamed to `target`, else removed.

    The folder lies beside the target and is named `.NAME.partial-PID-*`; without its manifest nothing takes it for a bundle,
    and what a killed process left behind is removed by the next call.  Raises UserError when the target exists (unless
    `force`, which replaces it only at the very end) or its parent cannot be written, also for a disk that fills up.
    """
    target = Path(os.path.abspath(target))
    prefix = f".{target.name}.partial-"
    if not target.name:
        raise UserError(f"{target} cannot be the name of a bundle; give a folder that does not exist yet.")
    if target.exists() and not force:
        raise UserError(f"{target} exists already; give another name or --force to replace it.")
    if target.exists() and not (target / MANIFEST).is_file() and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target} is not a bundle, so --force will not replace it; give another name.")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        remove_orphans(target.parent, prefix)
        partial = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
    except OSError as error:
        raise UserError(f"{target} cannot be written: {error.strerror or error}.") from None
    try:
        yield partial
        if not (partial / MANIFEST).is_file():
            raise RuntimeError("the bundle was not sealed")
        os.chmod(partial, 0o755)  # mkdtemp makes folders private
        if target.exists() and not force:
            raise UserError(f"{target} was made by somebody else meanwhile; give another name.")
        if target.exists():
            aside = Path(tempfile.mkdtemp(prefix=f"{prefix}{os.getpid()}-", dir=target.parent))
            os.rename(target, aside / "old")
            os.rename(partial, target)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.rename(partial, target)
    except OSError as error:
        raise UserError(f"{target} could not be written: {error.strerror or error}; nothing was left behind.") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def remove_orphans(parent: Path, prefix: str) -> None:
    """Removes folders named PREFIX<pid>-* whose process is gone: what a killed export or build left behind."""
    for path in parent.glob(f"{prefix}*"):
        pid = path.name[len(prefix) :].split("-")[0]
        if pid.isdigit() and int(pid) != os.getpid() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        pass
    return True


def seal(folder: str | os.PathLike[str], manifest: dict[str, Any]) -> Bundle:
    """Completes `manifest` (format, version, created_by, files with sizes and hashes), writes it, and reads it back.

    Every file in the folder is listed.  Everything is flushed to disk before the manifest is written.  Raises BundleError
    when the result would not open, OSError when it cannot be written.
    """
    folder = Path(folder)
    names = sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file() and p.name != MANIFEST)
    files = {name: {"bytes": (folder / name).stat().st_size, "sha256": sha256_file(folder / name)} for name in names}
    complete = {"format": FORMAT, "version": VERSION, "created_by": f"edgekv {__version__}", **manifest, "files": files}
    text = json.dumps(complete, indent=1, ensure_ascii=False, allow_nan=False)
    for name in names:
        _flush(folder / name)
    with open(folder / f"{MANIFEST}.new", "w", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(folder / f"{MANIFEST}.new", folder / MANIFEST)
    return open_bundle(folder, verify=False)


def update_manifest(folder: str | os.PathLike[str], **sections: Any) -> Bundle:
    """Replaces top-level sections (e.g. parity) of a sealed bundle whose files did not change."""
    folder = Path(folder)
    manifest = _read_manifest(folder)
    manifest.update(sections)
    return seal(folder, manifest)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
