"""Ledger records of sweep units, and a sweep as its readers see it before it ends."""

from msgspec import UnsetType
from msgspec.structs import asdict

from midstream.broker.ledger.jobs.ledger import Ledger, reachable
from midstream.broker.ledger.jobs.units import UnitRow, kept_once
from midstream.schemas.base.records import to_json, to_msgpack
from midstream.schemas.jobs.jobs import Event, EventKind, Job

from ..records.attributions import EstimatedPair
from ..records.sweep_units import SweepWork
from ..records.sweeps import SweepCell, SweepResult, UnitRecord


@reachable
async def standing(ledger: Ledger, job_id: str) -> tuple[bytes, SweepResult, str]:
    """Return a sweep's request as it was sent (JSON; empty: an older server accepted it), its
    result so far, and the id of the last event that this surely includes; empty: no events.

    Raises MidstreamError: `not_found`, and `gone` after the retention time.
    """
    # before the cells are read: an event may be repeated, none is missed
    async with ledger.redis.pipeline(transaction=True) as pipe:
        pipe.hget(f"ms:job:{job_id}", "request").xrevrange(f"ms:events:{job_id}", count=1)
        raw, newest = await pipe.execute()
    whole = await ledger.result(job_id)
    result = whole.sweep if isinstance(whole.attribution, UnsetType) else whole.attribution
    return raw or b"", result, newest[0][0].decode() if newest else ""


def units_key(job_id: str) -> str:
    return f"ms:units:{job_id}"


def unit_row(
    job: Job, attempt: int, record: UnitRecord, shown: SweepCell | EstimatedPair | None
) -> UnitRow:
    """Return a unit's record with its event (none if it is neither a cell nor an estimate)."""
    width = job.work_as(SweepWork).units.width
    return kept_once(
        field=record.unit,
        record=to_msgpack(record),
        counts=None if shown is None else {"cells": int(isinstance(shown, SweepCell))},
        event=b"" if shown is None else to_json(_event(shown, attempt)),
        requests=range(record.unit * width, (record.unit + 1) * width),
    )


def _event(shown: SweepCell | EstimatedPair, attempt: int) -> Event:
    kind: EventKind = "cell" if isinstance(shown, SweepCell) else "estimate"
    return Event(event=kind, data=asdict(shown), attempt=attempt)
