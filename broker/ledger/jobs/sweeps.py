"""Ledger records of sweep units: their receipts are read from the job's ticket; confirmed units are
stored and outlive an attempt.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple, cast

from msgspec import UnsetType

from ....schemas.base import MidstreamError, to_json, to_msgpack
from ....schemas.jobs.attributions import EstimatedPair
from ....schemas.jobs.jobs import Event, EventKind, Job
from ....schemas.jobs.receipts import Receipt, receipt_decoder
from ....schemas.jobs.sweep_units import SweepWork
from ....schemas.jobs.sweeps import SweepCell, SweepResult, UnitRecord
from ..core import scripts
from ..results.sweep_result import known_units
from .ledger import LedgerPart, not_found, reachable

#: Units in one script call: few enough to hold Redis for a few milliseconds only.
BATCH = 500

UnitFate = Literal["kept", "stale", "cancelling"]


class SweepSnapshot(NamedTuple):
    """A sweep's request and what is known of its result so far."""

    request: bytes  # as it was sent, JSON; empty: an older server accepted it
    result: SweepResult
    last_event: str  # id of the last event that `result` surely includes; empty: no events


class LedgerSweeps(LedgerPart):
    """Sweep units in a ledger. Belongs to the ledger's event loop."""

    @reachable
    async def records(self, job_id: str) -> dict[int, UnitRecord]:
        """Return number of the unit → its record, for all finished units."""
        return known_units(await self._redis.hvals(f"ms:units:{job_id}"))

    @reachable
    async def standing(self, job_id: str) -> SweepSnapshot:
        """Return the sweep's request, its result so far and its last event.

        Raises MidstreamError: `not_found`, also for a job that is not a sweep, and `gone` after the
        retention time.
        """
        # before the cells are read: an event may be repeated, none is missed
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(f"ms:job:{job_id}", "request").xrevrange(f"ms:events:{job_id}", count=1)
            raw, newest = await pipe.execute()
        whole = await self._ledger.result(job_id)
        result = whole.sweep if isinstance(whole.attribution, UnsetType) else whole.attribution
        if result is None:
            raise MidstreamError("not_found", f"job {job_id} is not a sweep")
        return SweepSnapshot(
            raw or b"",
            result,
            newest[0][0].decode() if newest else "",
        )

    @reachable
    async def receipts(
        self, job_id: str, requests: Sequence[int], ranks: int
    ) -> dict[int, list[Receipt]]:
        """Return request → its receipts in rank order, for those of `requests` on which all `ranks`
        have reported.
        """
        if not requests:
            return {}
        raw = await self._redis.hmget(
            f"ms:ticket:{job_id}",
            [f"{request}/{rank}" for request in requests for rank in range(ranks)],
        )
        by_request = {
            request: raw[place * ranks : (place + 1) * ranks]
            for place, request in enumerate(requests)
        }
        return {
            request: [receipt_decoder.decode(packed) for packed in receipts]
            for request, receipts in by_request.items()
            if None not in receipts
        }

    @reachable
    async def reported(self, job_id: str, requests: Sequence[int], ranks: int) -> list[Receipt]:
        """Return all receipts of these requests so far, even if some rank has not reported."""
        raw = await self._redis.hmget(
            f"ms:ticket:{job_id}",
            [f"{request}/{rank}" for request in requests for rank in range(ranks)],
        )
        return [receipt_decoder.decode(packed) for packed in raw if packed is not None]

    @reachable
    async def keep(
        self,
        job: Job,
        attempt: int,
        units: Iterable[tuple[UnitRecord, SweepCell | EstimatedPair | None]],
        ranks: int,
        stages: int,
    ) -> UnitFate:
        """Store unit records, in this order, each with its event (none if it is neither a cell nor
        an estimate), and drop their receipts.

        An existing record of a unit is not replaced. `stale`: the attempt is no longer current.
        `cancelling`: the sweep is being cancelled. In both cases nothing of the batch is kept.
        Raises not_found.
        """
        width = job.work_as(SweepWork).units.width
        packed = [
            (
                record.unit,
                to_msgpack(record),
                b"" if shown is None else to_json(_event(shown, attempt)),
                isinstance(shown, SweepCell),
            )
            for record, shown in units
        ]
        outcome = "kept"
        for start in range(0, len(packed), BATCH):
            arguments = scripts.keep_units(
                settings=self._settings,
                job_id=job.id,
                attempt=attempt,
                width=width,
                ranks=ranks,
                stages=stages,
                units=packed[start : start + BATCH],
            )
            outcome = (await self._scripts.keep_units(args=arguments)).decode()
            if outcome == "unknown":
                raise not_found(job.id)
            if outcome != "kept":
                break
        return cast(UnitFate, outcome)


def _event(shown: SweepCell | EstimatedPair, attempt: int) -> Event:
    data = {name: getattr(shown, name) for name in shown.__struct_fields__}
    kind: EventKind = "cell" if isinstance(shown, SweepCell) else "estimate"
    return Event(event=kind, data=data, attempt=attempt)
