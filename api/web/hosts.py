"""The guard of all routes that checks `Host` and `Origin`."""

from typing import Any

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler

from ...broker.ops.hosts import Hosts


async def well_called(
    connection: ASGIConnection[Any, Any, Any, Any], handler: BaseRouteHandler
) -> None:
    """The guard of all routes that comes before `authorize`. Raises `misdirected`, `cross_site`."""
    hosts: Hosts = connection.app.state.context.hosts
    headers = connection.headers
    hosts.check(
        connection.scope["method"],  # type: ignore[typeddict-item]
        headers.getall("host", []),
        headers.getall("origin", []),
    )
