"""Records of a sweep's units, kept in the order in which they were decided."""

import asyncio
from functools import cached_property
from typing import Any

from midstream.broker.ledger.jobs.units import UnitRow
from midstream.schemas.settings.faults import crash_point
from midstream.workers.serving.attempt import Attempt, Bench
from midstream.workers.serving.units import UnitRecords

from ..records.sweep_units import SweepWork
from ..records.sweeps import Unit, UnitRecord
from ..results.ledger_sweeps import unit_row, units_key
from ..results.sweep_result import pairs_of, sweep_cell


class SweepRecords(UnitRecords[UnitRecord]):
    """The records of one sweep. The cells that a client sees are durable."""

    def __init__(self, bench: Bench[Any], attempt: Attempt) -> None:
        super().__init__(bench, attempt, units_key(attempt.job.id), UnitRecord, self._shown)
        self._sweep = attempt.job.work_as(SweepWork).sweep
        self._decided: list[tuple[UnitRecord, asyncio.Future[None]]] = []
        self._work = asyncio.Event()

    def new(self, unit: Unit, reason: str = "") -> UnitRecord:
        """Return a record of this attempt, without a value."""
        return UnitRecord(unit=unit.number, reason=reason, attempt=self._attempt.number)

    def add(self, record: UnitRecord) -> "asyncio.Future[None]":
        """Have a record kept; the future is done when it is."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decided.append((record, kept))
        self._work.set()
        return kept

    async def keep_added(self) -> None:
        """Keep records as they are added, until cancelled."""
        while True:
            await self._work.wait()
            self._work.clear()
            self._attempt.check()  # receipts arrive together: what they decide is kept in one call
            decided = self._decided
            self._decided = []
            await self.keep([record for record, _ in decided])
            crash_point("sweep.kept")
            cells = sum(record.unit in self._cells for record, _ in decided)
            self._attempt.progress.totals.cells += cells
            for _, kept in decided:
                if not kept.done():
                    kept.set_result(None)

    def _shown(self, record: UnitRecord) -> UnitRow:
        unit = self._cells.get(record.unit)
        cell = None if unit is None else sweep_cell(self._sweep, unit, record)
        return unit_row(self._attempt.job, self._attempt.number, record, cell)

    @cached_property
    def _cells(self) -> dict[int, Unit]:
        """All cells by number; the features among them are known once `load` has run."""
        pairs = pairs_of(self._sweep, self.known)
        cells = (unit for pair in pairs for unit in pair.exact_units())
        return {unit.number: unit for unit in cells}
