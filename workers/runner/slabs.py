"""Where do captured rows lie between the forward pass and the disk, and what happens when there is no room?

Three policies for rows beyond the limit: `block` (steps wait for the writers), `spill` (the rows lie in a file instead of
memory), `drop` (they are not recorded, and the result says so).
"""

import bisect
import os
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import torch

#: How often a step that waits for the writers looks again.
_WAIT_S = 0.005


class SlabPool:
    """Memory for slabs: reused, because touching fresh pages costs more than copying the rows, and bounded.

    Used from one thread; slabs may be dropped in any.
    """

    def __init__(self, limit_bytes: int, policy: str = "block", spill_dir: Path | None = None, *, pinned: bool = False) -> None:
        """`policy`: block | spill | drop; `spill_dir` for `spill`; `pinned`: page-locked, for copies from an accelerator."""
        self._limit, self._policy, self._spill_dir, self._pinned = limit_bytes, policy, spill_dir, pinned
        self._alive = 0
        self._free: list[torch.Tensor] = []  # uint8, smallest first
        self._returned: deque[torch.Tensor] = deque()  # filled from any thread, by garbage collection too: no lock there
        self.spilled = 0  # bytes so far

    def drops(self) -> bool:
        """Is this step not to be recorded for want of room?"""
        self._collect()
        return self._policy == "drop" and self._alive > self._limit

    def new_slab(self, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU slab `[rows, hidden_size]`; its memory is reused once nobody refers to the slab.

        Raises OSError when rows are to be spilled and the disk is full.
        """
        size = rows * hidden_size * dtype.itemsize
        self._collect()
        if self._policy == "spill" and self._alive + size > self._limit:
            return self._spill(size).view(dtype).view(rows, hidden_size)
        memory = self._take(size)
        slab = memory[:size].view(dtype).view(rows, hidden_size)
        weakref.finalize(slab, self._returned.append, memory)
        return slab

    def wait(self, writers_busy: Callable[[], bool]) -> None:
        """With `block`: hold the step while the limit is exceeded and the writers can still free something."""
        self._collect()
        while self._policy == "block" and self._alive > self._limit and writers_busy():
            time.sleep(_WAIT_S)
            self._collect()

    def _take(self, size: int) -> torch.Tensor:
        # Not one much larger than needed: a small request must not hold the memory of a large one.
        place = next((i for i, memory in enumerate(self._free) if size <= len(memory) <= 4 * size), None)
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned) if place is None else self._free.pop(place)
        self._alive += len(memory)
        while self._free and self._alive + sum(map(len, self._free)) > self._limit:
            self._free.pop(0)
        return memory

    def _spill(self, size: int) -> torch.Tensor:
        """A file without a name, mapped. Its blocks are reserved first: a full disk is an error here, not a fault later."""
        assert self._spill_dir is not None
        self._spill_dir.mkdir(parents=True, exist_ok=True)
        handle, path = tempfile.mkstemp(dir=self._spill_dir)
        try:
            os.posix_fallocate(handle, 0, size)
            memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
        finally:
            os.close(handle)
            os.unlink(path)
        self.spilled += size
        return memory

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._alive -= len(memory)
            if self._alive + sum(map(len, self._free)) + len(memory) <= self._limit:
                bisect.insort(self._free, memory, key=len)
