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


def _absent(package: str, what: str) -> str:
    return f"{what} in the package midstream-{package}, which is not installed"


PAGE_IS_ABSENT = _absent("page", "the live page is")
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


def _refused(error: MidstreamError, *paths: str) -> HTTPRouteHandler:
    """Return a handler of the paths of a package that says what serves them."""

    @route(
        list(paths),
        http_method=[HttpMethod.GET, HttpMethod.POST, HttpMethod.PUT, HttpMethod.DELETE],
        opt=needs(None) | {"any_query": True},
        include_in_schema=False,
    )
    async def refuse(request: JsonRequest) -> Response[bytes]:
        raise error

    return refuse


def _of_package(package: str, what: str, *paths: str) -> HTTPRouteHandler:
    return _refused(
        MidstreamError("not_found", _absent(package, what), hint=packages.installing(package)),
        *paths,
    )


def _of_kind(kind: str, *paths: str) -> HTTPRouteHandler:
    """Return a handler of the paths of a kind of jobs."""
    return _refused(not_installed(kind), *paths)


PAGE = ["/page/{path:path}", "/session", "/v1/feed", "/v1/captures/{job_id:str}/norms"]
#: Package, or kind of jobs of one → handlers of its paths.
IN_PLACE: dict[str, list[Any]] = {
    "page": [front, _of_package("page", "the live page is", *PAGE)],
    "webhooks": [_of_package("webhooks", "webhooks are", "/v1/webhooks/{path:path}")],
    "harvest": [_of_kind("harvest", "/v1/harvests", "/v1/harvests/{path:path}")],
    "sweep": [_of_kind("sweep", "/v1/sweeps", "/v1/sweeps/{path:path}")],
    "attribution": [_of_kind("attribution", "/v1/attributions", "/v1/attributions/{path:path}")],
    "fit": [_of_kind("fit", "/v1/modules/fit", "/v1/jacobians/fit")],
    "dose": [_of_kind("dose", "/v1/doses")],
    "replay": [_of_kind("replay", "/v1/policies/{path:path}", "/v1/hits/{path:path}")],
}
