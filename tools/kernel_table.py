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
GROUP = 4  # query heads per kv head, for kernels whose shared memory depends on it
# Other kernels of a step on a compressed cache: threads, and shared memory in bytes for a head size (the *_shared_bytes of plugins/cuda).
RETRIEVAL = {
    "turn_queries": (128, lambda dim: 4 * dim),
    "score_tables": (128, lambda dim: 4 * (2 * dim + dim // 4 * 17 + 4)),
    "scan_codes": (128, lambda dim: 4 * dim),
    "choose_by_codes": (256, lambda dim: 4 * (256 + 8 + 3)),
    "score_candidates": (128, lambda dim: 4 * (1024 + GROUP * dim)),
    "choose_by_keys": (256, lambda dim: 4 * (256 + 8 + 3 + 2 * GROUP + 8)),
    "combine_packed": (64, lambda dim: 4 * dim),
}


def report(arch: str) -> list[tuple[str, int, int]]:
    """(kernel, registers, spilled bytes)"""
    with tempfile.TemporaryDirectory() as folder:
        command = [find_nvcc(), "-std=c++17", "-O3", "-cubin", "-Xptxas", "-v", f"-arch=sm_{arch}", str(PLUGINS / "cuda/api.cu"), "-o", f"{folder}/k"]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    plain = subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True, check=True).stdout
    names = re.findall(r"Compiling entry function '(?:void )?edgekv::cuda::([a-z_]+(?:<[^>]*>)?)", plain)
    return [(n, int(m[3]), int(m[1]) + int(m[2])) for n, m in zip(names, PATTERN.findall(done.stderr), strict=True)]


def blocks_per_sm(arch: str, registers: int, shared: int, threads: int) -> int:
    return min(65536 // (-(-registers // 8) * 8 * threads), SHARED[arch] // (shared + 1024), 1536 // threads)


def packed_tables(reports: dict[str, list[tuple[str, int, int]]]) -> None:
    """The kernels of a step on a compressed cache."""
    all_kernels = [(arch, *kernel) for arch, kernels in reports.items() for kernel in sorted(kernels)]
    print("\n| SM | attend_packed: query rows per block | head size | registers | shared memory | blocks per SM | warps per SM | spills |")
    print("|---|---|---|---|---|---|---|---|")
    for arch, name, registers, spills in all_kernels:
        match = re.fullmatch(r"attend_packed<(\d), (\d), (true|false)>", name)
        if match:
            rows, dim = 4 * int(match[1]), HEADS[int(match[2])]
            shared = 4 * (4160 + rows * dim + rows * 64 + rows + 64) + 4 * 1024  # attend_packed_shared_bytes
            blocks, how = blocks_per_sm(arch, registers, shared, 128), f"{rows}{' (prefill)' if match[3] == 'true' else ''}"
            print(f"| {arch} | {how} | {dim} | {registers} | {shared / 1024:.1f} KiB | {blocks} | {4 * blocks} | {spills} |")
    print("\n| SM | kernel, head size 128 | threads | registers | shared memory | blocks per SM | spills |")
    print("|---|---|---|---|---|---|---|")
    for arch, name, registers, spills in all_kernels:
        if name in RETRIEVAL:
            threads, size = RETRIEVAL[name]
            shared = size(128)
            print(f"| {arch} | `{name}` | {threads} | {registers} | {shared / 1024:.1f} KiB | {blocks_per_sm(arch, registers, shared, threads)} | {spills} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["87", "110"], choices=SHARED)
    reports = {arch: report(arch) for arch in parser.parse_args().arch}
    print("| SM | element | query rows per block | head size | registers | shared memory | blocks per SM | warps per SM | spills |")
    print("|---|---|---|---|---|---|---|---|---|")
    for arch, kernels in reports.items():
        for name, registers, spills in sorted(kernels):
            match = re.fullmatch(r"attend<(__half|float), (\d), (\d), (true|false)>", name)
            if not match:
                continue
            element, per_warp, chunks = 2 if match[1] == "__half" else 4, int(match[2]), int(match[3])
            rows, dim = 4 * per_warp, HEADS[chunks]
            shared = element * 4160 * (4 if element == 2 else 3) + 4 * rows * dim + 4 * rows * 64  # attend_shared_bytes
            blocks = blocks_per_sm(arch, registers, shared, 128)
            how = f"{rows}{' (prefill)' if match[4] == 'true' else ''}"
            print(f"| {arch} | {'fp16' if element == 2 else 'fp32'} | {how} | {dim} | {registers} | {shared / 1024:.1f} KiB | {blocks} | {4 * blocks} | {spills} |")
    packed_tables(reports)


if __name__ == "__main__":
    main()
