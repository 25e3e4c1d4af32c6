"""The folder of a training run, which a later call of the same command goes on with."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from edgekv.errors import UserError
from edgekv.export.load import Source

RECORD = "options.json"
UNFINISHED = f"{RECORD}.new"  # a record that is being written
FINISHED = "finished"  # marks the folder of a run whose result may stand under its name
RESULT = "result"  # what becomes that


def claim(work: Path, command: str, source: Source, options: Mapping[str, Any], fresh: bool) -> None:
    """Makes the folder, empty unless the same command has begun the same run there before.

    command  its name, for the sentences
    options  what decides the outcome of the run, as JSON takes it; kept in the folder beside the model's name and size
    fresh    starts over in a folder of the command

    Raises UserError when the folder belongs to something else, to a run with other options, or cannot be written.
    """
    asked = json.loads(json.dumps({"model": source.name, "checkpoint_bytes": source.checkpoint.bytes, **options}))
    record = work / RECORD
    try:
        if work.exists() and not record.is_file() and not _just_made(work):
            raise UserError(f"{work} is in the way: it is not the work of `edgekv {command}`. Move it or give another name.")
        if record.is_file() and fresh:
            _remove(work)
        if record.is_file() and _read(record) != asked:
            raise UserError(f"{work} belongs to an `edgekv {command}` with other options; give those to go on with it, or --fresh to start over.")
        work.mkdir(parents=True, exist_ok=True)
        (work / FINISHED).unlink(missing_ok=True)
        if not record.is_file():
            (work / UNFINISHED).write_text(json.dumps(asked, indent=1))
            os.replace(work / UNFINISHED, record)
    except OSError as error:
        raise UserError(f"{work} cannot be written: {error.strerror or error}.") from None


def _just_made(work: Path) -> bool:
    """Whether a run was stopped between making this folder and saying whose it is."""
    return work.is_dir() and all(path.name == UNFINISHED for path in work.iterdir())


def _remove(work: Path) -> None:
    """What says whose the folder is goes last, so that one which is half gone is still known."""
    for path in work.iterdir():
        if path.name not in (RECORD, FINISHED):
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
    (work / RECORD).unlink(missing_ok=True)
    shutil.rmtree(work)


def finish(work: Path, target: Path) -> None:
    """The end of a run: what lies in its folder as RESULT, if anything does, takes the place of `target`, and the folder goes. See sweep."""
    (work / FINISHED).touch()
    if (work / RESULT).exists():
        if target.exists():
            shutil.rmtree(target)
        (work / RESULT).rename(target)
    sweep(work, target)


def sweep(work: Path, target: Path) -> None:
    """Removes the folder of a run that has its result, when it was stopped before it did so itself."""
    if (work / FINISHED).is_file() and target.exists() and not (work / RESULT).exists():
        with contextlib.suppress(OSError):
            _remove(work)


def of_text(path: Path, content: str) -> dict[str, Any]:
    """What tells one text from another, for the options of a run that reads it."""
    encoded = content.encode()
    return {"path": str(path.resolve()), "bytes": len(encoded), "sha256": hashlib.sha256(encoded).hexdigest()}


@contextmanager
def beginning(work: Path) -> Iterator[None]:
    """Around the first part of a run: what is refused there, before anything was kept, leaves no folder, so that other options may follow."""
    try:
        yield
    except UserError:
        if all(path.name == RECORD for path in work.glob("*")):
            shutil.rmtree(work, ignore_errors=True)
        raise


def _read(record: Path) -> Any:
    """None for what is no JSON, as after a crash: nothing equals it."""
    try:
        return json.loads(record.read_text())
    except (OSError, ValueError):
        return None


def save(state: Mapping[str, Any], path: Path) -> None:
    """Keeps numbers, tensors and their collections at `path`: all of them, or what was there before."""
    torch.save(dict(state), path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def read(path: Path) -> dict[str, Any]:
    """What save() has kept at `path`, on the CPU. UserError when it is damaged; nothing in it is executed."""
    with restoring(path):
        return torch.load(path, weights_only=True, map_location="cpu")


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Around the use of what was kept at `path`: whatever does not fit there is said as UserError."""
    try:
        yield
    except Exception as error:
        what = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{path} is damaged ({what[0].split('. ')[0][:120]}); start over with --fresh.") from None


@torch.no_grad()
def put(numbers: Any, into: torch.Tensor) -> None:
    """Copies what was kept into a tensor of the run; ValueError where it is none of this shape, or not all numbers. (A copy alone would
    spread a single number over all.)"""
    if not isinstance(numbers, torch.Tensor) or numbers.shape != into.shape or not torch.isfinite(numbers).all():
        raise ValueError("its numbers are not those of this run")
    into.copy_(numbers)
