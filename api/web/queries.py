"""Query parameters that a route does not have are refused, on all routes."""

import re
from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.routes import HTTPRoute

from ...schemas.base.errors import invalid, suggestion

#: Paths of pages and their files: a query there is for their scripts, such as the search of /docs.
_PAGES = re.compile(r"/((docs|page|schema)(/.*)?)?")


async def known_query(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """Check the names of the query's parameters. Raises a 400 that names the nearest valid one."""
    path, method = connection.scope["path_template"], connection.scope.get("method")
    if not connection.query_params or method == "OPTIONS" or _PAGES.fullmatch(path):
        return
    known = {
        parameter.field_alias
        for route in connection.app.routes
        if isinstance(route, HTTPRoute) and route.path_format == path
        for parameter in route.route_handler_map[method][1].expected_query_params
    }
    for name in connection.query_params:
        if name not in known:
            raise invalid(
                name,
                f"{method} {path} has no such query parameter",
                allowed=", ".join(sorted(known)) or "none",
                hint=suggestion(name, known),
            )
