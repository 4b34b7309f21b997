"""Arena: a rank's memory for captured rows, from the forward that records them until they are
written.

It is one range of addresses, so that all rows of a bank are one tensor: the forward, or an
accelerator's copy stream, writes each row to the place where it stays. Its first part is
page-locked for an accelerator, the second is memory, and the third is a file without a name, for
rows that are spilled. Pages take memory when they are first written to.
"""

import itertools
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from ....schemas.base.dtypes import DTYPES
from ....schemas.base.machine import host_bytes
from ..base.host_memory import lock
from ..base.landings import LANDED, Landing, LateLanding
from ..base.ranges import FreeRanges
from ..base.shared_memory import LARGEST_ROW, PAGE, VOID, HostMemoryError, SharedMemory
from ..files.recorded import BlockPlace, RowBlock
from .idle_pages import REST_S, IdlePages

#: Addresses for spilled rows; the disk may have less room.
SPILLED = 1 << 40
_MADV_DONTFORK = 10


class Arena:
    """The arena of one rank. Memory is taken and returns in any thread."""

    def __init__(
        self,
        keep: int,
        spill_dir: Path | None = None,
        *,
        locked: int = 0,
        room: int = 0,
        rest_s: float = REST_S,
    ) -> None:
        """`keep`: bytes whose pages are kept when nothing is in them; others are given back after
        `rest_s` seconds. `locked`: bytes of the page-locked part. `room`: bytes of memory at most;
        0: those of the machine or container.

        Raises HostMemoryError.
        """
        room = room or host_bytes()
        locked = -(-max(locked, VOID) // PAGE) * PAGE if locked else 0
        disk = SPILLED if spill_dir is not None else 0
        self._spill_dir = spill_dir
        self._lock = threading.Lock()
        end = -(-(max(locked, VOID) + room) // PAGE) * PAGE
        self.locked = locked
        self._parts = [FreeRanges(VOID, max(locked, VOID)), FreeRanges(max(locked, VOID), end)]
        self._disk = FreeRanges(end, end + disk)
        self.spilled = 0  # bytes spilled so far
        self.used = 0  # bytes of memory in use
        self.landing = LANDED  # of all rows so far
        self.landings = itertools.count(1)  # numbers of landings, over all banks
        self.late: list[LateLanding] = []  # landings that the host has to finish
        # Filled from any thread, also by garbage collection, so no lock may be taken there.
        self._returned: deque[tuple[int, int, Landing]] = deque()
        self.size = end + disk
        self.end = end
        self.memory = SharedMemory(self.size)
        self.bytes = self.memory.bytes
        #: Of the file that is the memory, `[0, end)`, and once rows are spilled of theirs, which is
        #: the rest.
        self.descriptors = [os.memfd_create("midstream-rows")]
        os.ftruncate(self.descriptors[0], end)
        self.memory.map(0, end, self.descriptors[0])
        weakref.finalize(self, _close, self.descriptors).atexit = False
        # a child's copies of views would give this process's pages back
        self.memory.advise(0, end, _MADV_DONTFORK)
        if locked:
            lock(self.bytes[:locked])
        self._idle = IdlePages(self.memory, max(keep, locked), end, rest_s)
        self._idle_disk = IdlePages(self.memory, end, self.size, rest_s)
        for pages in (self._idle, self._idle_disk):
            weakref.finalize(self, pages.close).atexit = False

    def rows(self, width: int, dtype: torch.dtype) -> torch.Tensor:
        """Return the whole arena as rows, `[rows, width]`."""
        size = width * dtype.itemsize
        assert size <= LARGEST_ROW, "a row for nobody must fit"
        whole = torch.from_numpy(self.bytes[: len(self.bytes) // size * size])
        return whole.view(dtype).view(-1, width)

    def take(self, size: int, align: int, *, spill: bool = False) -> tuple[int, np.ndarray]:
        """Return uninitialised memory, uint8 `[size]`, and where it begins in the arena: at a
        multiple of `align`. It is free again once nothing refers to it or to a view of it, and
        rows that were on their way then have landed.

        `spill`: from the file, whose blocks are reserved first, so that a full disk is an OSError
        here and not a fault at a later access. Raises HostMemoryError.
        """
        with self._lock:
            start = self._free(size, align, [self._disk] if spill else self._parts)
            if start is None:
                raise HostMemoryError(f"no room for {size} bytes of captured rows")
            if spill:
                self._reserve(start, size)
                self._idle_disk.enter(start, start + size)
            else:
                self._idle.enter(start, start + size)
                self.used += size
        lent = self.memory.lease(start, size)
        weakref.finalize(lent, self._release, start, start + size).atexit = False
        return start, lent

    def _free(self, size: int, align: int, parts: Sequence[FreeRanges]) -> int | None:
        while self._returned and self._returned[0][2].done():
            start, stop, _ = self._returned.popleft()
            part = next(part for part in (*self._parts, self._disk) if start < part.stop)
            part.give(start, stop)
            self.used -= 0 if part is self._disk else stop - start
        found = (part.take(size, align) for part in parts)
        return next((first for first in found if first is not None), None)

    def _release(self, start: int, stop: int) -> None:
        (self._idle if start < self.end else self._idle_disk).leave(start, stop)
        # Not before rows on their way have landed: a late copy would overwrite another request's.
        self._returned.append((start, stop, self.landing))

    def _reserve(self, start: int, size: int) -> None:
        """Have the file's blocks for this range; on an error the range is free again."""
        begin = self._disk.start
        try:
            if not self.descriptors[1:]:
                assert self._spill_dir is not None, "spilling needs a folder"
                self._spill_dir.mkdir(parents=True, exist_ok=True)
                descriptor, path = tempfile.mkstemp(dir=self._spill_dir)
                os.unlink(path)
                try:
                    os.ftruncate(descriptor, self._disk.stop - begin)
                    self.memory.map(begin, self._disk.stop, descriptor)
                except Exception:
                    os.close(descriptor)
                    raise
                self.descriptors.append(descriptor)
            os.posix_fallocate(self.descriptors[1], start - begin, size)
        except Exception:
            self._disk.give(start, start + size)
            raise
        self.spilled += size


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


class RecordedBlock(RowBlock):
    """A block into which the forward records rows, and whose memory is its own."""

    def __init__(
        self, memory: "BankRows", ports: bytes, positions: Sequence[int], span: range
    ) -> None:
        """`ports`: as in `BlockPlace`; `positions`: the captured ones in `span`, ascending. Raises
        what `Arena.take` raises.
        """
        self.span = span
        self.all = memory.all
        self.kept = False  # rows of it are kept for other requests, so that none may change
        count = len(positions)
        size = len(ports) // np.dtype(np.int64).itemsize * count * memory.row_bytes
        # in whole rows: else each block would leave a gap that no other one fills
        whole = size + -(-count // memory.row_bytes) * memory.row_bytes
        start, self._lent = memory.take(whole)
        self._lent[size:] = 0
        dense = isinstance(positions, range) and positions.step == 1
        super().__init__(
            memory.arena.bytes,
            BlockPlace(
                start=start,
                mark=start + size,
                ports=ports,
                width=memory.all.shape[1],
                dtype=memory.dtype,
                first=positions[0] if count else 0,
                count=count,
                positions=[] if dense else list(positions),
            ),
        )
        #: The number of the first row in the bank's rows.
        self.row = start // memory.row_bytes


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
        self.arena = arena
        self.all = arena.rows(width, dtype)
        self._spills = spills
        self.dtype = str(dtype).removeprefix("torch.")
        self.row_bytes = width * DTYPES[self.dtype].bytes

    def take(self, size: int) -> tuple[int, np.ndarray]:
        """Take memory of `size` bytes for rows, see `Arena.take`."""
        return self.arena.take(size, self.row_bytes, spill=self._spills())
