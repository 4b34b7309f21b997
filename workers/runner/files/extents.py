"""Captured rows in shared memory: blocks of a recording's positions, extents of them, and their
bytes.

The forward of a rank fills a block; a writer reads it where it is, in whichever process it runs.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ....schemas.base.dtypes import DTYPES, narrowed, widened
from ....schemas.base.records import Wire
from ..base.landings import LANDED, Landing


class BlockPlace(Wire):
    """Where the rows of a block are."""

    start: int  # of the rows in the memory, in bytes
    mark: int  # of the marks
    ports: bytes  # int64, ascending
    width: int  # elements of a row
    dtype: str  # of the rows
    first: int  # position
    count: int
    positions: list[int] = []  # empty: `count` from `first` on, one after another


class RowBlock:
    """A recording's rows at its captured positions in a range."""

    def __init__(self, memory: np.ndarray, place: BlockPlace) -> None:
        """`memory`: uint8, the shared memory. It must not be used otherwise while rows are used."""
        facts, self.place, self.dtype = DTYPES[place.dtype], place, place.dtype
        self.ports = np.frombuffer(place.ports, dtype=np.int64)
        shape = len(self.ports), place.count, place.width
        self.nbytes = shape[0] * shape[1] * shape[2] * facts.bytes
        #: As numpy has them, see `DTypeFacts.raw`: `[ports, positions, width]`.
        rows = memory[place.start : place.start + self.nbytes]
        self.rows = rows.view(facts.raw).reshape(shape)
        self._marks = memory[place.mark : place.mark + place.count]
        # (dtype, first slot, count) → which rows are not finite in that dtype; None: all are finite
        self._checked: dict[tuple[str, int, int], np.ndarray | None] = {}

    @cached_property
    def _positions(self) -> np.ndarray:
        first = self.place.first
        return as_array(self.place.positions or range(first, first + self.place.count))

    def slot(self, position: int) -> int:
        """Return the place of a captured position among those of the block."""
        if not self.place.positions:
            return position - self.place.first
        return int(np.searchsorted(self._positions, position))

    def runs(self, start: int, stop: int, landing: Landing = LANDED) -> "list[Extent]":
        """Return the recorded rows of positions in `[start, stop)`, by position."""
        first, last = np.searchsorted(self._positions, (start, stop))
        slots = first + np.flatnonzero(self._marks[first:last])
        if not len(slots):
            return []
        # places of a block follow one another where its positions do
        return [
            Extent(self, int(slots[at]), int(self._positions[slots[at]]), count, landing)
            for at, count in contiguous(self._positions[slots])
        ]

    def unsound(self, dtype: str, at: int, count: int) -> np.ndarray | None:
        """Return which rows of these slots are not finite when stored as `dtype`, bool `[ports,
        count]`; None if all are finite. The rows must have landed, and not change any more.
        """
        key = dtype, at, count
        if key not in self._checked:
            rows = converted(self.rows[:, at : at + count], self.dtype, dtype)
            self._checked[key] = (
                None if _all_finite(rows, dtype) else ~np.isfinite(widened(rows, dtype)).all(axis=2)
            )
        return self._checked[key]


@dataclass(frozen=True, slots=True)
class Extent:
    """`count` contiguous positions from `first_position`, whose rows are in `block` from slot `at`
    on.
    """

    block: RowBlock
    at: int
    first_position: int
    count: int
    landing: Landing = LANDED

    @property
    def positions(self) -> range:
        return range(self.first_position, self.first_position + self.count)

    @property
    def nbytes(self) -> int:
        return self.block.nbytes // self.block.place.count * self.count

    def rows(self, port: int) -> np.ndarray:
        """Return the landed rows at the port of this number in the block, `[positions, width]`."""
        found: np.ndarray = self.block.rows[port, self.at : self.at + self.count]
        return found

    def unsound(self, dtype: str) -> np.ndarray | None:
        """Return `RowBlock.unsound` of these rows."""
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


#: A block, and the positions `[first, stop)` of its recorded rows that are meant.
ExtentPlace = tuple[BlockPlace, int, int]


def places_of(extents: Iterable[Extent]) -> list[ExtentPlace]:
    return [(each.block.place, each.positions.start, each.positions.stop) for each in extents]


def extents_at(places: Iterable[ExtentPlace], memory: np.ndarray) -> list[Extent]:
    return [
        run for place, first, stop in places for run in RowBlock(memory, place).runs(first, stop)
    ]


def bytes_of(
    rows: np.ndarray, dtype: str, stored_as: str, chosen: Sequence[slice] = (slice(None),)
) -> memoryview:
    """Return the bytes of rows of `dtype` as they are stored: in another one, with the `chosen`
    columns.
    """
    if list(chosen) != [slice(None)]:
        rows = np.concatenate([rows[:, :0], *(rows[:, columns] for columns in chosen)], axis=1)
    stored = np.ascontiguousarray(converted(rows, dtype, stored_as))
    return stored.view(np.uint8).reshape(-1).data.toreadonly()  # later requests may use it


def converted(rows: np.ndarray, dtype: str, to: str) -> np.ndarray:
    """Return rows in another dtype, as numpy has them (`DTypeFacts.raw`)."""
    if dtype == to:
        return rows
    with np.errstate(over="ignore"):  # a value beyond the dtype's largest is infinite in it
        return narrowed(widened(rows, dtype).astype(np.float32, copy=False), to)


def _all_finite(rows: np.ndarray, dtype: str) -> bool:
    """Return whether rows are finite, in passes that copy nothing. Of 16 bits those of a value that
    is not finite are the largest that there are, with either sign.
    """
    if not rows.size:
        return True
    if dtype == "float32":
        return bool(np.isfinite(rows.max()) and np.isfinite(rows.min()))
    infinite = 0x7F80 if dtype == "bfloat16" else 0x7C00
    bits = rows.view(np.uint16)
    return bool(bits.max() < 0x8000 + infinite and bits.view(np.int16).max() < infinite)


def contiguous(values: np.ndarray) -> list[tuple[int, int]]:
    """Return (first index, length) of each run of consecutive values."""
    breaks = np.flatnonzero(np.diff(values) != 1) + 1
    return [(a, b - a) for a, b in itertools.pairwise([0, *breaks.tolist(), len(values)])]


def as_array(positions: Sequence[int]) -> np.ndarray:
    """Return positions as int64."""
    if isinstance(positions, range):
        return np.arange(positions.start, positions.stop, positions.step)
    return np.array(positions, dtype=np.int64)
