"""Memory of one engine on the device and page-locked beside it: everything that was taken is given back at once."""

from __future__ import annotations

import numpy as np

from edgekv.engine.device import TO_DEVICE, TO_HOST, Device
from edgekv.errors import NativeError, UserError

ALIGNMENT = 256
ZEROS = 1 << 20  # bytes of page-locked zeros that memory is cleared from


def padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class DeviceMemory:
    """Takes memory on `device` and copies in the order of one stream, which it owns."""

    def __init__(self, device: Device):
        self.device = device
        self.stream = device.stream()
        self._owned: list[int] = []
        self._pinned: list[np.ndarray] = []
        self._zeros: np.ndarray | None = None
        self._open = True

    def alloc(self, size: int) -> int:
        """Address of zeroed device memory. NativeError when the device refuses."""
        address = self.device.alloc(max(size, 1))
        self._owned.append(address)
        return address

    def alloc_cache(self, sizes: list[int]) -> tuple[list[int], bool]:
        """Addresses of one block per size, each rounded up to ALIGNMENT, and whether they lie one behind the other.

        Memory may be free but in pieces (seen on Jetson): then every block is taken by itself. UserError when that is refused too.
        """
        sizes = [padded(size) for size in sizes]
        try:
            first = self.alloc(sum(sizes))
            return [first + start for start in np.cumsum([0, *sizes[:-1]]).tolist()], True
        except NativeError:
            pass
        try:
            return [self.alloc(size) for size in sizes], False
        except NativeError as error:
            raise UserError(
                f"The device refused {sum(sizes) >> 20} MiB for the KV cache, also layer by layer ({error}); "
                "close other programs or export with a smaller --kv-budget."
            ) from None

    def host(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """A zeroed page-locked array. It must not be used after `close`."""
        array = self.device.host_array(shape, dtype)
        self._pinned.append(array)
        array[...] = 0
        return array

    def upload(self, array: np.ndarray) -> int:
        """Address of a copy of `array` on the device."""
        array = np.ascontiguousarray(array)
        address = self.alloc(array.nbytes)
        self.write(address, array)
        self.wait()
        return address

    def write(self, address: int, array: np.ndarray) -> None:
        """Queues a copy of a contiguous array to the device; the array must stay as it is until `wait`."""
        self.device.copy(address, array.ctypes.data, array.nbytes, TO_DEVICE, self.stream)

    def read(self, array: np.ndarray, address: int) -> None:
        """Queues a copy from the device into a contiguous array, which holds it after `wait`."""
        self.device.copy(array.ctypes.data, address, array.nbytes, TO_HOST, self.stream)

    def clear(self, address: int, size: int) -> None:
        """Queues zeros for [address, address + size)."""
        if self._zeros is None:
            self._zeros = self.host((ZEROS,), np.uint8)
        for start in range(0, size, ZEROS):
            self.write(address + start, self._zeros[: min(ZEROS, size - start)])

    def wait(self) -> None:
        self.device.wait(self.stream)

    def give_back(self, address: int) -> None:
        self._owned.remove(address)
        self.device.free(address)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        for address in self._owned:
            self.device.free(address)
        for array in self._pinned:
            self.device.free_host(array)
        self._owned, self._pinned, self._zeros = [], [], None
        self.device.destroy_stream(self.stream)
