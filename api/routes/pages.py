"""HTML pages of the API: the front page, the list of operations, Swagger UI. All that they load is served here, under a strict CSP."""

import gzip
import html
from functools import cache
from importlib import resources
from typing import Annotated, Any

from litestar import MediaType, Request, Response, get
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.params import PathParameter

from ...schemas.base import to_json
from ...schemas.errors import MidstreamError
from ...schemas.settings import Settings
from ...schemas.version import __version__
from ..context import context_of
from ..web.body import JsonRequest

#: Scripts, styles and calls of the pages go to this API alone. Swagger UI writes `style` attributes and draws icons from `data:` URLs.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}
#: Asset → its type, and whether it is kept compressed (`name.gz`).
ASSETS: dict[str, tuple[str, bool]] = {
    "pages.css": ("text/css", False),
    "swagger-start.js": ("text/javascript", False),
    "swagger-ui-bundle.js": ("text/javascript", True),
    "swagger-ui.css": ("text/css", True),
}
#: How long a browser may keep an asset without asking again, in seconds.
ASSET_AGE_S = 3600


def page(title: str, body: str, scripts: tuple[str, ...] = (), style: str = "pages.css") -> bytes:
    """A whole HTML document; `body` is HTML, `scripts` and `style` are assets."""
    loaded = "".join(f'<script src="/schema/assets/{name}"></script>' for name in scripts)
    return (
        f'<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><link rel="stylesheet" href="/schema/assets/{style}"></head>'
        f"<body>{body}{loaded}</body></html>"
    ).encode()


class Operations(OpenAPIRenderPlugin):
    """`/schema`: a list of the operations, without a script."""

    def __init__(self) -> None:
        super().__init__(path="/", media_type=MediaType.HTML)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        rows = [
            f"<tr><td><b>{method.upper()}</b></td><td><code>{html.escape(path)}</code></td>"
            f"<td>{html.escape(operation.get('summary') or '')}<br>"
            f"<small>{html.escape(operation.get('description') or '')}</small></td></tr>"
            for path, operations in sorted(openapi_schema["paths"].items())
            for method, operation in operations.items()
            if isinstance(operation, dict)
        ]
        return page(
            f"Midstream {__version__}",
            f"<h1>Midstream {__version__}</h1><p>{html.escape(openapi_schema['info']['description'])}</p>"
            '<p>The document: <a href="/schema/openapi.json">openapi.json</a>. '
            'To try out calls: <a href="/schema/swagger">Swagger UI</a>.</p>'
            f"<table>{''.join(rows)}</table>",
        )


class Swagger(OpenAPIRenderPlugin):
    """`/schema/swagger`: Swagger UI, from `api/assets`."""

    def __init__(self) -> None:
        super().__init__(path="/swagger", media_type=MediaType.HTML)

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        scripts = ("swagger-ui-bundle.js", "swagger-start.js")
        return page(f"Midstream {__version__}", '<div id="swagger"></div>', scripts, style="swagger-ui.css")


@cache
def _stored(name: str) -> bytes:
    return resources.files(__package__.rpartition(".")[0]).joinpath("assets", name).read_bytes()


@get("/schema/assets/{name:str}", include_in_schema=False, sync_to_thread=True)
def asset(request: JsonRequest, name: Annotated[str, PathParameter()]) -> Response[bytes]:
    if name not in ASSETS:
        raise MidstreamError("not_found", f"unknown asset {name!r}", allowed=", ".join(ASSETS))
    media_type, compressed = ASSETS[name]
    raw = _stored(f"{name}.gz" if compressed else name)
    headers = {**HEADERS, "Cache-Control": f"max-age={ASSET_AGE_S}", "Vary": "Accept-Encoding"}
    if compressed and "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
    elif compressed:
        raw = gzip.decompress(raw)
    return Response(raw, media_type=media_type, headers=headers)


@get("/", include_in_schema=False)
async def front(request: JsonRequest) -> Response[bytes]:
    """What is here and where: a page for browsers, JSON for everything else."""
    links = _links(context_of(request).settings)
    headers = {**HEADERS, "Vary": "Accept"}
    if "text/html" not in request.headers.get("accept", ""):
        found = {"name": "midstream", "version": __version__, "links": {name: url for name, (url, _) in links.items()}}
        return Response(to_json(found), media_type=MediaType.JSON, headers=headers)
    rows = "".join(f'<tr><td><a href="{html.escape(url)}">{name}</a></td><td>{text}</td></tr>' for name, (url, text) in links.items())
    body = (
        f"<h1>Midstream {__version__}</h1><p>Activation steering, capture and patching on stock vLLM, as a job service. "
        f"Guides are in the folder <code>docs</code> of the source tree.</p><table>{rows}</table>"
    )
    return Response(page(f"Midstream {__version__}", body), media_type=MediaType.HTML, headers=headers)


def _links(settings: Settings) -> dict[str, tuple[str, str]]:
    """Name → URL and one line about it."""
    links = {
        "docs": ("/schema", "all operations of the API"),
        "swagger": ("/schema/swagger", "the same, with a form to try out calls"),
        "openapi": ("/schema/openapi.json", "the OpenAPI document"),
        "models": ("/v1/models", "the served models"),
        "health": ("/healthz", "this process responds (liveness)"),
        "ready": ("/readyz", "a job would run now (readiness)"),
        "metrics": ("/metrics", "Prometheus metrics"),
    }
    if settings.flower_port:
        host = "127.0.0.1" if settings.flower_host in ("0.0.0.0", "::", "") else settings.flower_host
        host = f"[{host}]" if ":" in host else host
        links["flower"] = (
            f"http://{host}:{settings.flower_port}",
            "the task queue, if Flower is running; the address is valid on the server's machine",
        )
    return links


ROUTES = [front, asset]
