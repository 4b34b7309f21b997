"""Captured rows in a slab, of a step or of a piece: extents of them, and their bytes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from .finite_check import all_finite
from .pending_rows import Landing


class Spaced(NamedTuple):
    """Numbers of rows in a slab: `length` consecutive ones of each port, ports `apart`."""

    first: int
    apart: int
    ports: int
    length: int


def spaced(numbers: np.ndarray) -> np.ndarray | Spaced:
    """Return numbers `[ports, rows]` of rows as `Spaced` if they are, as those of most captures."""
    (ports, count), first = numbers.shape, int(numbers[0, 0])
    apart = int(numbers[1, 0]) - first if ports > 1 else 1
    places = np.arange(ports)[:, None] * apart + np.arange(first, first + count)
    return Spaced(first, apart, ports, count) if np.array_equal(numbers, places) else numbers


def rows_of(slab: torch.Tensor, numbers: "np.ndarray | Spaced", steps: int = 1) -> torch.Tensor:
    """Return the rows of these numbers `[ports, rows]` in a slab, as `[ports, rows, hidden_size]`:
    a view if they are equally spaced. Of more steps, which share the slab equally, as `[ports,
    rows, steps, hidden_size]`.
    """
    of_step, width = len(slab) // steps, slab.shape[1]
    if not isinstance(numbers, Spaced):
        if steps == 1:
            return slab[torch.from_numpy(numbers)]
        return slab[torch.from_numpy(numbers[:, :, None] + np.arange(steps) * of_step)]
    shape, strides = [numbers.ports, numbers.length], [numbers.apart * width, width]
    if steps > 1:
        shape, strides = [*shape, steps], [*strides, of_step * width]
    first = slab.storage_offset() + numbers.first * width
    return slab.as_strided([*shape, width], [*strides, 1], first)


@dataclass(slots=True, eq=False)
class StepRows:
    """Captured rows of one forward pass, or of a piece.

    Rows of `port` begin at `base[port]`; ports of one pattern hold the same tokens.
    """

    slab: torch.Tensor  # [rows, hidden_size], CPU
    base: np.ndarray  # int64 [ports]
    pattern: np.ndarray  # int64 [ports]
    landing: Landing  # of the rows in the slab, which an accelerator may still be copying
    #: dtype → which rows of the slab are not finite in that dtype, bool `[rows]`; None: all are
    #: finite. Filled when a writer first needs an entry.
    checked: dict[torch.dtype, np.ndarray | None] = field(default_factory=dict)
    _view: memoryview | None = None

    @property
    def view(self) -> memoryview:
        """Return the bytes of the slab, read-only."""
        if self._view is None:
            self._view = bytes_of(self.slab, self.slab.dtype)
        return self._view

    def rows(self, numbers: "np.ndarray | Spaced") -> torch.Tensor:
        """Return the landed rows of these numbers: see `rows_of`."""
        return rows_of(self.slab, numbers)

    def unsound(self, dtype: torch.dtype) -> np.ndarray | None:
        """Return which rows of the slab are not finite when stored as `dtype`; None if all are
        finite. The rows must have landed.
        """
        if dtype not in self.checked:
            rows = self.slab.to(dtype)
            self.checked[dtype] = (
                None if all_finite(rows) else ~torch.isfinite(rows).all(dim=1).numpy()
            )
        return self.checked[dtype]


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` contiguous positions from `first_position`, whose rows are in `step`, from slot
    `slots[pattern]` of each port on.
    """

    step: StepRows
    slots: np.ndarray  # int64 [patterns]
    first_position: int
    count: int

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.count)

    def first_rows(self, ports: np.ndarray) -> np.ndarray:
        """Return the slab row of the first position, for each port."""
        rows: np.ndarray = self.step.base[ports] + self.slots[self.step.pattern[ports]]
        return rows

    def rows(self, ports: np.ndarray) -> torch.Tensor:
        """Return the landed rows, `[ports, positions, hidden_size]`; see `StepRows.rows`."""
        return self.step.rows(spaced(self.first_rows(ports)[:, None] + np.arange(self.count)))

    def among(self, positions: Sequence[int]) -> "list[Extent]":
        """Return the parts at `positions`, which are ascending and in this extent."""
        runs = contiguous(np.array(positions)) if len(positions) else []
        return [self.cut(positions[at], positions[at] + count) for at, count in runs]

    def cut(self, start: int, stop: int) -> "Extent":
        """Return the part at positions `[start, stop)`."""
        return Extent(self.step, self.slots + (start - self.first_position), start, stop - start)


def bytes_of(
    rows: torch.Tensor, dtype: torch.dtype, chosen: Sequence[slice] = (slice(None),)
) -> memoryview:
    """Return the bytes of rows as they are stored: in `dtype`, with the `chosen` columns."""
    if list(chosen) != [slice(None)]:
        rows = torch.cat([rows[:, columns] for columns in chosen], dim=1) if chosen else rows[:, :0]
    view = rows.contiguous().to(dtype).view(torch.uint8)  # numpy does not have every dtype
    return memoryview(view.numpy()).cast("B").toreadonly()  # later requests may use the rows too


def contiguous(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (first index, length) of each run of consecutive values."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return [(a, b - a) for a, b in itertools.pairwise([0, *breaks.tolist(), len(values)])]


def as_array(positions: Sequence[int]) -> np.ndarray:
    """Return positions as int64."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step)
    return np.array(positions, dtype=np.int64)
