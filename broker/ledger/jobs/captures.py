"""Ledger records of captures in files: listing and deletion. The ledger's side of `retention`.

A job may be over while its captures are still being written: after its first error, after a
cancellation, or if a worker presumed dead resumes. So a deleted job stays in `ms:deleting`,
and its mark in the store, until a grace period has passed; the removal is repeated until then. A
later receipt that names its files adds it again (`settle.lua`).
"""

import asyncio
import logging
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, cast

from ....schemas.access.keys import DEFAULT_TENANT
from ....schemas.base.errors import MidstreamError, Translated
from ....schemas.base.records import from_json, now
from ....schemas.jobs.captures import CaptureEntry, CapturePage
from ....schemas.jobs.queues import COMPARISON_S, COMPARISONS
from ....schemas.requests.specs import CaptureStatus
from ....storage.store import open_store
from ...artifacts import retention
from ..results import pages, views
from .ledger import Ledger, LedgerPart, of_each, reachable

log = logging.getLogger(__name__)

#: Maximum number of expired captures deleted by one sweep; and seconds until earlier deletions are
#: checked again.
SWEEP_LIMIT = 200
SWEEP_AGAIN_S = 30.0
#: Grace period of a deletion: this many leases, plus the time for which receipts are awaited.
GRACE_LEASES = 4


def no_captures(job_id: str) -> MidstreamError:
    return MidstreamError("not_found", f"job {job_id} has no captures in files")


def _entry(job: str, created: float, values: Any) -> CaptureEntry | None:
    """Return a capture; None if it was just deleted."""
    tags, status, size, count = values
    return tags and CaptureEntry(
        job=job,
        tags=from_json(tags, list[str]),
        created=created,
        status=cast(CaptureStatus, status.decode()),
        bytes=int(size),
        rows=int(count),
    )


class LedgerCaptures(LedgerPart):
    """Captures of a ledger, in the artifact store of its settings.

    Belongs to the ledger's event loop.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self.store = open_store(ledger.settings.artifacts)
        self._grace = ledger.settings.capture_timeout_s + GRACE_LEASES * ledger.settings.lease_s
        self._again = 0.0  # when earlier deletions are checked again

    @reachable
    async def list(
        self,
        tag: str | None = None,
        limit: int = 50,
        cursor: str | None = None,
        tenant: str | None = None,
    ) -> CapturePage:
        """Return captures (of `tenant`) in files that are not deleted, newest first.

        `cursor`: a previous page's `next`. A rare tag may give a short page with a `next`. Raises
        MidstreamError("invalid_request") for an invalid cursor.
        """

        async def read(chunk: pages.Chunk) -> Iterable[CaptureEntry | None]:
            fields = ("tags", "status", "bytes", "rows")
            records = await of_each(
                self._redis, chunk, lambda pipe, item: pipe.hmget(f"ms:capture:{item[0]}", *fields)
            )
            return [
                _entry(job, created, values)
                for (job, created), values in zip(chunk, records, strict=True)
            ]

        place = pages.parse_cursor(cursor)
        older = partial(pages.older, self._redis, views.listing("captures", tenant))
        found, following = await pages.page(
            place, limit, older, read, lambda entry: tag is None or tag in entry.tags
        )
        return CapturePage(captures=found, next=following)

    @reachable
    async def owner(self, job_id: str) -> str | None:
        """Return the tenant of a job or of its captures, which outlive it; None if neither is
        known.
        """
        async with self._redis.pipeline(transaction=False) as pipe:
            pipe.hmget(f"ms:job:{job_id}", "tenant", "created").hmget(
                f"ms:capture:{job_id}", "tenant", "created"
            )
            records = await pipe.execute()
        owners = (
            DEFAULT_TENANT if tenant is None else str(tenant.decode())
            for tenant, created in records
            if created is not None
        )
        return next(owners, None)

    @reachable
    async def check(self, job_id: str) -> None:
        """Raise MidstreamError("gone") if the job's captures were deleted."""
        if await self._redis.hexists(f"ms:capture:{job_id}", "deleted"):
            raise retention.gone(job_id)

    @reachable
    async def delete(self, job_id: str) -> None:
        """Delete a job's captures: they are invisible once this returns.

        Files being read are removed later.

        Raises MidstreamError: `not_found` if it has none in files, `gone` if they were already
        deleted, `conflict` while it runs, `internal` on a disk error (the reaper tries again).
        """
        if (outcome := await self._forget(job_id)) == "unknown":
            raise no_captures(job_id)
        if outcome == "gone":
            raise retention.gone(job_id)
        if outcome == "running":
            raise MidstreamError(
                "conflict",
                f"job {job_id} has not ended: its captures are still being written",
                hint=f"cancel it with POST /v1/jobs/{job_id}/cancel",
            )
        at = now()
        with Translated(
            OSError,
            lambda error: MidstreamError(
                "internal",
                (
                    f"the captures of job {job_id} are deleted, but their files are still on disk: "
                    f"{error}"
                ),
            ),
        ):
            await self._remove({job_id: at}, at)

    async def sweep(self, at: float | None = None) -> Sequence[str]:
        """Delete captures of jobs that ended more than `capture_ttl_s` ago, and those that killed
        gradient workers have left, and resume earlier deletions. Returns the ids of expired jobs.

        Safe to run concurrently. Raises MidstreamError("unavailable") if Redis is unreachable,
        OSError.
        """
        at = now() if at is None else at
        ttl = self._settings.capture_ttl_s
        expired = [
            *await self._expire(views.listing("captures", COMPARISONS), at - COMPARISON_S),
            *(await self._expire("ms:captured", at - ttl) if ttl else ()),
        ]
        if at >= self._again:
            self._again = at + SWEEP_AGAIN_S
            await self._remove(await self._pending(at), at)
        else:
            await self._remove(dict.fromkeys(expired, at), at)
        return expired

    @reachable
    async def _expire(self, listing: str, before: float) -> Sequence[str]:
        """Delete captures of ended jobs in a list, those with a time before `before`."""
        old = await self._redis.zrangebyscore(listing, "-inf", before, start=0, num=SWEEP_LIMIT)
        # Source runs that a running job holds are spared; the next sweep looks again.
        return [
            name.decode()
            for name in old
            if await self._forget(name.decode(), spare_leased=True) == "forgotten"
        ]

    @reachable
    async def _pending(self, at: float) -> dict[str, float]:
        """Return the jobs whose captures are being deleted → the time at which that began."""
        listed = {
            name.decode(): since
            for name, since in await self._redis.zrange("ms:deleting", 0, -1, withscores=True)
        }
        # Read the marks after the ledger's list. A deletion that ends removes its mark first, so a
        # mark without an entry in the list means that Redis lost the entry.
        lost = {job: at for job in await asyncio.to_thread(self.store.marks) if job not in listed}
        if lost:
            await self._redis.zadd("ms:deleting", lost, nx=True)
        return listed | lost

    async def _forget(self, job_id: str, spare_leased: bool = False) -> str:
        outcome = await self._run("forget_captures", id=job_id, spare=spare_leased)
        return str(outcome.decode())

    @reachable
    async def _remove(self, jobs: dict[str, float], at: float) -> None:
        """Remove the files of `jobs` (job id → time at which its deletion began).

        Raises OSError after removing all that it can.
        """
        if not jobs:
            return
        ending = {job: since for job, since in jobs.items() if since + self._grace <= at}
        failure = None
        try:
            done = await asyncio.to_thread(
                retention.delete, self.store, list(jobs), jobs.keys() - ending.keys()
            )
        except retention.RemovalError as error:
            done = error.done
            failure = error
        if ended := [job for job in done if job in ending]:
            await self._run("removed_captures", jobs=[(job, ending[job]) for job in ended])
        if failure is not None:
            raise failure
        if len(done) < len(jobs):
            log.info(
                "captures are being read: deleting them later (jobs: %d)", len(jobs) - len(done)
            )
