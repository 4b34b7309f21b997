"""The reaper: recovers lost messages, jobs of dead workers and overdue receipts.

The queue alone is not at-least-once (kombu pops a message before it records it as unacknowledged),
so the ledger is checked instead: `ms:live` holds every unfinished job by the time of its next
check.
"""

import logging
import re
import secrets
import sys
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, cast

import msgspec

from ....schemas.base.records import now
from ....schemas.base.states import State
from ....schemas.jobs.ledger_shares import shares
from ....schemas.jobs.queues import Queue
from ....schemas.packages import part
from ....schemas.settings.faults import crash_point
from ...queue.celery_app import UNACKED, lists_of, queue_of
from ...queue.messages import job_of_task
from ..core import scripts
from ..jobs.captures import LedgerCaptures
from ..jobs.inputs import LedgerInputs
from ..jobs.ledger import Ledger, LedgerPart, of_each, reachable
from ..jobs.status import relay_since
from ..named.source_runs import LedgerRuns
from ..results.views import listing

log = logging.getLogger(__name__)

#: Jobs checked in one sweep; the rest are due in the next one.
SWEEP_LIMIT = 5000
#: Messages read from a list per query.
MESSAGES_CHUNK = 500
#: Old entries checked in one sweep: at most this many in the list of all jobs, and as many in all
#: tenants' lists together.
PRUNE_LIMIT = 2000
#: At least this many of them per tenant's list.
PRUNE_LEAST = 50
#: A queued job that has its message is checked again after `QUEUED_LOOK_S` plus this many seconds
#: per message that was read to find it, so that a long queue is not read all the time.
SECONDS_PER_MESSAGE = 1e-3
#: Seconds between two recounts of usage.
RECOUNT_S = 3600.0
#: Seconds until the next one if a recount could not be completed.
RECOUNT_AGAIN_S = 60.0
#: Jobs, captures or other records examined per script call of a recount, which blocks Redis for a
#: few milliseconds.
RECOUNT_SLICE = 250

#: The task id in a message's headers; `\\` because a message may be quoted inside another JSON
#: document.
_TASK_ID = re.compile(rb'\\?"id\\?": ?\\?"([^"\\]+)')
#: Used instead of a number of attempts: no message.
NOWHERE = -1
#: The same: a waiting message, which starts the next attempt, of any number.
ANY_ATTEMPT = sys.maxsize


class Queued(NamedTuple):
    """A queued job whose message should be looked for."""

    job_id: str
    attempt: int  # attempts made


class ReaperReport(msgspec.Struct):
    """Job ids by what one sweep did to them."""

    # queued, but their message was lost: sent again
    resent: list[str] = []
    requeued: list[str] = []  # their worker's lease had run out
    failed: list[str] = []  # ... and it was the last attempt
    # generated, but receipts were missing at the deadline
    timed_out: list[str] = []
    # never begun, and `expires_in` had passed: aborted
    late: list[str] = []
    cancelled: list[str] = []  # being cancelled when their worker died
    picked: list[str] = []  # waited, and there was room for their message
    # their captures were older than `capture_ttl_s`
    deleted: list[str] = []
    # listing entries whose job's record has expired, and names of runs deleted as long ago
    pruned: int = 0
    corrected: list[str] = []  # usage counters of tenants that were wrong

    def __bool__(self) -> bool:
        return any(msgspec.structs.astuple(self))


class Reaper(LedgerPart):
    """Recovers what was lost, on the ledger's event loop.

    Several may run concurrently: every step is a compare-and-set; duplicate messages are harmless.
    """

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._recount_at = 0.0
        self._captures = LedgerCaptures(ledger)
        self._runs = LedgerRuns(ledger)
        self._inputs = LedgerInputs(ledger)
        self._duties = [part(share.duty) for share in shares() if share.duty]

    @reachable
    async def sweep(self, at: float | None = None) -> ReaperReport:
        """Check every job that is due at `at` (seconds since the epoch; default: now).

        Raises MidstreamError("unavailable") if Redis is unreachable: the rest is still due in the
        next sweep.
        """
        at = now() if at is None else at
        report = ReaperReport()
        queued: dict[str, list[Queued]] = defaultdict(list)  # by queue of Celery
        due: list[bytes] = await self._redis.zrangebyscore(
            "ms:live", "-inf", at, start=0, num=SWEEP_LIMIT
        )
        up_since = await self._up_since() if due else 0.0
        waits = {
            "capture_timeout": self._settings.capture_timeout_s,
            "lease_s": self._settings.lease_s,
            "up_since": up_since,
            "relay_since": await relay_since(self._ledger, at) if due else 0.0,
        }
        for raw in due:
            job_id = raw.decode()
            result, *record = scripts.text(await self._run("reap", at, id=job_id, **waits))
            if result in ("gone", "held"):
                continue
            model, attempt, queue = record
            if result == "queued":
                queued[queue_of(model, cast(Queue, queue))].append(Queued(job_id, int(attempt)))
            else:
                getattr(report, result).append(job_id)
                log.warning("job %s, attempt %s: %s", job_id, attempt, result)
            if result == "requeued":
                crash_point("sweeper.requeued")
        for queue, jobs in queued.items():
            report.resent += await self._resend_lost(queue, jobs, at)
        report.picked = scripts.text(await self._run("top_up", at))
        for duty in self._duties:
            await duty(self._ledger)
        report.corrected = await self._recount(at)
        report.pruned = await self._prune(at) + await self._runs.prune(at)
        try:
            report.deleted += await self._captures.sweep(at)
        except OSError as error:  # jobs do not depend on it
            log.error("cannot delete captures from %s: %s", self._captures.store.uri, error)
        try:
            await self._inputs.sweep(at)
        except OSError as error:
            log.error("cannot remove inputs from %s: %s", self._inputs.store.uri, error)
        return report

    @reachable
    async def release_boots(self, worker: str, boot: str) -> list[str]:
        """Requeue immediately the jobs that earlier starts of `worker` held; `boot` is its current
        start.

        Returns the requeued ids.
        """
        text = scripts.text(await self._run("release_boots", worker=worker, boot=boot))
        return [
            job_id for job_id, state in zip(text[::2], text[1::2], strict=True) if state == "queued"
        ]

    async def _up_since(self) -> float:
        """Return when Redis started, in seconds since the epoch: while it was down, live workers
        could not renew their leases.
        """
        server = await self._redis.info("server")
        return float(now() - server["uptime_in_seconds"])

    async def _recount(self, at: float) -> list[str]:
        """Reconcile usage from time to time, and forget dead workers; log differences."""
        if at < self._recount_at:
            return []
        self._recount_at = at + RECOUNT_AGAIN_S
        await self._run("forget_workers", at)
        recount = UsageReconciliation(self._ledger, at)
        while (differed := await recount.step()) is None:
            pass
        self._recount_at = at + RECOUNT_S
        if differed:
            log.warning("usage counters corrected: %s", "; ".join(differed))
        return differed

    async def _resend_lost(self, queue: str, jobs: list[Queued], at: float) -> list[str]:
        """Send a message again for each of `jobs` that has none; returns their ids."""
        waiting, read = await self._messages(queue)
        resent = []
        for job_id, attempt in jobs:
            present = waiting.get(job_id, NOWHERE) >= attempt
            later = at + scripts.QUEUED_LOOK_S + SECONDS_PER_MESSAGE * read
            if await self._run(
                "look_again", at, id=job_id, attempt=attempt, present=present, later=later
            ):
                log.warning("job %s had no message in the queue: a new one was sent", job_id)
                resent.append(job_id)
        return resent

    async def _messages(self, queue: str) -> tuple[dict[str, int], int]:
        """Return job id → number of attempts made when its latest message was sent; and the number
        of messages read.

        Covers the messages that wait in `queue`, which may start any attempt (so they count as new
        ones), and those delivered from any queue, where the message of an ended attempt may remain
        while its worker finishes.
        """
        messages: dict[str, int] = {}
        read = 0
        # Waiting first: a message delivered in between is found among the delivered ones instead of
        # being missed.
        for name in lists_of(queue):
            start = 0
            while True:
                # From the publishers' end: after a message is added, another one is read twice, but
                # none is skipped.
                chunk: list[bytes] = await self._redis.lrange(
                    name, start, start + MESSAGES_CHUNK - 1
                )
                messages.update((_job_of(message)[0], ANY_ATTEMPT) for message in chunk)
                read += len(chunk)
                start += MESSAGES_CHUNK
                if len(chunk) < MESSAGES_CHUNK:
                    break
        delivered: list[bytes] = await self._redis.hvals(UNACKED)
        for job_id, attempts in map(_job_of, delivered):
            messages[job_id] = max(attempts, messages.get(job_id, NOWHERE))
        return messages, read + len(delivered)

    async def _prune(self, at: float) -> int:
        """Drop the oldest listing entries whose records have expired; returns the number dropped
        from the list of all jobs.
        """
        before = at - self._settings.result_ttl_s
        owners: set[bytes] = await self._redis.smembers("ms:owners")
        share = max(PRUNE_LEAST, PRUNE_LIMIT // max(1, len(owners)))
        tenants = dict.fromkeys([listing("jobs", owner.decode()) for owner in owners], share)
        old = await self._oldest({"ms:jobs": PRUNE_LIMIT} | tenants, before)
        # Most tenants have no old entries: their unused share goes to tenants with more.
        if long := [name for name in tenants if len(old[name]) == share < PRUNE_LIMIT]:
            old |= await self._oldest(
                dict.fromkeys(long, max(share, PRUNE_LIMIT // len(long))), before
            )
        if not (ids := sorted({job_id for listed in old.values() for job_id in listed})):
            return 0
        present = await of_each(
            self._redis, ids, lambda pipe, job_id: pipe.exists(f"ms:job:{job_id.decode()}")
        )
        expired = {job_id for job_id, found in zip(ids, present, strict=True) if not found}
        pruned = 0
        for name, listed in old.items():
            if dropped := expired.intersection(listed):
                of_states = [name.replace("ms:jobs", f"ms:jobs-in:{state}", 1) for state in State]
                count, *_ = await of_each(
                    self._redis,
                    [(key, dropped) for key in (name, *of_states)],
                    lambda pipe, item: pipe.zrem(item[0], *item[1]),
                )
                pruned += count if name == "ms:jobs" else 0
        return pruned

    async def _oldest(self, limits: dict[str, int], before: float) -> dict[str, list[bytes]]:
        """Return for each listing the jobs older than `before`, oldest first, up to its limit."""
        found = await of_each(
            self._redis,
            limits,
            lambda pipe, name: pipe.zrangebyscore(name, "-inf", before, start=0, num=limits[name]),
        )
        return dict(zip(limits, found, strict=True))


def _job_of(message: bytes) -> tuple[str, int]:
    """Return (job id, attempts made when it was sent) of a Celery message, from its task id; an
    empty id for foreign messages.
    """
    match = _TASK_ID.search(message)
    return ("", NOWHERE) if match is None else job_of_task(match[1].decode())


class UsageReconciliation(LedgerPart):
    """One recount of the usage counters: call `step` until it returns the differences.

    Usage is updated in the commits that change it, so it is correct except for changes that a
    process of another version made without counting. A recount takes a slice at a time, while all
    scripts keep it up to date (`tally` in lua/shared/usage.lua), so the service need not stop. A
    recount that begins later replaces it.
    """

    def __init__(self, ledger: Ledger, at: float, slice_: int = RECOUNT_SLICE) -> None:
        """`at`: the time, in seconds since the epoch."""
        super().__init__(ledger)
        self._at = at
        self._slice = slice_
        self._name = secrets.token_hex(8)
        # the sets that are left, with the family of the records of a package's
        self._left = [("live", ""), ("captures", "")]
        for share in shares():
            self._left += share.charged.items()
        self._left.append(("jobs", ""))
        self._cursor = b"0"

    async def step(self) -> list[str] | None:
        """Count one more slice; return None while slices remain.

        At the end, return the counters that were wrong and are now corrected; none if another
        recount has replaced this one.
        """
        if not self._left:
            counted = await self._run("recounted", self._at, name=self._name)
            modules = await self._run("list_modules", self._at)
            return [*_differences(counted), *_differences(modules)]
        which, family = self._left[0]
        self._cursor = await self._run(
            "recount",
            self._at,
            name=self._name,
            which=which,
            family=family,
            cursor=self._cursor,
            many=self._slice,
        )
        if not self._cursor:
            return []
        if self._cursor == b"0":
            self._left.pop(0)
        return None


def _differences(reply: Sequence[bytes | int]) -> list[str]:
    text = scripts.text(reply)
    return [
        f"{name}: {was} instead of {result}"
        for name, was, result in zip(text[::3], text[1::3], text[2::3], strict=False)
    ]
