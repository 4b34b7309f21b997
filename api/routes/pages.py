"""Pages of the API: the documentation, the list of operations, Swagger UI; and what sends the files
of a page.

Everything that they load is served here, under a strict CSP.
"""

import gzip
import hashlib
import html
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from threading import Lock
from typing import Annotated, Any, NamedTuple

from litestar import MediaType, Response, get
from litestar.openapi.plugins import OpenAPIRenderPlugin
from litestar.params import PathParameter
from litestar.response import Redirect

from ...schemas.base.errors import MidstreamError, shortened
from ...schemas.base.records import JsonObject, to_json
from ...schemas.base.version import __version__
from ...schemas.settings.settings import Settings
from ..web.auth import needs
from ..web.body import JsonRequest
from ..web.request_context import AnyRequest

#: Scripts, styles and calls of the pages go to this API alone. Swagger UI writes `style` attributes
#: and draws icons from `data:` URLs.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
}
#: For the live page: no inline styles either. Scripts may still set styles through the DOM.
PAGE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: "
        "blob:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",  # revalidated each time, mostly with 304
    "Vary": "Accept, Accept-Encoding",
}
#: For the documentation, whose tables have `style` attributes.
SITE_HEADERS = {
    **PAGE_HEADERS,
    "Content-Security-Policy": HEADERS["Content-Security-Policy"],
}
PAGE_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".json": "application/json",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
#: The documentation as `make docs` writes it in a checkout; wheels do not contain it.
SITE = Path(__file__).resolve().parents[2] / ".cache" / "site"
SITE_INDEX = "/docs/index.html"
#: How long a browser may keep an asset without asking again, in seconds.
ASSET_AGE_S = 3600
ASSET_HEADERS = {
    **HEADERS,
    "Cache-Control": f"max-age={ASSET_AGE_S}",
    "Vary": "Accept-Encoding",
}


def page(title: str, body: str, scripts: tuple[str, ...] = (), style: str = "pages.css") -> bytes:
    """Return an HTML document; `body` is HTML, `scripts` and `style` are assets."""
    loaded = "".join(f'<script src="/schema/assets/{name}"></script>' for name in scripts)
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8"><meta '
        'name="viewport" content="width=device-width, initial-scale=1">'
        f'<title>{html.escape(title)}</title><link rel="icon" href="data:,"><link '
        f'rel="stylesheet" href="/schema/assets/{style}"></head>'
        f"<body>{body}{loaded}</body></html>"
    ).encode()


class Operations(OpenAPIRenderPlugin):
    """Renders `/schema`: a list of the operations, without a script."""

    def __init__(self) -> None:
        super().__init__(path="/", media_type=MediaType.HTML)

    def render(self, request: AnyRequest, openapi_schema: JsonObject) -> bytes:
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
            "<h1>Midstream "
            f"{__version__}</h1><p>{html.escape(openapi_schema['info']['description'])}</p>"
            '<p>The document: <a href="/schema/openapi.json">openapi.json</a>. '
            'To try out calls: <a href="/schema/swagger">Swagger UI</a>.</p>'
            f"<table>{''.join(rows)}</table>",
        )


class Swagger(OpenAPIRenderPlugin):
    """Renders `/schema/swagger`: Swagger UI, from `api/assets`."""

    def __init__(self) -> None:
        super().__init__(path="/swagger", media_type=MediaType.HTML)

    def render(self, request: AnyRequest, openapi_schema: JsonObject) -> bytes:
        scripts = ("swagger-ui-bundle.js", "swagger-start.js")
        return page(
            f"Midstream {__version__}", '<div id="swagger"></div>', scripts, style="swagger-ui.css"
        )


class ServedFile(NamedTuple):
    """A file of the live page, of the documentation, or that the API's own pages load."""

    media_type: str
    etag: str
    raw: bytes
    packed: bytes  # gzip


def files_below(folder: Traversable, prefix: str = "") -> Iterator[tuple[str, ServedFile]]:
    """Yield all files of `folder` that are served, with their paths below it; `name.gz` stands for
    the file `name`.
    """
    for entry in folder.iterdir():
        name = f"{prefix}{entry.name.removesuffix('.gz')}"
        if entry.is_dir():
            yield from files_below(entry, f"{name}/")
        elif (media_type := PAGE_TYPES.get(name[name.rfind(".") :])) is not None:
            stored = entry.read_bytes()
            raw = gzip.decompress(stored) if entry.name.endswith(".gz") else stored
            yield name, packed(media_type, raw)


def packed(media_type: str, raw: bytes) -> ServedFile:
    etag = f'"{hashlib.sha256(raw).hexdigest()[:32]}"'
    return ServedFile(media_type, etag, raw, gzip.compress(raw, mtime=0))


#: Held while the documentation is read: requests that come together read it once.
_READING = Lock()


@lru_cache(maxsize=1)
def _site_files(site: Path, built: int) -> dict[str, ServedFile]:
    return dict(files_below(site))


def site_files() -> dict[str, ServedFile]:
    """Return all files of the documentation by path, as last built; none: it is not built."""
    try:
        with _READING:
            return _site_files(SITE, (SITE / "index.html").stat().st_mtime_ns)
    except OSError:  # also while it is being built
        return {}


def send_file(
    request: JsonRequest, found: ServedFile | None, headers: dict[str, str], missing: MidstreamError
) -> Response[bytes]:
    """Send the file `found`, packed where the client accepts that, or raise `missing`."""
    if found is None:
        raise missing
    headers = {**headers, "ETag": found.etag}
    if request.headers.get("if-none-match") == found.etag:
        return Response(b"", status_code=304, headers=headers, media_type=found.media_type)
    if "gzip" in request.headers.get("accept-encoding", ""):
        headers["Content-Encoding"] = "gzip"
        return Response(found.packed, headers=headers, media_type=found.media_type)
    return Response(found.raw, headers=headers, media_type=found.media_type)


@cache
def _assets() -> dict[str, ServedFile]:
    folder = resources.files(__package__.rpartition(".")[0])
    return dict(files_below(folder.joinpath("assets")))


@get("/schema/assets/{name:str}", opt=needs(None), include_in_schema=False, sync_to_thread=True)
def asset(request: JsonRequest, name: Annotated[str, PathParameter()]) -> Response[bytes]:
    missing = MidstreamError(
        "not_found", f"unknown asset {name!r}", allowed=", ".join(sorted(_assets()))
    )
    return send_file(request, _assets().get(name), ASSET_HEADERS, missing)


@get("/docs", opt=needs(None), include_in_schema=False)
async def docs() -> Redirect:
    return Redirect(SITE_INDEX)


@get("/docs/{path:path}", opt=needs(None), include_in_schema=False, sync_to_thread=True)
def docs_file(request: JsonRequest, path: Annotated[str, PathParameter()]) -> Response[bytes]:
    name = str(path).lstrip("/")
    files = site_files()
    detail = f"the documentation has no page {shortened(name)!r}"
    hint = f"its first page is {SITE_INDEX}"
    if not files:
        detail = "the documentation is not built on this server"
        hint = "run `make docs` in the repository that the API runs from, then reload"
    return send_file(
        request, files.get(name), SITE_HEADERS, MidstreamError("not_found", detail, hint=hint)
    )


def front_links(settings: Settings) -> Response[bytes]:
    """Answer `/` with links as JSON."""
    result = {
        "name": "midstream",
        "version": __version__,
        "links": {name: url for name, (url, _) in links(settings).items()},
    }
    return Response(
        to_json(result), media_type=MediaType.JSON, headers={**HEADERS, "Vary": "Accept"}
    )


def link_list(settings: Settings) -> str:
    """Return the links with their descriptions as HTML."""
    rows = [
        f'<li><a href="{html.escape(url)}">{html.escape(url)}</a>: {html.escape(what)}</li>'
        for url, what in links(settings).values()
    ]
    return f"<ul>{''.join(rows)}</ul>"


def links(settings: Settings) -> dict[str, tuple[str, str]]:
    """Return URL and description of each link by name."""
    result = {"docs": (SITE_INDEX, "the documentation")} if (SITE / "index.html").is_file() else {}
    result |= {
        "schema": ("/schema", "all operations of the API"),
        "swagger": ("/schema/swagger", "the same, with a form to try out calls"),
        "openapi": ("/schema/openapi.json", "the OpenAPI document"),
        "models": ("/v1/models", "the served models"),
        "health": ("/healthz", "this process responds (liveness)"),
        "ready": ("/readyz", "a job would run now (readiness)"),
        "metrics": ("/metrics", "Prometheus metrics"),
    }
    if settings.flower_port:
        host = (
            "127.0.0.1" if settings.flower_host in ("0.0.0.0", "::", "") else settings.flower_host
        )
        host = f"[{host}]" if ":" in host else host
        result["flower"] = (
            f"http://{host}:{settings.flower_port}",
            "the task queue, if Flower is running; the address is valid on the server's machine",
        )
    if settings.grafana_url:
        result["grafana"] = (settings.grafana_url, "dashboards")
    return result


ROUTES: list[Any] = [docs, docs_file, asset]
