"""Slabs: memory for captured rows between forward pass and disk. They are reused, because touching fresh
pages costs more than copying the rows.
"""

import os
import tempfile
import weakref
from collections import deque
from pathlib import Path

import torch

#: Slabs smaller than this share a size class: a decode step's few rows.
_SMALLEST = 1 << 14


class SlabPool:
    """Used from one thread; slabs may be dropped in any."""

    def __init__(self, keep_bytes: int, spill_dir: Path | None = None, *, pinned: bool = False) -> None:
        """`keep_bytes`: unused memory kept for later slabs; `pinned`: page-locked, for copies from an accelerator."""
        self._keep, self._spill_dir, self._pinned = keep_bytes, spill_dir, pinned
        self.alive = 0  # bytes that slabs in use hold, spilled ones not counted
        self.spilled = 0  # bytes so far
        self._free: dict[int, list[torch.Tensor]] = {}  # size → uint8 memories
        self._free_bytes = 0
        self._returned: deque[torch.Tensor] = deque()  # filled from any thread, by garbage collection too: no lock there

    def new_slab(self, rows: int, hidden_size: int, dtype: torch.dtype, *, spill: bool = False) -> torch.Tensor:
        """An uninitialised CPU slab `[rows, hidden_size]`; its memory is reused once there is no reference to the slab.

        `spill`: in a file instead of memory. Raises OSError if the disk is full.
        """
        size = rows * hidden_size * dtype.itemsize
        self.collect()
        if spill:
            return self._spill(size).view(dtype).view(rows, hidden_size)
        memory = self._take(max(_SMALLEST, 1 << (size - 1).bit_length()))  # pages that are never touched cost nothing
        slab = memory[:size].view(dtype).view(rows, hidden_size)
        weakref.finalize(slab, self._returned.append, memory)
        return slab

    def collect(self) -> None:
        """Reclaim the memory of slabs without references."""
        while self._returned:
            memory = self._returned.popleft()
            self.alive -= len(memory)
            if self._free_bytes + len(memory) <= self._keep:
                self._free.setdefault(len(memory), []).append(memory)
                self._free_bytes += len(memory)

    def _take(self, size: int) -> torch.Tensor:
        self.alive += size
        free = self._free.get(size)
        if free:
            self._free_bytes -= size
            return free.pop()
        return torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)

    def _spill(self, size: int) -> torch.Tensor:
        """A file without a name, mapped. Its blocks are reserved first: a full disk is an error here, not a fault later."""
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
        return memory
