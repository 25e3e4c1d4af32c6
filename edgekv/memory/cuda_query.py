"""What the CUDA driver says of the first GPU, without any CUDA package: libcuda through ctypes. None where there is no GPU."""

from __future__ import annotations

import ctypes

# CUdevice_attribute numbers of cuda.h, and what becomes of them in a profile.
ATTRIBUTES = {
    "clock_khz": 13,
    "sm_count": 16,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "shared_per_sm_bytes": 81,
    "persisting_l2_bytes": 108,
    "access_window_bytes": 109,
}


def query(library: str = "libcuda.so.1") -> dict[str, int] | None:
    """Attributes of device 0 by the names above, those that the driver knows; None without a driver or a device."""
    try:
        cuda = ctypes.CDLL(library)
        functions = cuda.cuInit, cuda.cuDeviceGet, cuda.cuDeviceGetAttribute
    except (OSError, AttributeError):
        return None
    init, get, attribute = functions
    device, value = ctypes.c_int(), ctypes.c_int()
    if init(0) or get(ctypes.byref(device), 0):
        return None
    found = {}
    for name, number in ATTRIBUTES.items():
        if attribute(ctypes.byref(value), number, device) == 0:
            found[name] = value.value
    return found
