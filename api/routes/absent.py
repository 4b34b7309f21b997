"""Answers in place of packages that are not installed."""

from typing import Any

from litestar import MediaType, Response, get, route
from litestar.enums import HttpMethod
from litestar.handlers import HTTPRouteHandler

from ...schemas import packages
from ...schemas.base.errors import MidstreamError
from ...schemas.base.version import __version__
from ...schemas.jobs.kinds import not_installed
from ..context import AppContext
from ..web.auth import needs
from ..web.body import JsonRequest
from .pages import HEADERS, front_links, link_list, page

PAGE_IS_ABSENT = "the live page is in the package midstream-page, which is not installed"
PAGE_REMEDY = packages.installing("page")


@get("/", opt=needs(None), include_in_schema=False)
async def front(request: JsonRequest, context: AppContext) -> Response[bytes]:
    """Answer browsers with a short document that says where the page is, others with links."""
    if "text/html" not in request.headers.get("accept", ""):
        return front_links(context.settings)
    document = page(
        f"Midstream {__version__}",
        f"<h1>Midstream {__version__}</h1><p>This is the API; {PAGE_IS_ABSENT}. To install it: "
        f"<code>{PAGE_REMEDY}</code></p>{link_list(context.settings)}",
    )
    headers = {**HEADERS, "Vary": "Accept"}
    return Response(document, media_type=MediaType.HTML, headers=headers)


@route(
    ["/page/{path:path}", "/session", "/v1/feed", "/v1/captures/{job_id:str}/norms"],
    http_method=[HttpMethod.GET, HttpMethod.POST, HttpMethod.DELETE],
    opt=needs(None) | {"any_query": True},
    include_in_schema=False,
)
async def page_call(request: JsonRequest) -> Response[bytes]:
    """Refuse the calls of the page. Raises a 404 that says what serves them."""
    raise MidstreamError("not_found", PAGE_IS_ABSENT, hint=PAGE_REMEDY)


@route(
    "/v1/webhooks/{path:path}",
    http_method=[HttpMethod.GET, HttpMethod.POST],
    opt=needs(None) | {"any_query": True},
    include_in_schema=False,
)
async def webhooks_call(request: JsonRequest) -> Response[bytes]:
    """Refuse the calls on webhooks. Raises a 404 that says what serves them."""
    absent = "webhooks are in the package midstream-webhooks, which is not installed"
    raise MidstreamError("not_found", absent, hint=packages.installing("webhooks"))


def _calls_of_kind(kind: str, *paths: str) -> HTTPRouteHandler:
    """Return a handler that refuses the calls on a kind of jobs, at these paths: with a 501 that
    says what installs it.
    """

    @route(
        list(paths),
        http_method=[HttpMethod.GET, HttpMethod.POST],
        opt=needs(None) | {"any_query": True},
        include_in_schema=False,
    )
    async def call(request: JsonRequest) -> Response[bytes]:
        raise not_installed(kind)

    return call


#: Package, or kind of jobs of one → handlers of its paths.
IN_PLACE: dict[str, list[Any]] = {
    "page": [front, page_call],
    "webhooks": [webhooks_call],
    "sweep": [_calls_of_kind("sweep", "/v1/sweeps", "/v1/sweeps/{path:path}")],
    "attribution": [
        _calls_of_kind("attribution", "/v1/attributions", "/v1/attributions/{path:path}")
    ],
    "fit": [_calls_of_kind("fit", "/v1/modules/fit", "/v1/jacobians/fit")],
    "dose": [_calls_of_kind("dose", "/v1/doses")],
}
