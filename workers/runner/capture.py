"""Which rows did a request have recorded, and where do they lie until they are written?

A step's captured rows are kept as one slab `[layers, rows, hidden]`; a request remembers the runs of rows that are
its own and joins them when it ends. A position recorded twice (after a preemption, or where a draft token was
rejected) is written once, as it was computed last: that is the row whose keys and values the later tokens saw.
"""

import bisect
import time
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from ...schemas.specs import StoredCapture

#: How often a step that waits for the writers looks again.
_WAIT_S = 0.005

_NUMPY_VIEW = {torch.bfloat16: torch.uint16}  # numpy has no bfloat16: same bits, other name


@dataclass(frozen=True, slots=True)
class Run:
    """Rows `first_row …` of a slab are positions `first_position …` (`count` of them, contiguous in both)."""

    slab: torch.Tensor  # [layers of the step, rows, hidden_size], CPU
    layer_index: dict[int, int]  # absolute layer → index in the slab
    first_row: int
    first_position: int
    count: int


@dataclass
class Recording:
    """One request's captured rows on this rank."""

    spec: StoredCapture
    layers: list[int]  # of the spec, those that this rank holds
    runs: list[Run] = field(default_factory=list)

    def finish(self, before: int) -> tuple[list[int], dict[int, list[memoryview]]]:
        """Recorded positions below `before`, ascending and each once, and each layer's rows in that order.

        The rows come as buffers over the slabs, nothing is copied: keep this recording alive while they are used.
        """
        owners: dict[int, Run] = {}
        for run in self.runs:
            for position in range(run.first_position, min(run.first_position + run.count, before)):
                owners[position] = run
        positions = sorted(owners)
        stretches: list[tuple[Run, int, int]] = []  # (run, first row, rows)
        for position in positions:
            run = owners[position]
            row = run.first_row + position - run.first_position
            if stretches and stretches[-1][0] is run and stretches[-1][1] + stretches[-1][2] == row:
                stretches[-1] = (run, stretches[-1][1], stretches[-1][2] + 1)
            else:
                stretches.append((run, row, 1))
        rows = {
            layer: [_bytes(run.slab[run.layer_index[layer], first : first + count]) for run, first, count in stretches]
            for layer in self.layers
        }
        return positions, rows


def _bytes(rows: torch.Tensor) -> memoryview:
    view = rows.view(_NUMPY_VIEW[rows.dtype]) if rows.dtype in _NUMPY_VIEW else rows
    return memoryview(view.numpy()).cast("B")


class SlabPool:
    """Memory for slabs: reused, because touching fresh pages costs more than copying the rows, and bounded.

    Beyond `limit_bytes` engine steps wait for the writers. Used from one thread; slabs may be dropped in any.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._alive = 0
        self._free: list[torch.Tensor] = []  # uint8, smallest first
        self._returned: deque[torch.Tensor] = deque()  # filled from any thread, by garbage collection too: no lock there

    def new_slab(self, layers: int, rows: int, hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised CPU slab `[layers, rows, hidden_size]`; its memory is reused once nobody refers to the slab."""
        size = layers * rows * hidden_size * dtype.itemsize
        memory = self._take(size)
        slab = memory[:size].view(dtype).view(layers, rows, hidden_size)
        weakref.finalize(slab, self._returned.append, memory)
        return slab

    def _take(self, size: int) -> torch.Tensor:
        self._collect()
        # Not one much larger than needed: a small request must not hold the memory of a large one.
        place = next((i for i, memory in enumerate(self._free) if size <= len(memory) <= 4 * size), None)
        memory = torch.empty(size, dtype=torch.uint8) if place is None else self._free.pop(place)
        self._alive += len(memory)
        while self._free and self._alive + sum(map(len, self._free)) > self._limit:
            self._free.pop(0)
        return memory

    def _collect(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._alive -= len(memory)
            if self._alive + sum(map(len, self._free)) + len(memory) <= self._limit:
                bisect.insort(self._free, memory, key=len)

    def wait(self, writers_busy: Callable[[], bool]) -> None:
        """Block while the limit is exceeded and the writers can still free something."""
        self._collect()
        while self._alive > self._limit and writers_busy():
            time.sleep(_WAIT_S)
            self._collect()
