"""The page's feed as server-sent events: the newest jobs, then every change, and the service's figures."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ...broker.ledger.feed import newest, read_jobs
from ...schemas.base import to_json
from ...schemas.errors import MidstreamError
from ...schemas.feed import FeedJob, FeedJobs
from ...schemas.keys import Caller
from ..context import AppContext
from ..operations.job_feed import BATCH, TICK_S, Subscriber
from .events import PING, PING_S, encode_problem

#: Seconds between two `service` events.
SERVICE_S = 2.0
FEED_URL = "/v1/feed"


def _event(kind: bytes, data: bytes) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind, data)


async def job_feed(context: AppContext, caller: Caller, tenant: str | None, count: int) -> AsyncIterator[bytes]:
    """The body of `GET /v1/feed`, up to a problem when the caller's key or session ends. `tenant`: None: of all tenants."""
    with context.key_watch.of(caller) as held_key, context.feed.of(tenant) as subscriber:
        service_due = last_sign = 0.0
        try:
            while not context.closing:
                held_key.check()
                if subscriber.missed:
                    async for event in _newest(context, subscriber, count):
                        yield event
                if jobs := subscriber.take():
                    yield _jobs(jobs)
                if (at := time.monotonic()) >= service_due:
                    yield _event(b"service", to_json(await context.patiently(lambda: context.figures.of(caller))))
                    service_due, last_sign = at + SERVICE_S, at
                elif at - last_sign >= PING_S:
                    yield PING
                    last_sign = at
                await context.or_closing(_pause(subscriber, service_due), held_key)
        except MidstreamError as error:
            yield encode_problem(error.problem(FEED_URL))


async def _newest(context: AppContext, subscriber: Subscriber, count: int) -> AsyncIterator[bytes]:
    """The newest jobs in several events, so that neither side is busy with them for long."""
    subscriber.missed = False
    names = await context.patiently(lambda: newest(context.ledger, subscriber.tenant, count))
    for start in range(0, max(len(names), 1), BATCH):
        chunk = names[start : start + BATCH]
        jobs = await context.patiently(lambda chunk=chunk: read_jobs(context.ledger, chunk))  # type: ignore[misc]
        yield _jobs(jobs, first=start == 0, more=start + BATCH < len(names))


def _jobs(jobs: list[FeedJob], first: bool = False, more: bool = False) -> bytes:
    return _event(b"jobs", to_json(FeedJobs(jobs=jobs, first=first, more=more)))


async def _pause(subscriber: Subscriber, until: float) -> None:
    """Until there is something to send, and never shorter than a tick."""
    await asyncio.sleep(TICK_S)
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(max(0.0, until - time.monotonic())):
            await subscriber.woken.wait()
