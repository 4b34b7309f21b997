"""Changes of jobs for the page's feeds: read once per process a few times a second, however many pages are open."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from ...broker.ledger.feed import read_jobs
from ...broker.ledger.jobs import Ledger
from ...broker.ledger.watch import Watcher
from ...schemas.errors import MidstreamError
from ...schemas.feed import FeedJob

log = logging.getLogger("midstream.api")

#: Seconds between two looks at what has changed; each feed sends at most one event of jobs in this time.
TICK_S = 0.3
#: Jobs that are read at a time; more wait for the next look.
BATCH = 500
#: Changed jobs that are remembered, of the process and of one feed. Beyond it feeds begin again from the newest jobs.
MOST_CHANGED = 10_000
#: Seconds before a look that failed is repeated.
AGAIN_S = 1.0


class Subscriber:
    """One feed."""

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant  # None: of all tenants
        self.missed = True  # it is to begin from the newest jobs
        self.woken = asyncio.Event()
        self._changed: dict[str, FeedJob] = {}

    def miss(self) -> None:
        self._changed.clear()
        self.missed = True
        self.woken.set()

    def put(self, job: FeedJob) -> None:
        if self.tenant is not None and job.tenant != self.tenant:
            return
        if len(self._changed) >= MOST_CHANGED:
            self.miss()
            return
        self._changed[job.id] = job
        self.woken.set()

    def take(self) -> list[FeedJob]:
        """What has changed since the last call, each job once, in its latest state."""
        found, self._changed = list(self._changed.values()), {}
        self.woken.clear()
        return found


class JobFeed:
    """All feeds of a process. Belongs to one event loop. Costs nothing while no feed is open."""

    def __init__(self, ledger: Ledger, watcher: Watcher) -> None:
        self._ledger = ledger
        self._watcher = watcher
        self._subscribers: set[Subscriber] = set()
        self._changed: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, tenant: str | None) -> Iterator[Subscriber]:
        subscriber = Subscriber(tenant)
        self._subscribers.add(subscriber)
        self._watcher.on_change, self._watcher.on_gap = self._hear, self._miss
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="midstream-feed")
        try:
            yield subscriber
        finally:
            self._subscribers.discard(subscriber)
            if not self._subscribers:
                self._watcher.on_change = self._watcher.on_gap = None
                self._changed.clear()

    @property
    def open(self) -> int:
        return len(self._subscribers)

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _hear(self, job_id: str) -> None:
        self._changed[job_id] = None
        if len(self._changed) > MOST_CHANGED:
            self._miss()

    def _miss(self) -> None:
        self._changed.clear()
        for subscriber in self._subscribers:
            subscriber.miss()

    async def _run(self) -> None:
        """Ends when no feed is open; no failure ends it."""
        while self._subscribers:
            await asyncio.sleep(TICK_S)
            try:
                await self._look()
            except Exception as error:
                if isinstance(error, MidstreamError) and error.kind == "unavailable":
                    log.debug("cannot read changed jobs for feeds; will retry: %s", error)
                else:
                    log.exception("changed jobs could not be read for the page's feeds; they begin again")
                self._miss()
                await asyncio.sleep(AGAIN_S)

    async def _look(self) -> None:
        names = list(self._changed)[:BATCH]
        for name in names:
            del self._changed[name]
        for job in await read_jobs(self._ledger, names):
            for subscriber in self._subscribers:
                subscriber.put(job)
