"""Routes of the page and of its files.

All that it loads is served here, under a CSP without exceptions.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from typing import Annotated, Any

from litestar import Response, get
from litestar.params import PathParameter

from midstream.api.context import AppContext
from midstream.api.routes.pages import (
    PAGE_HEADERS,
    PAGE_TYPES,
    ServedFile,
    files_below,
    front_links,
    packed,
    send_file,
)
from midstream.api.web.auth import needs
from midstream.api.web.body import JsonRequest
from midstream.schemas.base.errors import MidstreamError, shortened
from midstream.schemas.base.records import to_json
from midstream.schemas.jobs.kinds import KINDS
from midstream.schemas.requests.artifact_kinds import ARTIFACTS

#: What the page shows jobs of a kind by; the other fields of a row say where its parts are.
OF_KINDS = ("queue", "grid", "slow")
#: What it lists registered artifacts of a kind by.
OF_ARTIFACTS = ("short", "command", "takes", "of_tenants")


@cache
def page_files() -> dict[str, ServedFile]:
    """Return all files of the page that are served, by path below `assets`; with the kinds of
    jobs and of registered artifacts, as a module that exports what the page needs of a kind.
    """
    rows = (_facts(KINDS, OF_KINDS), _facts(ARTIFACTS, OF_ARTIFACTS))
    script = (
        b"export const KINDS = %b;\nexport const kindOf = (name) => KINDS[name] || {};\n"
        b"export const ARTIFACTS = %b;\n" % rows
    )
    folder = resources.files(__package__).joinpath("assets")
    return {**dict(files_below(folder)), "lib/kinds.js": packed(PAGE_TYPES[".js"], script)}


def _facts(rows: Mapping[str, Any], names: Sequence[str]) -> bytes:
    """Return these fields of each row, as JSON."""
    return to_json(
        {kind: {name: getattr(row, name) for name in names} for kind, row in rows.items()}
    )


def _send(request: JsonRequest, name: str) -> Response[bytes]:
    missing = MidstreamError(
        "not_found", f"the page has no file {shortened(name)!r}", allowed="the files that / loads"
    )
    return send_file(request, page_files().get(name), PAGE_HEADERS, missing)


@get("/page/{path:path}", opt=needs(None), include_in_schema=False, sync_to_thread=True)
def page_asset(request: JsonRequest, path: Annotated[str, PathParameter()]) -> Response[bytes]:
    return _send(request, str(path).lstrip("/"))


@get("/", opt=needs(None), include_in_schema=False, sync_to_thread=True)
def front(request: JsonRequest, context: AppContext) -> Response[bytes]:
    """Answer browsers with the page, other clients with links as JSON."""
    if "text/html" in request.headers.get("accept", ""):
        return _send(request, "index.html")
    return front_links(context.settings)


ROUTES: list[Any] = [front, page_asset]
