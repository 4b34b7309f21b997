"""The HTTP application: `make_app` assembles routes, error handlers and documents.

It holds no job state: run as many processes as needed.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from litestar import Litestar, Response
from litestar.datastructures import MutableScopeHeaders
from litestar.di import Provide
from litestar.plugins.prometheus import PrometheusConfig
from litestar.routes import HTTPRoute
from litestar.types import Message, Scope

from ..schemas import packages
from ..schemas.base.records import learn_records
from ..schemas.base.version import __version__
from ..schemas.jobs.kinds import KINDS, of_kinds
from ..schemas.packages import part
from ..schemas.settings.settings import Settings
from . import openapi
from .context import context_of, open_context
from .operations.twin import Twin, hand_over
from .routes import (
    absent,
    captures,
    changes,
    completions,
    jobs,
    keys,
    pages,
    registered,
    service,
    steering,
    tokens,
)
from .web import audit, problems
from .web.auth import authorize, caller_of, known_query, well_called
from .web.body import JsonRequest
from .web.middleware import App
from .web.request_context import HandedOver, awaits_log

VERSION_HEADER = "x-midstream-version"

ROUTES = [
    *jobs.ROUTES,
    *completions.ROUTES,
    *captures.ROUTES,
    *steering.ROUTES,
    *registered.ROUTES,
    *keys.ROUTES,
    *changes.ROUTES,
    *service.ROUTES,
    *pages.ROUTES,
    *tokens.ROUTES,
    *(handler for path in of_kinds("routes") for handler in part(path)),
]
#: Entry points of routes: name → list of handlers, which the API adds to its own.
ADDED_ROUTES = "midstream.routes"
#: Entry points of what packages keep in a process of the API while that serves: name → a lifespan
#: of Litestar, which begins once `app.state.context` is open.
ADDED_LIFESPANS = "midstream.lifespans"


async def _name_version(message: Message, scope: Scope) -> None:
    """Add our version to every response, so that a client of another version can report it."""
    if message["type"] == "http.response.start":
        MutableScopeHeaders.from_message(message)[VERSION_HEADER] = __version__


async def _allow(message: Message, scope: Scope) -> None:
    """Name every method of the path in the response to OPTIONS.

    (Litestar names only those of the handler that was registered first.)
    """
    if message["type"] == "http.response.start" and scope.get("method") == "OPTIONS":
        methods = {
            method
            for route in scope["litestar_app"].routes
            if isinstance(route, HTTPRoute) and route.path_format == scope.get("path_template")
            for method in route.methods
        }
        if methods:
            MutableScopeHeaders.from_message(message)["Allow"] = ", ".join(sorted(methods))


def _routes() -> list[Any]:
    """Return our routes and those of installed packages; of the others, what answers in their
    place.
    """
    added = [handler for handlers in packages.load_all(ADDED_ROUTES) for handler in handlers]
    there = {*packages.offered(ADDED_ROUTES), *KINDS}
    instead = [
        handler
        for name, handlers in absent.IN_PLACE.items()
        if name not in there
        for handler in handlers
    ]
    return [*ROUTES, *added, *instead]


def make_app(settings: Settings, twin: Twin | None = None) -> App:
    """Return the application, which uses the Redis at `settings.redis_url`; it starts without a
    worker, relay or Redis. `twin` answers the calls that take long.
    """

    @asynccontextmanager
    async def context(app: Litestar) -> AsyncIterator[None]:
        async with open_context(settings, twin) as opened:
            app.state.context = opened
            yield

    async def keep(response: Response[Any]) -> Response[Any]:
        """Confirm acceptances and changes only once they survive a kill of Redis; otherwise answer
        `unavailable`.
        """
        await audit.end(response)
        if awaits_log():
            await app.state.context.ledger.written()
        return response

    learn_records()
    records = openapi.RecordSchemas()
    app = App(
        route_handlers=_routes(),
        dependencies={
            "context": Provide(context_of, sync_to_thread=False),
            "caller": Provide(caller_of, sync_to_thread=False),
            "info": Provide(jobs.info_of),
            "view": Provide(jobs.view_of),
            "submission": Provide(jobs.submission_of, sync_to_thread=False),
        },
        lifespan=[context, *packages.load_all(ADDED_LIFESPANS)],
        request_class=JsonRequest,
        request_max_body_size=settings.tuning.max_body_mib * 1024 * 1024,
        exception_handlers={**problems.HANDLERS, HandedOver: hand_over},
        before_request=audit.begin,
        after_request=keep,
        before_send=[_name_version, _allow],
        guards=[well_called, authorize, known_query],
        middleware=[
            PrometheusConfig(
                app_name="midstream", prefix="midstream_http", group_path=True
            ).middleware
        ],
        openapi_config=openapi.config(records),
        plugins=[records],
        logging_config=None,
        debug=False,
    )
    audit.check_routes(app.routes)
    app.has_twin = twin is not None
    app.access_level = logging.INFO if settings.log_format == "json" else logging.DEBUG
    return app
