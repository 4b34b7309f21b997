"""Ledger records of units, which a job computes one by one: each is kept once, whichever attempt
has computed it, and outlives the attempt; until then its receipts are read from the job's ticket.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from ....schemas.base.records import from_msgpack
from ....schemas.jobs.receipts import Receipt, receipt_decoder
from ..core.script_arguments import binary
from .ledger import LedgerPart, reachable

R = TypeVar("R")

#: Units in one script call: few enough to hold Redis for a few milliseconds only.
BATCH = 500

#: Whether records were kept, or why none was: `stale`: the attempt is no longer current;
#: `cancelling`: the job is being cancelled; `unknown`: the ledger does not have it.
UnitFate = Literal["kept", "stale", "cancelling", "unknown"]


#: A record as `kept_once` returns it.
UnitRow = tuple[object, ...]


def kept_once(
    field: int | str,
    record: bytes,
    counts: Mapping[str, int] | None = None,
    event: bytes = b"",
    requests: Iterable[int] = (),
) -> UnitRow:
    """Return a record that `LedgerUnits.keep` keeps once under its field.

    `counts`: counter → what the record adds to it; None: readers see no change. `event`: JSON;
    empty: it has none. `requests`: whose receipts it was made of; they are dropped.
    """
    shown = binary(event) if event else False
    return field, binary(record), False if counts is None else counts, shown, [*requests]


class LedgerUnits(LedgerPart):
    """Units in a ledger. Belongs to the ledger's event loop."""

    @reachable
    async def records(self, place: str, kind: type[R]) -> dict[int, R]:
        """Return number of the unit → its record, for all units that have one at this key."""
        raw = await self._redis.hgetall(place)
        return {int(number): from_msgpack(record, kind) for number, record in raw.items()}

    @reachable
    async def receipts(
        self, job_id: str, requests: Sequence[int], ranks: int
    ) -> dict[int, list[Receipt]]:
        """Return request → its receipts so far, in rank order."""
        if not requests:
            return {}
        fields = [f"{request}/{rank}" for request in requests for rank in range(ranks)]
        raw = await self._redis.hmget(f"ms:ticket:{job_id}", fields)
        packed = {
            request: raw[place * ranks : (place + 1) * ranks]
            for place, request in enumerate(requests)
        }
        return {
            request: [receipt_decoder.decode(each) for each in of_ranks if each is not None]
            for request, of_ranks in packed.items()
        }

    @reachable
    async def keep(
        self, job_id: str, attempt: int, rows: Sequence[UnitRow], **report: Any
    ) -> UnitFate:
        """Run lua/jobs/keep.lua, which documents its arguments and outcomes, in batches, of which
        the first that is refused is the last.
        """
        fate: UnitFate = "kept"
        for start in range(0, max(len(rows), 1), BATCH):
            batch = rows[start : start + BATCH]
            outcome = await self._run("keep", id=job_id, attempt=attempt, units=batch, **report)
            fate = outcome.decode()
            if fate != "kept":
                break
        return fate
