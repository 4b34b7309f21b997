"""Arena: a rank's memory for captured rows, from the forward that records them until they are
written.

It is one range of addresses, so that all rows of a bank are one tensor: the forward, or an
accelerator's copy stream, writes each row to the place where it stays. Its first part is
page-locked for an accelerator, the second is memory, and the third is a file without a name, for
rows that are spilled. Pages take memory when they are first written to.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from ..base.host_memory import HostMemoryError, lock
from .landings import LANDED, Landing

#: Bytes at the beginning, to which rows go that nobody needs: more than a row of any bank has.
VOID = 1 << 20
#: Addresses for spilled rows; the disk may have less room.
SPILLED = 1 << 40
_PAGE = mmap.PAGESIZE
_NONE, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE
_MAP_FIXED, _MAP_NORESERVE, _MADV_REMOVE, _MADV_DONTFORK = 0x10, 0x4000, 9, 10

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class _Free:
    """The free ranges of a part, by address, none of which touches the next."""

    def __init__(self, start: int, stop: int) -> None:
        self.start, self.stop = start, stop
        self._starts, self._stops = [start], [stop]

    def take(self, size: int, align: int) -> int | None:
        """Take the first `size` bytes that are free, from a multiple of `align` on; return it."""
        for at, (start, stop) in enumerate(zip(self._starts, self._stops, strict=True)):
            first = -(-start // align) * align
            if first + size <= stop:
                left = [(a, b) for a, b in ((start, first), (first + size, stop)) if a < b]
                self._starts[at : at + 1] = [a for a, _ in left]
                self._stops[at : at + 1] = [b for _, b in left]
                return first
        return None

    def give(self, start: int, stop: int) -> None:
        at = bisect_left(self._starts, start)
        begin, end = at, at
        if at and self._stops[at - 1] == start:
            begin, start = at - 1, self._starts[at - 1]
        if at < len(self._starts) and self._starts[at] == stop:
            end, stop = at + 1, self._stops[at]
        self._starts[begin:end], self._stops[begin:end] = [start], [stop]


class Arena:
    """The arena of one rank. Memory is taken in one thread, and returns from any."""

    def __init__(
        self, keep: int, spill_dir: Path | None = None, *, locked: int = 0, room: int = 0
    ) -> None:
        """`keep`: bytes whose pages are kept when nothing is in them, because touching new ones
        takes longer than copying rows. `locked`: bytes of the page-locked part. `room`: bytes of
        memory at most; 0: those of the machine.

        Raises HostMemoryError.
        """
        room = room or os.sysconf("SC_PHYS_PAGES") * _PAGE
        locked = -(-max(locked, VOID) // _PAGE) * _PAGE if locked else 0
        disk = SPILLED if spill_dir is not None else 0
        self._spill_dir, self._descriptor = spill_dir, -1
        end = -(-(max(locked, VOID) + room) // _PAGE) * _PAGE
        self.locked, self._keep = locked, max(keep, locked)
        self._parts = [_Free(VOID, max(locked, VOID)), _Free(max(locked, VOID), end)]
        self._disk = _Free(end, end + disk)
        self.spilled = 0  # bytes spilled so far
        self.used = 0  # bytes of memory in use
        self.landing: Landing = LANDED  # of all rows so far
        # Filled from any thread, also by garbage collection, so no lock may be taken there.
        self._returned: deque[tuple[int, int, Landing]] = deque()
        anonymous = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._address = _mapped(None, end + disk, _NONE, anonymous, -1)
        descriptor = os.memfd_create("midstream-rows")
        os.ftruncate(descriptor, end)
        _mapped(self._address, end, _READ_WRITE, mmap.MAP_SHARED | _MAP_FIXED, descriptor)
        os.close(descriptor)
        # a child's copies of views would give this process's pages back
        _libc.madvise(self._address, end, _MADV_DONTFORK)
        memory = (ctypes.c_uint8 * (end + disk)).from_address(self._address)
        weakref.finalize(memory, _libc.munmap, self._address, end + disk).atexit = False
        self.bytes: np.ndarray = np.ctypeslib.as_array(memory)
        if locked:
            lock(self.bytes[:locked])

    def rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the whole arena as rows, `[rows, width]`."""
        size = width * dtype.itemsize
        assert size <= VOID, "a row for nobody must fit"
        whole = torch.from_numpy(self.bytes[: len(self.bytes) // size * size])
        return whole.view(dtype).view(-1, width)

    def take(self, size: int, align: int, *, spill: bool = False) -> tuple[int, torch.Tensor]:
        """Return uninitialised memory, uint8 `[size]`, and where it begins in the arena: at a
        multiple of `align`. It is free again once nothing refers to it or to a view of it, and
        rows that were on their way then have landed.

        `spill`: from the file, whose blocks are reserved first, so that a full disk is an OSError
        here and not a fault at a later access. Raises HostMemoryError.
        """
        while self._returned and self._returned[0][2].done():
            start, stop, _ = self._returned.popleft()
            part = next(part for part in (*self._parts, self._disk) if start < part.stop)
            part.give(start, stop)
            self.used -= 0 if part is self._disk else stop - start
        parts = [self._disk] if spill else self._parts
        found = (part.take(size, align) for part in parts)
        start = next((first for first in found if first is not None), -1)
        if start < 0:
            raise HostMemoryError(f"no room for {size} bytes of captured rows")
        if spill:
            self._reserve(start, size)
        else:
            self.used += size
        lent = self.bytes[start : start + size]  # a new object, which all views refer to
        weakref.finalize(lent, self._release, start, start + size).atexit = False
        return start, torch.from_numpy(lent)

    def _release(self, start: int, stop: int) -> None:
        first, last = -(-max(start, self._keep) // _PAGE) * _PAGE, stop // _PAGE * _PAGE
        if first < last:
            _libc.madvise(self._address + first, last - first, _MADV_REMOVE)
        self._returned.append((start, stop, self.landing))

    def _reserve(self, start: int, size: int) -> None:
        """Have the file's blocks for this range; on an error the range is free again."""
        begin = self._disk.start
        try:
            if self._descriptor < 0:
                assert self._spill_dir is not None, "spilling needs a folder"
                self._spill_dir.mkdir(parents=True, exist_ok=True)
                descriptor, path = tempfile.mkstemp(dir=self._spill_dir)
                os.unlink(path)
                whole = self._disk.stop - begin
                os.ftruncate(descriptor, whole)
                _mapped(
                    self._address + begin,
                    whole,
                    _READ_WRITE,
                    mmap.MAP_SHARED | _MAP_FIXED,
                    descriptor,
                )
                self._descriptor = descriptor
            os.posix_fallocate(self._descriptor, start - begin, size)
        except Exception:
            self._disk.give(start, start + size)
            raise
        self.spilled += size


def _mapped(address: int | None, size: int, access: int, flags: int, descriptor: int) -> int:
    """Map memory; return its address. Raises HostMemoryError."""
    found: int = _libc.mmap(address, size, access, flags, descriptor, 0)
    if found == ctypes.c_void_p(-1).value:
        why = os.strerror(ctypes.get_errno())
        raise HostMemoryError(f"cannot map {size} bytes for captured rows: {why}")
    return found


class Lent(NamedTuple):
    """Memory for the rows of some positions at some ports."""

    row: int  # number of the first row in the bank's rows
    rows: torch.Tensor  # [ports, positions, width]
    mark: int  # place of the first mark in the arena
    marks: np.ndarray  # uint8 [positions], 0; nonzero: recorded


class BankRows:
    """The arena as rows of one bank."""

    def __init__(
        self,
        arena: Arena,
        width: int,
        dtype: torch.dtype,
        spills: Callable[[], bool] = lambda: False,
    ) -> None:
        """`spills()`: whether new memory is to be in a file."""
        self.arena, self.all, self._spills = arena, arena.rows(width, dtype), spills
        self.row_bytes = width * dtype.itemsize

    def take(self, ports: int, positions: int) -> Lent:
        """Return memory. Raises HostMemoryError, and OSError if the disk is full."""
        size = ports * positions * self.row_bytes
        # in whole rows: else each block would leave a gap, and the search for memory looks at all
        whole = size + -(-positions // self.row_bytes) * self.row_bytes
        start, memory = self.arena.take(whole, self.row_bytes, spill=self._spills())
        marks = memory[size : size + positions].numpy()
        marks[:] = 0
        rows = memory[:size].view(self.all.dtype).view(ports, positions, self.all.shape[1])
        return Lent(start // self.row_bytes, rows, start + size, marks)
