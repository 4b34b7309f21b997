"""Memory that a rank shares with the process that writes its files: one range of addresses, into
which files are mapped.
"""

import ctypes
import mmap
import os
import time
import weakref

import numpy as np

PAGE = mmap.PAGESIZE
#: Bytes at the beginning, to which rows go that nobody needs, and the place of a number after them.
VOID = 1 << 20
_LANDED = VOID - PAGE
#: A row of no bank is larger.
LARGEST_ROW = _LANDED
#: Seconds between two looks at whether rows have landed.
_LOOK_S = 0.0002
_NONE = 0
_READ_WRITE = mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class HostMemoryError(RuntimeError):
    """The machine has no memory left for rows, or cannot lock more of it."""


class SharedMemory:
    """A range of addresses; what is mapped into it may be accessed."""

    def __init__(self, size: int) -> None:
        """Reserve `size` bytes of addresses. Raises HostMemoryError."""
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._address = _mapped(None, size, _NONE, anonymous, -1)
        memory = (ctypes.c_uint8 * size).from_address(self._address)
        weakref.finalize(memory, _libc.munmap, self._address, size).atexit = False
        self._whole = memoryview(memory)
        self.bytes = self.lease()
        #: int64 `[1]`: which landing was the last to be over, see `landings`.
        self.landed: np.ndarray = self.bytes[_LANDED : _LANDED + 8].view(np.int64)

    def map(self, start: int, stop: int, descriptor: int) -> None:
        """Map a file, from its beginning, to this part of the range. Raises HostMemoryError."""
        flags = mmap.MAP_SHARED | _MAP_FIXED
        _mapped(self._address + start, stop - start, _READ_WRITE, flags, descriptor)

    def advise(self, start: int, stop: int, advice: int) -> None:
        """Tell the system how this part is used, see madvise(2)."""
        _libc.madvise(self._address + start, stop - start, advice)

    def lease(self, start: int = 0, size: int = -1) -> np.ndarray:
        """Return a part of the range, uint8 `[size]`, as an object of its own: all views of it
        refer to it, so that it is over when the last of them is.
        """
        # of a view of an array, numpy's views would refer to that array
        return np.frombuffer(self._whole, np.uint8, size, start)

    def wait(self, landing: int) -> None:
        """Wait until this landing is over."""
        while int(self.landed[0]) < landing:
            time.sleep(_LOOK_S)


def _mapped(address: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    """Map memory; return its address. Raises HostMemoryError."""
    found: int = _libc.mmap(address, size, access, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        why = os.strerror(ctypes.get_errno())
        raise HostMemoryError(f"cannot map {size} bytes for captured rows: {why}")
    return found
