"""GGUF files: a strict look at the header before anything else reads it, then one conversion that is cached by content.

transformers reads a GGUF slowly and wholly into memory, so the result is saved as an ordinary model directory in
~/.cache/edgekv (or $XDG_CACHE_HOME/edgekv) under the file's own hash, and later exports start from that.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path

from edgekv.bundle import sha256_file
from edgekv.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MOST_TENSORS, MOST_KEYS = 1 << 20, 1 << 20
STRING, ARRAY = 8, 9
SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
UINT32 = 4


class _Header:
    """Reads the header of a GGUF file field by field; every length is checked against what is left of the file."""

    def __init__(self, file, size: int):
        self.file, self.size = file, size

    def take(self, count: int) -> bytes:
        if count < 0 or count > self.size - self.file.tell():
            raise ValueError("it ends too early")
        data = self.file.read(count)
        if len(data) != count:
            raise ValueError("it ends too early")
        return data

    def number(self, form: str) -> int:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(form)))[0]

    def string(self) -> bytes:
        return self.take(self.number("Q"))

    def skip(self, kind: int, depth: int = 0) -> None:
        if kind == STRING:
            self.string()
        elif kind == ARRAY and depth < 4:
            inner, count = self.number("I"), self.number("Q")
            if inner in SCALAR_BYTES:
                self.take(SCALAR_BYTES[inner] * count)
            else:
                if count > self.size:
                    raise ValueError("an array is longer than the file")
                for _ in range(count):
                    self.skip(inner, depth + 1)
        elif kind in SCALAR_BYTES:
            self.take(SCALAR_BYTES[kind])
        else:
            raise ValueError(f"a field has the unknown type {kind}")


def check(path: Path) -> None:
    """Raises UserError when the file is no GGUF, is cut short, or describes tensors that it does not hold."""
    from gguf import GGML_QUANT_SIZES

    try:
        size = path.stat().st_size
        with open(path, "rb") as file:
            header = _Header(file, size)
            if header.take(4) != MAGIC:
                raise ValueError("it does not start with the letters GGUF")
            version = header.number("I")
            if version not in VERSIONS:
                raise ValueError(f"its version is {version}, not {' or '.join(map(str, VERSIONS))}")
            tensors, keys = header.number("Q"), header.number("Q")
            if not 0 < tensors <= MOST_TENSORS or keys > MOST_KEYS:
                raise ValueError("its number of tensors or fields makes no sense")
            alignment = 32
            for _ in range(keys):
                name, kind = header.string(), header.number("I")
                if name == b"general.alignment" and kind == UINT32:
                    alignment = header.number("I")
                else:
                    header.skip(kind)
            end = 0
            for _ in range(tensors):
                header.string()
                rank = header.number("I")
                if rank > 8:
                    raise ValueError("a tensor has too many dimensions")
                elements = 1
                for _ in range(rank):
                    elements *= header.number("Q")
                kind, offset = header.number("I"), header.number("Q")
                if kind not in GGML_QUANT_SIZES:
                    raise ValueError(f"a tensor has the unknown type {kind}")
                block, bytes_per_block = GGML_QUANT_SIZES[kind]
                end = max(end, offset + elements // block * bytes_per_block)
            if alignment < 1 or alignment & (alignment - 1):
                raise ValueError("its alignment is no power of two")
            start = -(-file.tell() // alignment) * alignment
            if start + end > size:
                raise ValueError(f"it has {size} bytes and its tensors need {start + end}")
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, struct.error) as error:
        raise UserError(f"{path} is not a usable GGUF file: {error}; download it again.") from None


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "edgekv" / "gguf"


def as_directory(path: Path, note: Callable[[str], None]) -> Path:
    """The model directory made from a GGUF file, converted now or taken from the cache. UserError for files that do not convert."""
    check(path)
    note("hashing")
    folder = cache_folder() / sha256_file(path)
    if (folder / "config.json").is_file():
        return folder
    note("converting, once for this file")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
    except OSError as error:
        raise UserError(f"{folder.parent} cannot be written: {error.strerror or error}.") from None
    try:
        _convert(path, partial)
        with contextlib.suppress(OSError):  # another export may have been faster
            os.rename(partial, folder)
    except OSError as error:
        raise UserError(f"{path} could not be converted into {folder.parent}: {error.strerror or error}.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(path: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    from edgekv.export.quiet import quiet

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, quantization_config=GgufConfig(dequantize=True), trust_remote_code=False
            )
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    except OSError:
        raise
    except Exception as error:
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise UserError(f"{path} cannot be converted: {reason}") from None
    finally:
        if bars:
            logging.enable_progress_bar()
