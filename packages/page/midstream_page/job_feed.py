"""Changes of jobs for the page's feeds: read and rendered once per process and audience, however
many pages are open.
"""

import asyncio
import itertools
import logging
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.watch import JobWatcher
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_json

from .feed_rows import newest, read_jobs

log = logging.getLogger("midstream.api")

#: Seconds between two reads of changed jobs; a feed sends at most one batch of jobs in this time.
TICK_S = 0.3
#: Events per second that all feeds of a process send together, approximately: with many open feeds
#: the reads are further apart.
SENDS_PER_S = 250
#: Jobs per read, and per event.
BATCH = 500
#: Changed jobs that are remembered; beyond this number, feeds begin again from the newest jobs.
MOST_CHANGED = 10_000
#: Events of an audience, and their bytes, that are kept for feeds that are behind or begin with an
#: older list of the newest jobs.
KEPT_EVENTS = 128
KEPT_BYTES = 1 << 20
#: Seconds for which a list of newest jobs is kept, and the largest size in bytes of all audiences'
#: lists together.
LIST_S = 30.0
LISTS_BYTES = 64 << 20
#: Seconds for which an audience is kept when its last feed has closed: a client may connect again.
LINGER_S = 10.0
#: Feeds that are woken at a time; other calls run between two slices.
SLICE = 50
#: Seconds before a look that failed is repeated.
AGAIN_S = 1.0


def event(kind: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, data)


def _jobs(rows: Sequence[bytes], more: bytes = b"") -> bytes:
    """Return a `jobs` event: a `FeedJobs` of jobs encoded as JSON. `more`: its other members."""
    return event(b"jobs", b'{"jobs":[%b]%b}' % (b",".join(rows), more))


class Newest:
    """The newest jobs, as JSON; the changes since are the audience's events from `position` on."""

    def __init__(self, rows: list[bytes], count: int, position: int) -> None:
        self._rows = rows
        self.position = position
        self.count = count  # number of jobs requested
        self.bytes = sum(map(len, rows))
        self.until = time.monotonic() + LIST_S

    def events(self, count: int) -> Iterator[bytes]:
        """Yield the first `count` jobs in several events, so that neither side is busy for long."""
        rows = self._rows[:count]
        starts = range(0, max(len(rows), 1), BATCH)
        for start in starts:
            first = b',"first":true' if start == 0 else b""
            more = b',"more":true' if start != starts[-1] else b""
            yield _jobs(rows[start : start + BATCH], first + more)


class Audience:
    """The feeds that see the same jobs, and the latest events sent to them."""

    def __init__(self, tenant: str | None) -> None:
        self.tenant = tenant  # None: all tenants
        self.feeds: set[Subscriber] = set()
        self.closed = 0.0  # when its last feed closed
        self.newest: Newest | None = None
        self.reading = asyncio.Lock()
        self.end = 0  # number of the next event
        self._kept: deque[bytes] = deque()
        self._bytes = 0

    def put(self, sent: bytes) -> None:
        self._kept.append(sent)
        self._bytes += len(sent)
        self.end += 1
        while len(self._kept) > KEPT_EVENTS or (self._bytes > KEPT_BYTES and len(self._kept) > 1):
            self._bytes -= len(self._kept.popleft())

    def miss(self) -> None:
        """Make every feed begin again, because events may be missing."""
        self._kept.clear()
        self._bytes = 0
        self.end += 1

    def after(self, position: int) -> list[bytes] | None:
        """Return the events from this number on; None if some are no longer kept."""
        missing = self.end - len(self._kept) - position
        return None if missing > 0 else list(itertools.islice(self._kept, -missing, None))


class Subscriber:
    """One feed."""

    def __init__(self, feed: "JobFeed", audience: Audience) -> None:
        self._feed = feed
        self._audience = audience
        # number of the next event to send; -1: begin from the newest jobs
        self._position = -1
        self.woken = asyncio.Event()

    async def take(self, count: int) -> Iterable[bytes]:
        """Return the events to send now: at first, and after falling behind, the newest `count`
        jobs. Raises `unavailable`.
        """
        self.woken.clear()
        sent = self._audience.after(self._position) if self._position >= 0 else None
        if sent is None:
            newest = await self._feed.newest(self._audience, count)
            self._position = newest.position
            return newest.events(count)
        self._position += len(sent)
        return sent


class JobFeed:
    """All feeds of a process. Belongs to one event loop. Costs nothing while no feed is open."""

    def __init__(self, ledger: Ledger, watcher: JobWatcher) -> None:
        self._ledger = ledger
        self._watcher = watcher
        self._audiences: dict[str | None, Audience] = {}
        self._changed: dict[str, None] = {}
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def of(self, tenant: str | None) -> Iterator[Subscriber]:
        audience = self._audiences.setdefault(tenant, Audience(tenant))
        subscriber = Subscriber(self, audience)
        audience.feeds.add(subscriber)
        self._watcher.on_change = self._hear
        self._watcher.on_gap = self._miss
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="midstream-feed")
        try:
            yield subscriber
        finally:
            audience.feeds.discard(subscriber)
            audience.closed = time.monotonic()

    @property
    def open(self) -> int:
        return sum(len(audience.feeds) for audience in self._audiences.values())

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        for audience in self._audiences.values():
            for subscriber in audience.feeds:
                subscriber.woken.set()

    async def newest(self, audience: Audience, count: int) -> Newest:
        """Return the newest `count` jobs, or more. Feeds share one list while it is fresh and all
        changes since are kept.
        """
        async with audience.reading:
            result = audience.newest
            if (
                result is None
                or result.count < count
                or time.monotonic() > result.until
                or audience.after(result.position) is None
            ):
                position = audience.end
                rows = []
                names = await newest(self._ledger, audience.tenant, count)
                for start in range(0, len(names), BATCH):
                    rows += [
                        to_json(job)
                        for job in await read_jobs(self._ledger, names[start : start + BATCH])
                    ]
                result = audience.newest = Newest(rows, count, position)
                self._forget_lists()
            return result

    def _forget_lists(self) -> None:
        """Drop lists that have expired, and the oldest ones beyond `LISTS_BYTES`."""
        room = LISTS_BYTES
        kept = [
            (audience.newest, audience)
            for audience in self._audiences.values()
            if audience.newest is not None
        ]
        for result, audience in sorted(kept, key=lambda pair: -pair[0].until):
            room -= result.bytes
            if room < 0 or time.monotonic() > result.until:
                audience.newest = None

    def _hear(self, job_id: str) -> None:
        self._changed[job_id] = None
        if len(self._changed) > MOST_CHANGED:
            self._miss()

    def _miss(self) -> None:
        self._changed.clear()
        for audience in self._audiences.values():
            audience.miss()
            for subscriber in audience.feeds:
                subscriber.woken.set()

    async def _run(self) -> None:
        """Send changes until no audience remains; retry after failures."""
        while self._audiences:
            await asyncio.sleep(max(TICK_S, self.open / SENDS_PER_S))
            try:
                await self._look()
            except Exception as error:
                if isinstance(error, MidstreamError) and error.kind == "unavailable":
                    log.debug("cannot read changed jobs for feeds; will retry: %s", error)
                else:
                    log.exception(
                        "cannot read changed jobs for the page's feeds; the feeds begin again"
                    )
                self._miss()
                await asyncio.sleep(AGAIN_S)
            self._forget()
        self._watcher.on_change = self._watcher.on_gap = None
        self._changed.clear()

    async def _look(self) -> None:
        """Add changed jobs to the events of each audience that may see them, and wake its feeds."""
        names = list(self._changed)
        self._changed = {}
        woken: set[str | None] = set()
        for start in range(0, len(names), BATCH):
            rows: dict[str | None, list[bytes]] = {}
            for job in await read_jobs(self._ledger, names[start : start + BATCH]):
                row = to_json(job)
                for tenant in (None, job.tenant):
                    if tenant in self._audiences:
                        rows.setdefault(tenant, []).append(row)
            for tenant, changed in rows.items():
                self._audiences[tenant].put(_jobs(changed))
            woken.update(rows)
        feeds = [subscriber for tenant in woken for subscriber in self._audiences[tenant].feeds]
        for number, subscriber in enumerate(feeds, 1):
            subscriber.woken.set()
            if number % SLICE == 0:
                await asyncio.sleep(0)

    def _forget(self) -> None:
        """Drop the audiences whose last feed closed a while ago, and lists that are old."""
        over = time.monotonic() - LINGER_S
        for audience in [
            audience
            for audience in self._audiences.values()
            if not audience.feeds and audience.closed < over
        ]:
            del self._audiences[audience.tenant]
        self._forget_lists()
