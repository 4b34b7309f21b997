"""Records of a sweep's units: what is known of each, and how it gets into the ledger."""

import asyncio
import logging
from collections.abc import Iterable

from ....broker.ledger.jobs.ledger import Ledger
from ....broker.ledger.jobs.sweeps import LedgerSweeps
from ....broker.ledger.results.sweep_result import exact_units, sweep_cell
from ....schemas.jobs.sweep_units import SweepWork
from ....schemas.jobs.sweeps import SweepCell, Unit, UnitRecord
from ....schemas.settings.faults import crash_point
from ...engine.protocol import Engine
from ..attempt import Attempt
from ..redis_retry import patiently

logger = logging.getLogger(__name__)


class UnitRecords:
    """Unit → its record. New ones are kept in the ledger, in the order in which they were decided:
    the cells that a client sees are durable.
    """

    def __init__(self, ledger: Ledger, engine: Engine, attempt: Attempt) -> None:
        self._sweeps = LedgerSweeps(ledger)
        self._engine = engine
        self._attempt = attempt
        self._sweep = attempt.job.work_as(SweepWork).sweep
        self.known: dict[int, UnitRecord] = {}
        self._decided: list[tuple[UnitRecord, Unit, asyncio.Future[None]]] = []
        self._work = asyncio.Event()

    async def load(self) -> None:
        """Read what earlier attempts have kept."""
        self.known.update(await self._stored())

    async def _stored(self) -> dict[int, UnitRecord]:
        job = self._attempt.job.id
        return await patiently(lambda: self._sweeps.records(job), f"units of {job}")

    def new(self, unit: Unit, reason: str = "") -> UnitRecord:
        """Return a record of this attempt, without a value."""
        return UnitRecord(unit=unit.number, reason=reason, attempt=self._attempt.number)

    def add(self, record: UnitRecord, unit: Unit) -> "asyncio.Future[None]":
        """Have a record kept; the future is done when it is."""
        kept: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._decided.append((record, unit, kept))
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
            await self._keep((record, unit) for record, unit, _ in decided)
            for _, _, kept in decided:
                if not kept.done():
                    kept.set_result(None)

    async def _keep(self, decided: Iterable[tuple[UnitRecord, Unit]]) -> None:
        batch: list[tuple[UnitRecord, SweepCell | None]] = [
            (record, sweep_cell(self._sweep, unit, record) if unit.kind == "cell" else None)
            for record, unit in decided
        ]
        job = self._attempt.job
        number = self._attempt.number
        engine = self._engine
        kept = await patiently(
            lambda: self._sweeps.keep(job, number, batch, engine.world, engine.info.pp),
            f"cells of {job.id}",
        )
        crash_point("sweep.kept")
        if kept != "kept":
            self._attempt.refused(kept)
            self._attempt.check()
        self._attempt.progress.totals.cells += sum(cell is not None for _, cell in batch)
        for record, _ in batch:
            self.known.setdefault(record.unit, record)

    async def restore(self) -> None:
        """Store lost records again: if Redis's machine dies, Redis loses its last second."""
        present = await self._stored()
        if lost := [record for number, record in self.known.items() if number not in present]:
            logger.warning(
                "storing again the units that the ledger had lost (count: %d, job: %s)",
                len(lost),
                self._attempt.job.id,
            )
            exact = {
                unit.number: unit
                for pair in range(len(self._sweep.pairs))
                for unit in exact_units(self._sweep, pair, self.known)
            }
            await self._keep(
                (record, exact.get(record.unit, Unit(record.unit, "base", 0))) for record in lost
            )
