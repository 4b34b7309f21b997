"""Keeps what the page needs in a process of the API while that serves: one `PageState`."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
from litestar import Litestar, Request
from litestar.di import Provide

from midstream.api.context import AppContext
from midstream.api.operations.waiting import ended
from midstream.api.web.shares import Shares

from .job_feed import JobFeed
from .service_figures import ServiceFigures

#: Captures whose rows are read for their norms at the same time; others wait.
MEASURED_AT_ONCE = 2
#: How many of the captures that are read or wait may belong to one tenant, which bounds the wait of
#: other tenants.
MEASURED_OF_TENANT = 8


class PageState:
    """Belongs to one event loop."""

    def __init__(self, context: AppContext) -> None:
        self.measuring = anyio.CapacityLimiter(MEASURED_AT_ONCE)
        self.measured = Shares(MEASURED_OF_TENANT, "looks at captured rows")
        self.feed = JobFeed(context.ledger, context.watcher)
        self.figures = ServiceFigures(context)


@asynccontextmanager
async def keeping(app: Litestar) -> AsyncIterator[None]:
    """Keep the page's state for the length of the block: the figures of the last hour are recorded,
    whether a page is open or not, and feeds end when the server stops.
    """
    context: AppContext = app.state.context
    state = PageState(context)
    app.state.page = state
    context.at_close.append(state.feed.close)
    recording = asyncio.create_task(state.figures.record(), name="midstream-history")
    try:
        yield
    finally:
        await ended(recording)


def _state_of(request: Request[Any, Any, Any]) -> PageState:
    state: PageState = request.app.state.page
    return state


#: Gives handlers the argument `page`.
STATE = {"page": Provide(_state_of, sync_to_thread=False)}
