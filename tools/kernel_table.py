#!/usr/bin/env python3
"""Compile the CUDA kernels and print, as Markdown, what each attention kernel takes of a multiprocessor: registers, shared memory,
blocks that run at once. From the compiler's own report (-Xptxas -v) and the published sizes; no GPU needed.

    python tools/kernel_table.py --arch 87 110
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from build_plugin import PLUGINS, find_nvcc  # noqa: E402

# Shared memory of a multiprocessor in bytes; registers (65,536), threads (1,536) and the 1 KiB per block that CUDA keeps are the same.
SHARED = {"87": 164 << 10, "110": 228 << 10}
PATTERN = re.compile(
    r"Compiling entry function '(\w+)' for 'sm_\d+'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.S
)
HEADS = {1: 64, 2: 128, 4: 256}  # head size that a number of value chunks is for


def report(arch: str) -> list[tuple[str, int, int]]:
    """(kernel, registers, spilled bytes)"""
    with tempfile.TemporaryDirectory() as folder:
        command = [find_nvcc(), "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", f"-arch=sm_{arch}", str(PLUGINS / "cuda/api.cu"), "-o", f"{folder}/k"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    plain = subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"Compiling entry function '(?:void )?edgekv::cuda::([a-z_]+(?:<[^>]*>)?)", plain)
    return [(n, int(m[3]), int(m[1]) + int(m[2])) for n, m in zip(names, PATTERN.findall(done.stderr), strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["87", "110"], choices=SHARED)
    print("| SM | element | query rows per block | head size | registers | shared memory | blocks per SM | warps per SM | spills |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arch in parser.parse_args().arch:
        for name, registers, spills in sorted(report(arch)):
            match = re.fullmatch(r"attend<(__half|float), (\d), (\d), (true|false)>", name)
            if not match:
                continue
            element, per_warp, chunks = 2 if match[1] == "__half" else 4, int(match[2]), int(match[3])
            rows, dim = 4 * per_warp, HEADS[chunks]
            shared = element * 4160 * (4 if element == 2 else 3) + 4 * rows * dim + 4 * rows * 64  # attend_shared_bytes
            blocks = min(65536 // (-(-registers // 8) * 8 * 128), SHARED[arch] // (shared + 1024), 1536 // 128)
            how = f"{rows}{' (prefill)' if match[4] == 'true' else ''}"
            print(f"| {arch} | {'fp16' if element == 2 else 'fp32'} | {how} | {dim} | {registers} | {shared / 1024:.1f} KiB | {blocks} | {4 * blocks} | {spills} |")


if __name__ == "__main__":
    main()
