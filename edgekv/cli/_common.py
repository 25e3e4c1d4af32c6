"""What several commands share: their arguments, reading text, and Ctrl-C that ends an answer instead of the program."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import click

from edgekv.errors import UserError

bundle_argument = click.argument("bundle", type=click.Path(path_type=Path))
threads_option = click.option(
    "--threads", type=click.IntRange(1, 1024), default=None, help="Threads of the model; default: the physical cores."
)
engine_option = click.option(
    "--engine",
    "kind",
    type=click.Choice(["onnxruntime", "tensorrt"]),
    default="onnxruntime",
    show_default=True,
    help="What runs the model; tensorrt needs an NVIDIA GPU and `edgekv build`.",
)
verify_option = click.option(
    "--verify/--no-verify",
    default=True,
    show_default=True,
    help="Compare the hash of every file with the manifest before running (about 0.5 s per GB and core).",
)


def check_retrieval(bundle: Any, amount: Any, rerank: int | None) -> None:
    """Raises UserError when --retrieve or --rerank is given and the bundle has no index."""
    if (amount is not None or rerank is not None) and not bundle.compressed:
        raise UserError(
            f"{bundle.folder} has no index to retrieve tokens from: its cache is dense and every token in it is attended to; "
            "export with --cache selfindex."
        )
    if rerank not in (None, 1) and bundle.latent:
        raise UserError(f"{bundle.folder} stores latent keys, which are chosen by their sign codes alone: rerank must be 1.")


def set_retrieval(loaded: Any, amount: Any, rerank: int | None) -> None:
    """What --retrieve and --rerank say, over what the bundle says."""
    if amount is not None or rerank is not None:
        loaded.retrieve(amount or loaded.retrieval, rerank)


def read_text(path: Path) -> str:
    """A text file, which must be UTF-8; raises UserError."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"There is no file {path}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start} is wrong); convert it, e.g. with iconv -t UTF-8.") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def read_standard_input() -> str:
    """All of standard input, which must be UTF-8; raises UserError."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"Standard input is not UTF-8 text (byte {error.start} is wrong); convert it first.") from None


class Interrupts:
    """While entered, the first Ctrl-C only raises a flag, which the generation asks for; a second one interrupts as usual.

    So no interrupt ever falls between two layers of a compaction, and the cache stays usable for the next question.
    """

    def __init__(self) -> None:
        self._count = 0
        self._before: Any = None

    def __enter__(self) -> Callable[[], bool]:
        self._count = 0
        self._before = signal.signal(signal.SIGINT, self._on_signal)
        return lambda: self._count > 0

    def _on_signal(self, number: int, frame: Any) -> None:
        self._count += 1
        if self._count > 1:
            raise KeyboardInterrupt

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        signal.signal(signal.SIGINT, self._before)


class PrefillProgress:
    """Counts prompt tokens on standard error while a prompt of several blocks is read, and wipes the line at the end."""

    def __init__(self) -> None:
        self._shown = False

    def __call__(self, fed: int, total: int) -> None:
        if fed < total or self._shown:
            sys.stderr.write(f"\rreading the prompt: {fed} of {total} tokens" if fed < total else "\r\033[K")
            sys.stderr.flush()
        self._shown = fed < total
