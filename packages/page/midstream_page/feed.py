"""Route of the page's feed: server-sent events with the newest jobs, then every change, and the
service's figures.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import QueryParameter

from midstream.api.context import AppContext
from midstream.api.responses import events
from midstream.api.routes.jobs import ERRORS, Whose
from midstream.api.web.auth import needs, tenant_asked
from midstream.api.web.key_watch import HeldKey
from midstream.api.web.open_calls import EVENTS
from midstream.schemas.access.keys import Caller

from .job_feed import SENDS_PER_S, TICK_S
from .records import MAX_FEED
from .state import STATE, PageState

#: Seconds between two `service` events; more while many feeds are open.
SERVICE_S = 2.0
FEED_URL = "/v1/feed"


@get(
    FEED_URL,
    summary="Follow all jobs and the state of the service",
    description="Endless server-sent events: `jobs` with the newest jobs (`first` marks the first "
    "event, `more` means that the next one continues them), then with new and changed jobs, at "
    "most three times a second; `history` once, with the figures of the last hour; `service` every "
    "two seconds; `error` with a problem when the key is revoked or expires. A new connection "
    "begins with the newest jobs again.",
    media_type=events.MEDIA_TYPE,
    opt=needs("read") | EVENTS,
    responses=ERRORS,
    dependencies=STATE,
)
async def feed(
    context: AppContext,
    page: PageState,
    caller: Caller,
    limit: Annotated[
        int,
        QueryParameter(ge=1, le=MAX_FEED, description="How many of the newest jobs it begins with"),
    ] = 500,
    tenant: Whose = None,
) -> Response[Any]:
    sent = partial(_events, context, page, caller, tenant_asked(caller, tenant), limit)
    return events.stream(context, caller, FEED_URL, sent)


async def _events(
    context: AppContext,
    page: PageState,
    caller: Caller,
    tenant: str | None,
    count: int,
    held_key: HeldKey,
) -> AsyncGenerator[bytes]:
    """Yield the events of `GET /v1/feed`, until the caller's key or session ends.

    `tenant`: None for all tenants. Events are rendered once for all feeds of the same audience.
    """
    with page.feed.of(tenant) as subscriber:
        for end in held_key.ends:
            end.add_done_callback(lambda _: subscriber.woken.set())
        service_due = 0.0
        while not context.waiting.closing:
            held_key.check()
            for event in await context.waiting.patiently(lambda: subscriber.take(count)):
                yield event
            if (at := time.monotonic()) >= service_due:
                if not service_due and caller.may("observe"):
                    yield page.figures.history()
                yield await context.waiting.patiently(lambda: page.figures.rendered(caller))
                service_due = at + max(SERVICE_S, page.feed.open / SENDS_PER_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(TICK_S, service_due - time.monotonic())):
                    await subscriber.woken.wait()


ROUTES: list[Any] = [feed]
