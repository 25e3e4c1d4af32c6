"""Installs a CPU build of PyTorch into the Python that runs this, unless one is there; the export extra needs it.

    python tools/install_torch.py VERSION

On Linux the default wheels of PyTorch bring several gigabytes of CUDA libraries that edgekv never uses. Two ways lead around
them: a pip index that carries the `+cpu` build of the version, else the installer `uv`, which knows where the PyTorch project
publishes its CPU builds. On other systems the default wheels are CPU builds.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys


def pip(*arguments: str) -> bool:
    return subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *arguments]).returncode == 0


def quietly(command: list[str]) -> bool:
    return subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0


def install(version: str) -> bool:
    if not sys.platform.startswith("linux"):
        return pip(f"torch=={version}")
    print(f"installing torch {version} (CPU build)", file=sys.stderr)
    if quietly([sys.executable, "-m", "pip", "install", "--quiet", f"torch=={version}+cpu"]):
        return True
    uv = ["-m", "uv", "pip", "install", "--python", sys.executable, "--torch-backend=cpu", f"torch=={version}"]
    return pip("uv") and subprocess.run([sys.executable, *uv]).returncode == 0


if __name__ == "__main__":
    if importlib.util.find_spec("torch") is None and not install(sys.argv[1]):
        raise SystemExit(
            f"No CPU build of torch {sys.argv[1]} could be installed; install torch into {sys.prefix} in your own way and run this again."
        )
