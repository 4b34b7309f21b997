"""Slabs: memory for captured rows between forward pass and disk.

They are reused, because touching fresh pages costs more than copying the rows.
"""

import os
import tempfile
import weakref
from collections import OrderedDict, deque
from pathlib import Path

import torch

from ..base.host_memory import pages
from .pending_rows import LANDED, Landing

#: Slabs smaller than this share a size class: a decode step's few rows. A multiple of the page.
_SMALLEST = 1 << 14
#: Unused memory may be as much as was in use at one time while the last that many slabs were made.
_RECENT = 64
#: A slab gets at most this many times the memory that it needs, where that much lies unused.
_LOOSE = 2


class SlabPool:
    """Used from one thread; slabs may be dropped in any."""

    def __init__(
        self, keep_bytes: int, spill_dir: Path | None = None, *, pinned: bool = False
    ) -> None:
        """`keep_bytes`: unused memory that is kept for later slabs in any case; `pinned`:
        page-locked, for copies from an accelerator.
        """
        self._keep, self._spill_dir, self._pinned = keep_bytes, spill_dir, pinned
        # bytes that slabs in use hold, or copies that have not landed; spilled ones not counted
        self.alive = 0
        self.spilled = 0  # bytes so far
        self._free: OrderedDict[int, list[torch.Tensor]] = (
            OrderedDict()
        )  # size → uint8 memories; least recently used first
        self._free_bytes = 0
        self._recent: deque[int] = deque(
            maxlen=_RECENT
        )  # `alive` as each of the last slabs was made
        # Filled from any thread, by garbage collection too: no lock there.
        self._returned: deque[tuple[torch.Tensor, Landing]] = deque()

    def new_slab(
        self, rows: int, hidden_size: int, dtype: torch.dtype, landing: Landing = LANDED
    ) -> torch.Tensor:
        """An uninitialised CPU slab `[rows, hidden_size]`.

        Its memory is reused once nothing refers to it or to a view of it, and `landing` is done: a
        copy that is on its way would write over the next slab's rows. Raises HostMemoryError.
        """
        size = rows * hidden_size * dtype.itemsize
        self.collect()
        memory = self._take(_size_class(size))
        lent = memory.numpy()[:size]  # its own object, to which the slab and all its views refer
        weakref.finalize(lent, self._returned.append, (memory, landing)).atexit = False
        return torch.from_numpy(lent).view(dtype).view(rows, hidden_size)

    def new_file(self, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """The same in a file without a name, mapped.

        Its blocks are reserved first: a full disk is an error here, not a fault later.

        Raises OSError.
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
        """Reclaim the memory of slabs without references into which nothing is being copied any
        more.
        """
        for _ in range(len(self._returned)):
            memory, landing = self._returned[0]
            done = landing.done()
            self._returned.popleft()
            if not done:
                self._returned.append((memory, landing))
                continue
            self.alive -= len(memory)
            self._free.setdefault(len(memory), []).append(memory)
            self._free.move_to_end(len(memory))
            self._free_bytes += len(memory)
        # Steps of about the same size follow one another: what one has touched, a later one need
        # not touch first.
        while self._free_bytes > max(self._keep, max(self._recent, default=0) - self.alive):
            self._pop(next(iter(self._free)))

    def _take(self, size: int) -> torch.Tensor:
        fitting = [item for item in self._free if size <= item <= _LOOSE * size]
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
    """At least `size`, and less than an eighth more, so that slabs of similar sizes share
    memories.
    """
    step = max(_SMALLEST, 1 << max(0, (size - 1).bit_length() - 4))
    return -(-size // step) * step
