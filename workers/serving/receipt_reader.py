"""Reads receipts on a worker: everyone who waits for some of a job's is served by one poll."""

import asyncio
import time
from collections.abc import Iterable

from ...broker.ledger.jobs.ledger import Ledger
from ...broker.ledger.jobs.status import relay_alive_for
from ...broker.ledger.jobs.units import LedgerUnits
from ...schemas.jobs.receipts import Receipt
from .redis_retry import patiently

#: How often receipts are looked for while some are awaited; a step of the engine takes about as
#: long.
POLL_S = 0.05

#: Requests that are looked for per call.
POLL_REQUESTS = 256

#: If a look took longer, Redis was unreachable, and every wait starts again.
STALL_S = 2.0


class _Wait:
    def __init__(self, requests: Iterable[int], patience_s: float) -> None:
        self.missing = set(requests)
        self.patience_s = patience_s
        self.since = time.monotonic()
        self.arrived: dict[int, list[Receipt]] = {}
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ReceiptReader:
    """Reads receipts of one job from its ticket in the ledger."""

    def __init__(self, ledger: Ledger, job_id: str, world: int) -> None:
        """`world`: number of ranks, each of which reports on every request."""
        self._ledger = ledger
        self._units = LedgerUnits(ledger)
        self._job_id = job_id
        self._world = world
        self._waits: list[_Wait] = []
        self._reading: asyncio.Task[None] | None = None

    async def of(self, requests: Iterable[int], patience_s: float) -> dict[int, list[Receipt]]:
        """Wait for the receipts of all `requests` from every rank; return those that have arrived
        once that takes longer than `patience_s`, while the relay runs.
        """
        wait = _Wait(requests, patience_s)
        self._waits.append(wait)
        try:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
            await wait.over
        finally:
            self._waits.remove(wait)
        return wait.arrived

    async def partly(self, requests: Iterable[int]) -> list[Receipt]:
        """Return all receipts of `requests` so far, even if some rank has not reported."""
        report = await patiently(self._units.receipts, self._job_id, sorted(requests), self._world)
        return [receipt for receipts in report.values() for receipt in receipts]

    async def _read(self) -> None:
        """Look until nobody waits, also while Redis is unreachable."""
        while self._waits:
            try:
                await self._look()
            except Exception as error:
                for wait in self._waits:
                    if not wait.over.done():
                        wait.over.set_exception(error)
                raise
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        began = time.monotonic()
        waits = [wait for wait in self._waits if not wait.over.done()]
        asked = [request for wait in waits for request in sorted(wait.missing)][:POLL_REQUESTS]
        report = await patiently(self._units.receipts, self._job_id, asked, self._world)
        complete = {of for of, receipts in report.items() if len(receipts) == self._world}
        now = time.monotonic()
        for wait in waits:
            arrived = wait.missing & complete
            wait.arrived |= {request: report[request] for request in arrived}
            wait.missing -= arrived
            if now - began > STALL_S:
                wait.since = now
        late = [wait for wait in waits if wait.missing and now - wait.since > wait.patience_s]
        if late and not await patiently(
            relay_alive_for, self._ledger, max(wait.patience_s for wait in late)
        ):
            late = []
        for wait in waits:
            if (not wait.missing or wait in late) and not wait.over.done():
                wait.over.set_result(None)
