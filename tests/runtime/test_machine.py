"""What is asked of the operating system."""

import mmap

import pytest

from edgekv import machine


def resident(path) -> int:
    """Bytes of the mappings of a file that are in this process's memory."""
    total, counting = 0, False
    with open("/proc/self/smaps", encoding="utf-8") as maps:
        for line in maps:
            if line.split(maxsplit=1)[0].endswith(":"):
                total += int(line.split()[1]) * 1024 if counting and line.startswith("Rss:") else 0
            else:
                counting = line.rstrip().endswith(str(path))
    return total


def test_mapped_tables_are_in_memory_before_they_are_used(tmp_path):
    size = 8 << 20
    inside, outside = tmp_path / "bundle", tmp_path / "bundle2"
    for folder in (inside, outside):
        folder.mkdir()
        (folder / "model.onnx.data").write_bytes(b"\1" * size)
    with open(inside / "model.onnx.data", "rb") as ours, open(outside / "model.onnx.data", "rb") as other:
        with mmap.mmap(ours.fileno(), size, prot=mmap.PROT_READ), mmap.mmap(other.fileno(), size, prot=mmap.PROT_READ):
            if resident(inside / "model.onnx.data") == size:
                pytest.fail("the mapping is resident before the call, so the test shows nothing")
            machine.populate(inside)
            assert resident(inside / "model.onnx.data") == size
            assert resident(outside / "model.onnx.data") < size
