"""A ledger and its queue, without a worker."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from ledger_kit import BOOT, IDENTITY, MODEL, WORKER, Sent, make_job, open_ledger, sent

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.queue.celery_app import PRIORITY_STEPS, lists_of, queue_of
from midstream.schemas.jobs.jobs import Job


class Line:
    """A ledger and its queue, without a worker: `serve` takes the first message and claims its
    job.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.reaper = Reaper(ledger)

    async def submit(self, count: int = 1, **changes: Any) -> list[Job]:
        jobs = [make_job(**changes) for _ in range(count)]
        for job in jobs:
            await self.ledger.submit(job, {})
        return jobs

    async def serve(self, count: int) -> list[str]:
        """Claim this many jobs, each by the first message, and give the tenants they belong to."""
        served: list[str] = []
        while len(served) < count and (messages := await self.sent()):
            await self.ledger.redis.rpop(
                lists_of(queue_of(MODEL))[PRIORITY_STEPS.index(messages[0].step)]
            )
            claim = await self.ledger.claim(messages[0].job_id, WORKER, BOOT, 1, IDENTITY)
            if claim is not None:
                served.append(claim.job.tenant)
        return served

    async def sent(self) -> list[Sent]:
        return await sent(self.ledger)

    async def lose_messages(self) -> None:
        await self.ledger.redis.delete(*lists_of(queue_of(MODEL)))


@asynccontextmanager
async def opened(url: str, **changes: Any) -> AsyncIterator[Line]:
    async with open_ledger(url, **changes) as ledger:
        yield Line(ledger)
