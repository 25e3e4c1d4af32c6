"""What is asked of the operating system."""

import mmap

import pytest

import psutil

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


def test_parts_of_a_mapped_file_can_be_named(tmp_path):
    size, page = 8 << 20, mmap.PAGESIZE
    (tmp_path / "model.onnx.data").write_bytes(b"\1" * size)
    with open(tmp_path / "model.onnx.data", "rb") as file, mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ):
        machine.populate(tmp_path, [])
        assert resident(tmp_path / "model.onnx.data") == 0
        machine.populate(tmp_path, [(5 * page + 1, page), (size - page, 2 * page)])
        assert 2 * page <= resident(tmp_path / "model.onnx.data") < size


def anonymous_huge_pages() -> int:
    with open("/proc/self/smaps_rollup", encoding="utf-8") as rollup:
        return next(int(line.split()[1]) * 1024 for line in rollup if line.startswith("AnonHugePages:"))


def test_large_resident_blocks_become_huge_pages():
    """Where the kernel has none of it, nothing changes and nothing fails."""
    size = 64 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        for at in range(0, size, mmap.PAGESIZE):
            block[at] = 1
        before = anonymous_huge_pages()
        turned = machine.huge_pages()
        assert block[size - mmap.PAGESIZE] == 1
        if turned == 0:
            pytest.skip("this kernel makes no huge pages on request")
        assert anonymous_huge_pages() - before >= size - (8 << 20)


def test_blocks_that_are_mostly_empty_do_not_grow():
    size = 64 << 20
    machine.huge_pages()
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as block:
        block[0] = 1
        before = psutil.Process().memory_info().rss
        machine.huge_pages()
        assert psutil.Process().memory_info().rss - before < 4 << 20
