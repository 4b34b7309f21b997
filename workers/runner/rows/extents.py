"""Captured rows in memory: blocks of a recording's positions, extents of them, and their bytes."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .arena import BankRows
from .finite_check import all_finite
from .landings import LANDED, Landing


class Block:
    """The place of a recording's rows at its captured positions in a range."""

    def __init__(
        self, memory: BankRows, ports: np.ndarray, positions: Sequence[int], span: range
    ) -> None:
        """`ports`: int64, ascending; `positions`: the captured ones in `span`, ascending. Raises
        what `BankRows.take` raises.
        """
        self.lent, self.ports, self.span = memory.take(len(ports), len(positions)), ports, span
        self.all, self.rows = memory.all, self.lent.rows  # [ports, positions, width]
        self.num_positions, self.nbytes = len(positions), int(self.rows.nbytes)
        self.kept = False  # rows of it are kept for other requests, so that none may change
        self._positions = as_array(positions)
        self._dense = isinstance(positions, range) and positions.step == 1
        self._first = positions[0] if len(positions) else 0
        # (dtype, first slot, count) → which rows are not finite in that dtype; None: all are finite
        self._checked: dict[tuple[torch.dtype, int, int], np.ndarray | None] = {}

    @property
    def num_held(self) -> int:
        """Return the number of positions with rows."""
        return int(np.count_nonzero(self.lent.marks))

    def slot(self, position: int) -> int:
        """Return the place of a captured position among those of the block."""
        if self._dense:
            return position - self._first
        return int(np.searchsorted(self._positions, position))

    def runs(self, start: int, stop: int, landing: Landing = LANDED) -> "list[Extent]":
        """Return the recorded rows of positions in `[start, stop)`, by position."""
        first, last = np.searchsorted(self._positions, (start, stop))
        slots = first + np.flatnonzero(self.lent.marks[first:last])
        if not len(slots):
            return []
        # places of a block follow one another where its positions do
        return [
            Extent(self, int(slots[at]), int(self._positions[slots[at]]), count, landing)
            for at, count in contiguous(self._positions[slots])
        ]

    def unsound(self, dtype: torch.dtype, at: int, count: int) -> np.ndarray | None:
        """Return which rows of these slots are not finite when stored as `dtype`, bool `[ports,
        count]`; None if all are finite. The rows must have landed, and not change any more.
        """
        key = dtype, at, count
        if key not in self._checked:
            rows = self.rows[:, at : at + count].to(dtype)
            self._checked[key] = (
                None if all_finite(rows) else ~torch.isfinite(rows).all(dim=2).numpy()
            )
        return self._checked[key]


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` contiguous positions from `first_position`, whose rows are in `block` from slot `at`
    on.
    """

    block: Block
    at: int
    first_position: int
    count: int
    landing: Landing = LANDED

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.count)

    @property
    def nbytes(self) -> int:
        rows = self.block.rows
        return int(rows.shape[0] * self.count * rows.shape[2] * rows.itemsize)

    def rows(self, ports: np.ndarray) -> torch.Tensor:
        """Return the landed rows at these ports, `[ports, positions, hidden_size]`."""
        rows = self.block.rows[:, self.at : self.at + self.count]
        if ports is self.block.ports:
            return rows
        return rows[torch.from_numpy(np.searchsorted(self.block.ports, ports))]

    def unsound(self, dtype: torch.dtype) -> np.ndarray | None:
        """Return `Block.unsound` of these rows."""
        return self.block.unsound(dtype, self.at, self.count)

    def among(self, positions: Sequence[int]) -> "list[Extent]":
        """Return the parts at `positions`, which are ascending and in this extent."""
        runs = contiguous(np.array(positions)) if len(positions) else []
        return [self.cut(positions[at], positions[at] + count) for at, count in runs]

    def cut(self, start: int, stop: int) -> "Extent":
        """Return the part at positions `[start, stop)`."""
        return Extent(
            self.block, self.at + start - self.first_position, start, stop - start, self.landing
        )


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
