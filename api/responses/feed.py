"""The page's feed as server-sent events: the newest jobs, then every change, and the service's
figures.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ..context import AppContext
from ..operations.job_feed import SENDS_PER_S, TICK_S
from .events import RETRY, encode_problem

#: Seconds between two `service` events; more while many feeds are open.
SERVICE_S = 2.0
FEED_URL = "/v1/feed"


async def job_feed(
    context: AppContext, caller: Caller, tenant: str | None, count: int
) -> AsyncIterator[bytes]:
    """The body of `GET /v1/feed`, up to a problem when the caller's key or session ends.

    `tenant`: None: of all tenants.

    Everything that is sent was rendered for all feeds of the same audience; here it is only handed
    on.
    """
    with context.key_watch.of(caller) as held_key, context.feed.of(tenant) as subscriber:
        for end in held_key.ends:
            end.add_done_callback(lambda _: subscriber.woken.set())
        yield RETRY
        service_due = 0.0
        try:
            while not context.closing:
                held_key.check()
                for event in await context.patiently(lambda: subscriber.take(count)):
                    yield event
                if (at := time.monotonic()) >= service_due:
                    yield await context.patiently(lambda: context.figures.rendered(caller))
                    service_due = at + max(SERVICE_S, context.feed.open / SENDS_PER_S)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(TICK_S, service_due - time.monotonic())):
                        await subscriber.woken.wait()
        except MidstreamError as error:
            yield encode_problem(error.problem(FEED_URL))
