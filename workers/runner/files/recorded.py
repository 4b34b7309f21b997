"""Captured rows in shared memory: blocks of a recording, extents of its rows, their bytes, and
which rows count once the capture has ended.

The forward of a rank fills a block; a writer reads it where it is, in whichever process it runs.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ....schemas.base.dtypes import DTYPES, narrowed, widened
from ....schemas.base.records import Wire, by_key
from ....schemas.requests.specs import RankSpec, StoredCapture
from ..base.landings import LANDED, Landing
from .finished_rows import BankColumns, FinishedCapture, Origin

#: (hook, layer, port), in the order of the capture.
RecordedPort = tuple[str, int, int]


class BlockPlace(Wire):
    """Says where the rows of a block are."""

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
        facts = DTYPES[place.dtype]
        self.place = place
        self.dtype = place.dtype
        self.ports = np.frombuffer(place.ports, dtype=np.int64)
        shape = len(self.ports), place.count, place.width
        self.nbytes = shape[0] * shape[1] * shape[2] * facts.bytes
        #: As numpy has them, see `DTypeFacts.raw`: `[ports, positions, width]`.
        self.rows = memory[place.start : place.start + self.nbytes].view(facts.raw).reshape(shape)
        self._marks = memory[place.mark : place.mark + place.count]

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
        return self.block.rows[port, self.at : self.at + self.count]

    def unsound(self, dtype: str) -> np.ndarray | None:
        """Return which rows are not finite when stored as `dtype`, bool `[ports, count]`; None if
        all are finite. The rows must have landed, and not change any more.
        """
        rows = self.block.rows[:, self.at : self.at + self.count]
        rows = converted(rows, self.block.dtype, dtype)
        if _all_finite(rows, dtype):
            return None
        bad: np.ndarray = ~np.isfinite(widened(rows, dtype)).all(axis=2)
        return bad

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


class CaptureShape(Wire):
    """Says what a rank records of a capture."""

    number: int  # of the capture in the request
    ports: list[RecordedPort]  # at least one
    width: int  # elements of a row
    dtype: str  # of the rows
    columns: BankColumns | None = None  # of the rows; None: those of the residual bank

    def stored_as(self, capture: StoredCapture) -> str:
        """Return the dtype of the stored rows."""
        return self.dtype if capture.dtype == "model" else capture.dtype

    def chosen(self, capture: StoredCapture) -> list[slice]:
        """Return the columns that are stored."""
        return [slice(None)] if self.columns is None else self.columns.chosen(capture.heads)

    def stored_width(self, capture: StoredCapture) -> int:
        """Return the elements of a stored row, which has only the requested heads."""
        if self.columns is None or not capture.heads:
            return self.width
        return len(self.chosen(capture)) * self.columns.row.width

    def finished(self, spec: RankSpec, origin: Origin, **rows: Any) -> FinishedCapture:
        """Return the capture of a request as it is to be stored. `rows`: the other fields."""
        capture = spec.captures[self.number]
        return FinishedCapture(
            spec=spec,
            capture=capture,
            sites=by_key((hook, layer) for hook, layer, _ in self.ports),
            hidden_size=self.stored_width(capture),
            columns=self.columns,
            dtype=self.stored_as(capture),
            **vars(origin),
            **rows,
        )


class EndedCapture(Wire, kw_only=True):
    """One capture of an ended request, as this rank recorded it."""

    shape: CaptureShape
    landing: int  # of all its rows, see `SharedMemory.wait`
    blocks: list[BlockPlace] = []
    # its own rows that are kept for others, and may have been recorded again
    earlier: list[ExtentPlace] = []
    reused: list[ExtentPlace] = []  # rows that an earlier request recorded
    # positions that were not recorded when they were last computed, under overload
    dropped: list[int] = []
    high: list[bool] = []  # of each token, whether the window's probe is high
    stream: int = 0  # number of the stream with rows that have left; 0: none
    error: str = ""  # why rows could not be recorded


class Recorded:
    """The rows of a capture that are in memory when its request has ended."""

    def __init__(
        self,
        memory: np.ndarray,
        ended: EndedCapture,
        expected: set[int],
        *,
        windowed: bool = False,
    ) -> None:
        """`memory`: the shared memory, uint8. `expected`: the positions that are to be stored.
        `windowed`: more positions than these were recorded.
        """
        self.blocks = [RowBlock(memory, place) for place in ended.blocks]
        self._earlier = extents_at(ended.earlier, memory)
        self._reused = extents_at(ended.reused, memory)
        self.dropped = set(ended.dropped)
        self.expected = expected
        self.windowed = windowed

    def below(self, stop: int) -> tuple[list[int], int, list[Extent]]:
        """Return the positions below `stop` with rows, how many of them were reused, and the
        rows.
        """
        runs = [run for block in self.blocks for run in block.runs(0, stop)]
        if self.windowed:
            runs = [
                part for run in runs for part in run.among(sorted(self.expected & {*run.positions}))
            ]
        if self.dropped:  # earlier rows of these are of rejected drafts, or of a preempted run
            runs = [
                part
                for run in runs
                for part in run.among(sorted(set(run.positions) - self.dropped))
            ]
        held = {position for run in runs for position in run.positions}
        self.check(held)
        more, reused = self.fill(self.expected - held)
        runs = sorted([*runs, *more], key=lambda run: run.first_position)
        return [position for run in runs for position in run.positions], reused, runs

    def check(self, held: set[int]) -> None:
        """Raise RuntimeError if positions have rows that are not expected."""
        if extra := held - self.expected:
            raise RuntimeError(f"positions {sorted(extra)[:8]} were recorded but not requested")

    def fill(self, lacking: set[int]) -> tuple[list[Extent], int]:
        """Return earlier rows of these positions, each once, and how many of them are reused."""
        # rows of dropped positions are of rejected drafts, or of a preempted run
        own, left = _among(self._earlier, lacking - self.dropped)
        reused, _ = _among(self._reused, left | (lacking & self.dropped))
        return [*own, *reused], sum(run.count for run in reused)


def _among(runs: Sequence[Extent], positions: set[int]) -> tuple[list[Extent], set[int]]:
    """Return the parts of runs at these positions, of the last run that has each, and the positions
    that no run has.
    """
    found = list[Extent]()
    left = set(positions)  # a copy for each run would be quadratic
    for run in reversed(runs):
        here = sorted(left.intersection(run.positions))
        left.difference_update(here)
        found += run.among(here)
    return found, left


class MemoryRows:
    """Rows of an ended request in memory: a site's rows are buffers over its blocks, copied only
    for another dtype or some of the columns.
    """

    def __init__(
        self,
        ports: Sequence[RecordedPort],
        runs: Sequence[Extent],
        dtype: str,
        chosen: Sequence[slice],
    ) -> None:
        """`dtype`: in which they are stored. `chosen`: the stored columns."""
        self._dtype = dtype
        self._chosen = list(chosen)
        self._places = {(hook, layer): place for place, (hook, layer, _) in enumerate(ports)}
        self._parts = [(run, ports_in(run.block, ports)) for run in runs]

    def unsound(self, dtype: str) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        for run, ports in self._parts:
            if (bad := run.unsound(dtype)) is None:
                continue
            for (hook, layer), place in self._places.items():
                for offset in np.flatnonzero(bad[ports[place]]):
                    yield hook, layer, run.first_position + int(offset)

    def blob(self, capture: Any) -> None:
        """Return None, because the rows are not in a file."""

    def __call__(self, hook: str, layer: int) -> list[memoryview]:
        place = self._places[hook, layer]
        return [
            bytes_of(run.rows(ports[place]), run.block.dtype, self._dtype, self._chosen)
            for run, ports in self._parts
        ]


def ports_in(block: RowBlock, ports: Sequence[RecordedPort]) -> list[int]:
    """Return the numbers of ports in a block."""
    order = np.fromiter((port for _, _, port in ports), dtype=np.int64, count=len(ports))
    places: list[int] = np.searchsorted(block.ports, order).tolist()
    return places
