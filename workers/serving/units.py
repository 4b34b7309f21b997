"""Records of the units that a job computes one by one: what is known of each, and how it gets into
the ledger, which keeps it once. The attempt after a killed worker computes the units without one.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from ...broker.ledger.jobs.units import LedgerUnits, UnitRow
from .attempt import Attempt, Bench
from .redis_retry import patiently

logger = logging.getLogger(__name__)


class OfUnit(Protocol):
    @property
    def unit(self) -> int:
        """The unit's number."""


R = TypeVar("R", bound=OfUnit)


class UnitRecords(Generic[R]):
    """Number of a unit → its record, of one job."""

    def __init__(
        self,
        bench: Bench[Any],
        attempt: Attempt,
        place: str,
        kind: type[R],
        row: Callable[[R], UnitRow],
        **report: str,
    ) -> None:
        """`place`: the key of the records, which are of this `kind`. `row` returns a record as it
        is kept. `report`: more arguments of `LedgerUnits.keep`.
        """
        engine = bench.engine
        self._ledger = LedgerUnits(bench.ledger)
        self._attempt = attempt
        self._place = place
        self._kind = kind
        self._row = row
        self._report = {
            "place": place,
            "ranks": engine.world,
            "stages": engine.info.pp,
            **report,
        }
        self.known: dict[int, R] = {}

    async def load(self) -> None:
        """Read what earlier attempts have kept."""
        self.known.update(await patiently(self._ledger.records, self._place, self._kind))

    async def keep(self, records: Sequence[R]) -> None:
        """Have records kept, in this order; one of a unit that has one already is not. Raises
        CancelledError if the ledger refuses, which ends the attempt.
        """
        attempt = self._attempt
        rows = [*map(self._row, records)]
        answer = await patiently(
            self._ledger.keep, attempt.job.id, attempt.number, rows, **self._report
        )
        attempt.check_answer(answer)
        for record in records:
            self.known.setdefault(record.unit, record)

    async def restore(self) -> None:
        """Store lost records again: if Redis's machine dies, Redis loses its last second."""
        present = await patiently(self._ledger.records, self._place, self._kind)
        lost = [record for number, record in self.known.items() if number not in present]
        if lost:
            logger.warning(
                "storing again the units that the ledger had lost (count: %d, job: %s)",
                len(lost),
                self._attempt.job.id,
            )
            await self.keep(lost)
