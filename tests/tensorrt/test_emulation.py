"""The emulation of CUDA on a CPU: right kernels give right results in every order, wrong ones are found out."""

import ctypes
from ctypes import c_char_p, c_uint64

import numpy as np
import pytest
from emulated import PLUGINS, aligned, build, watched_sources
from pathlib import Path

PROBES = ["tree_sum", "warp_tree", "staged", "half_the_block_waits", "waits_in_two_places", "writes_past_shared_memory", "forgets_a_copy", "unaligned_copy"]
ORDERS = [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 1), (3, 2), (3, 3)]


@pytest.fixture(scope="module")
def probes():
    source = Path(__file__).parent / "kernels" / "probes.cu"
    lib = ctypes.CDLL(str(build("probes", [source, PLUGINS / "emulation/emulation.cpp"], watched_sources())))
    lib.emulation_sites.restype = lib.emulation_error.restype = c_char_p
    lib.emulation_configure.argtypes = [ctypes.c_int, c_uint64]
    return lib


def run(lib, name, numbers, outputs, *, blocks=1, threads=64, shared=256, order=(0, 0), drop=""):
    lib.emulation_configure(*order)
    file, _, line = drop.partition(":")
    lib.emulation_drop(file.encode(), int(line or 0))
    source = aligned(numbers.nbytes).view(np.float32)
    source[:] = numbers
    out = np.full(outputs, np.nan, np.float32)
    floats = ctypes.POINTER(ctypes.c_float)
    failed = lib.run_probe(PROBES.index(name), source.ctypes.data_as(floats), out.ctypes.data_as(floats), numbers.size, blocks, threads, shared)
    if failed:
        raise RuntimeError(lib.emulation_error().decode())
    return out


NUMBERS = np.random.default_rng(0).standard_normal(64 * 4).astype(np.float32)


@pytest.mark.parametrize("order", ORDERS)
def test_right_kernels_give_the_same_in_every_order(probes, order):
    sums = run(probes, "tree_sum", NUMBERS, 4, blocks=4, order=order)
    np.testing.assert_allclose(sums, NUMBERS.reshape(4, 64).sum(1), rtol=1e-4, atol=1e-5)
    warps = run(probes, "warp_tree", NUMBERS[:64], 192, order=order).reshape(2, 32, 3)
    for warp, numbers in zip(warps, NUMBERS[:64].reshape(2, 32)):
        np.testing.assert_allclose(warp[:, 0], numbers.sum(), rtol=1e-4, atol=1e-5)
        assert (warp[:, 0] == warp[0, 0]).all()
        assert (warp[:, 1] == (numbers > 0).sum()).all() and (warp[:, 2] == numbers[3]).all()
    np.testing.assert_array_equal(run(probes, "staged", NUMBERS, 64, shared=1024, order=order), NUMBERS[(np.arange(64) * 5 + 1) % 256])


def test_every_barrier_that_is_taken_away_is_noticed(probes):
    """The loop's barrier, the one before it, the wait for copies and the one behind it: each removed alone."""
    for name, outputs, shared in (("tree_sum", 4, 256), ("staged", 64, 1024)):
        how = {"blocks": 4 if name == "tree_sum" else 1, "shared": shared}
        good = run(probes, name, NUMBERS, outputs, **how)
        places = [s for s in probes.emulation_sites().decode().split() if s.startswith("probes.cu")]
        noticed = set()
        for place in places:
            for order in ORDERS:
                try:
                    if not np.array_equal(run(probes, name, NUMBERS, outputs, order=order, drop=place, **how), good):
                        noticed.add(place)
                except RuntimeError:
                    noticed.add(place)
        assert len(noticed) == 2, (name, places, noticed)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("half_the_block_waits", "waits for ever at probes.cu:"),
        ("waits_in_two_places", "wait at different places: probes.cu:"),
        ("writes_past_shared_memory", "past the end of shared memory"),
        ("forgets_a_copy", "copies in flight"),
        ("unaligned_copy", "not 16-byte aligned"),
    ],
)
@pytest.mark.parametrize("order", [(0, 0), (1, 1), (3, 5)])
def test_wrong_kernels_are_named(probes, name, sentence, order):
    with pytest.raises(RuntimeError, match=sentence):
        run(probes, name, NUMBERS, 64, shared=1024 if "copy" in name else 256, order=order)
    np.testing.assert_allclose(run(probes, "tree_sum", NUMBERS, 4, blocks=4), NUMBERS.reshape(4, 64).sum(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("threads", "blocks"), [(48, 1), (2048, 1), (64, 0)])
def test_launches_that_cuda_would_refuse_are_refused(probes, threads, blocks):
    with pytest.raises(RuntimeError, match="blocks must be|grid is empty"):
        run(probes, "tree_sum", NUMBERS, 4, blocks=blocks, threads=threads)
