"""Route of the service-wide status: queues, workers, relay, webhooks, Redis."""

from litestar import get

from ...broker.ledger.jobs.status import read_status
from ...schemas.service.status import Status
from ..context import AppContext
from ..web.auth import needs
from .jobs import PROBLEM


@get(
    "/v1/status",
    opt=needs("observe"),
    summary="Status of the whole service",
    description="Queues by model, priority and tenant; live workers and their load; relay, "
    "webhooks and Redis. Needs the scope "
    "`observe`. Worker figures are as of their last heartbeat.",
    responses={503: PROBLEM},
)
async def service_status(context: AppContext) -> Status:
    status: Status = await context.looks.of_next(
        "status", lambda: read_status(context.ledger, held=context.watcher.waiting)
    )
    return status


ROUTES = [service_status]
