"""Route of the page's feed."""

from typing import Annotated, Any

from litestar import Response, get
from litestar.params import QueryParameter
from litestar.response import Stream

from ...schemas.access.keys import Caller
from ...schemas.service.feed import MAX_FEED
from ..context import AppContext
from ..responses import events
from ..responses.feed import job_feed
from ..web.auth import needs, tenant_asked
from ..web.open_calls import EVENTS
from .jobs import ERRORS, Whose


@get(
    "/v1/feed",
    summary="Follow all jobs and the state of the service",
    description="Server-sent events without end: `jobs` with the newest jobs (the first has "
    "`first`; `more`: the next has more of them), "
    "then with those that are new or have changed, at most three times a second; "
    "`service` every two seconds; `error` with a problem "
    "when the key is revoked or expires. A new connection begins with the newest jobs again.",
    media_type=events.MEDIA_TYPE,
    opt=needs("read") | EVENTS,
    responses=ERRORS,
)
async def feed(
    context: AppContext,
    caller: Caller,
    limit: Annotated[
        int,
        QueryParameter(ge=1, le=MAX_FEED, description="How many of the newest jobs it begins with"),
    ] = 500,
    tenant: Whose = None,
) -> Response[Any]:
    whose = tenant_asked(caller, tenant)
    return Stream(
        job_feed(context, caller, whose, limit),
        media_type=events.MEDIA_TYPE,
        headers=events.HEADERS,
    )


ROUTES = [feed]
