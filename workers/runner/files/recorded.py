"""The rows of an ended capture: what is in memory, and which of it counts."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....schemas.base.records import Wire, by_key
from ....schemas.requests.specs import RankSpec, StoredCapture
from .extents import BlockPlace, Extent, ExtentPlace, RowBlock, bytes_of, extents_at
from .finished_rows import BankColumns, FinishedCapture, Origin

#: (hook, layer, port), in the order of the capture.
RecordedPort = tuple[str, int, int]


class CaptureShape(Wire):
    """What a rank records of a capture."""

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


class Recorded:
    """The rows of a capture that are in memory when its request has ended."""

    def __init__(
        self,
        memory: np.ndarray,
        blocks: Sequence[BlockPlace],
        earlier: Sequence[ExtentPlace],
        reused: Sequence[ExtentPlace],
        dropped: set[int],
        expected: set[int],
    ) -> None:
        """`memory`: the shared memory, uint8. `earlier`, `reused`, `dropped`: see `EndedCapture`.
        `expected`: the positions that are to be stored.
        """
        self.blocks = [RowBlock(memory, place) for place in blocks]
        self._earlier, self._reused = extents_at(earlier, memory), extents_at(reused, memory)
        self.dropped, self.expected = dropped, expected

    def runs(self, stop: int = sys.maxsize) -> list[Extent]:
        """Return the rows of positions below `stop` that were not recorded again."""
        return [run for block in self.blocks for run in block.runs(0, stop)]

    def below(self, stop: int, *, windowed: bool) -> tuple[list[int], int, list[Extent]]:
        """Return the positions below `stop` with rows, how many of them were reused, and the rows.
        `windowed`: more positions than the expected ones were recorded.
        """
        runs = self.runs(stop)
        if windowed:
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
    found, left = list[Extent](), set(positions)  # a copy for each run would be quadratic
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
        self._dtype, self._chosen = dtype, list(chosen)
        self._places = {(hook, layer): place for place, (hook, layer, _) in enumerate(ports)}
        self._parts = [(run, ports_in(run.block, ports)) for run in runs]

    def unsound(self, dtype: str) -> Iterator[tuple[str, int, int]]:
        """Yield (hook, layer, position) of the rows that are not finite as `dtype`."""
        for run, ports in self._parts:
            bad = run.unsound(dtype)
            if bad is None:
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
    numbers: list[int] = np.searchsorted(block.ports, order).tolist()
    return numbers
