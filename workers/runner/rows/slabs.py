"""Slabs: memory for captured rows between forward pass and disk.

They are reused, because touching fresh pages costs more than copying the rows.
"""

import os
import sys
import tempfile
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path

import torch

from ..base.host_memory import pages
from .pending_rows import LANDED, Landing

#: Bytes of the smallest size class, for a decode step's few rows. A multiple of the page size.
_SMALLEST = 1 << 14
#: Slabs whose peak of memory in use bounds the memory that is kept: the last this many.
_RECENT = 64
#: A slab takes unused memory of at most this many times the size that it needs, if the memory is
#: not page-locked.
_LOOSE = 2
#: Bytes of the smallest memory of a first set; smaller slabs take one of these.
_RESERVED = 4 << 20


class SlabPool:
    """Slabs of one rank. Used from one thread; slabs may be dropped in any thread."""

    def __init__(
        self,
        keep_bytes: int,
        spill_dir: Path | None = None,
        *,
        pinned: bool = False,
        aside: Callable[[Callable[[], None]], object] = lambda action: action(),
    ) -> None:
        """`keep_bytes`: unused memory that is always kept for later slabs; `pinned`: use
        page-locked memory, for copies from an accelerator. `aside(action)`: runs it in a helper, as
        giving memory back takes longer than a step.
        """
        self._aside = aside
        self.keep_bytes, self._spill_dir, self._pinned = keep_bytes, spill_dir, pinned
        # bytes of slabs that are in use or still being copied to, without spilled ones
        self.alive = 0
        self.spilled = 0  # bytes spilled so far
        # size → uint8 memories; least recently used first
        self._free: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._free_bytes = 0
        self._recent: deque[int] = deque(maxlen=_RECENT)  # `alive` when each recent slab was made
        self._reserved: deque[torch.Tensor] = deque()  # filled from any thread
        # Filled from any thread, also by garbage collection, so no lock may be taken there.
        self._returned: deque[tuple[torch.Tensor, Landing]] = deque()

    def reserve(self, largest: int) -> None:
        """Make all memories that the pool keeps: of `largest` bytes, a half of it, a quarter and so
        on, then more of `largest`.

        In any thread: locking pages takes longer than a step. Raises HostMemoryError.
        """
        size = largest = min(largest, self.keep_bytes // 2)
        room = self.keep_bytes
        while (size := max(size, _RESERVED)) <= room:
            self._reserved.append(pages(_size_class(size), locked=self._pinned))
            room -= size
            size = size // 2 if size > _RESERVED else largest

    def new_slab(
        self, rows: int, hidden_size: int, dtype: torch.dtype, landing: Landing = LANDED
    ) -> torch.Tensor:
        """Return an uninitialised CPU slab `[rows, hidden_size]`.

        Its memory is reused once nothing refers to it or to a view of it, and `landing` is done: a
        copy in progress would overwrite the next slab's rows. Raises HostMemoryError.
        """
        size = rows * hidden_size * dtype.itemsize
        self.collect()
        memory = self._take(_size_class(size))
        lent = memory.numpy()[:size]  # a new object, which the slab and all its views refer to
        weakref.finalize(lent, self._returned.append, (memory, landing)).atexit = False
        return torch.from_numpy(lent).view(dtype).view(rows, hidden_size)

    def new_file(self, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a slab in an unlinked file that is mapped into memory.

        The file's blocks are reserved first, so that a full disk is an OSError here and not a fault
        at a later access.
        """
        size = rows * hidden_size * dtype.itemsize
        assert self._spill_dir is not None, "spilling needs a folder"
        self._spill_dir.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=self._spill_dir)
        try:
            os.posix_fallocate(handle, 0, size)
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(path)
        self.spilled += size
        return memory.view(dtype).view(rows, hidden_size)

    def collect(self) -> None:
        """Reclaim the memory of slabs that have no references and are no longer copied to."""
        while self._reserved:
            self._give(self._reserved.popleft())
        for _ in range(len(self._returned)):
            memory, landing = self._returned[0]
            done = landing.done()
            self._returned.popleft()
            if not done:
                self._returned.append((memory, landing))
                continue
            self.alive -= len(memory)
            self._give(memory)
        # Successive steps need slabs of about the same size, and reuse pages already touched.
        surplus: list[torch.Tensor] = []
        while self._free_bytes > max(self.keep_bytes, max(self._recent, default=0) - self.alive):
            surplus.append(self._pop(next(iter(self._free))))
        if surplus:
            self._aside(surplus.clear)

    def _give(self, memory: torch.Tensor) -> None:
        self._free.setdefault(len(memory), []).append(memory)
        self._free.move_to_end(len(memory))
        self._free_bytes += len(memory)

    def _take(self, size: int) -> torch.Tensor:
        # locking fresh pages would hold up the step
        most = sys.maxsize if self._pinned else _LOOSE * size
        fitting = [item for item in self._free if size <= item <= most]
        memory = self._pop(min(fitting)) if fitting else pages(size, locked=self._pinned)
        self.alive += len(memory)
        self._recent.append(self.alive)
        return memory

    def _pop(self, size: int) -> torch.Tensor:
        memories = self._free[size]
        memory = memories.pop()
        if not memories:
            del self._free[size]
        self._free_bytes -= size
        return memory


def _size_class(size: int) -> int:
    """Round `size` up, by less than an eighth of it, so that slabs of similar sizes share
    memories.
    """
    step = max(_SMALLEST, 1 << max(0, (size - 1).bit_length() - 4))
    return -(-size // step) * step
