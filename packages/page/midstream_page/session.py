"""Routes of the page's session: login with an API key, who is logged in, logout.

The key is sent in the body of one request; it is in no URL, and the browser does not store it.
"""

from typing import Any

import msgspec
from litestar import Response, delete, get, post
from litestar.datastructures import Cookie
from litestar.params import JSONBody

from midstream.api.context import AppContext
from midstream.api.routes.pages import links
from midstream.api.web.auth import COOKIE, SessionVisit, address_of, needs, own_page, visit_of
from midstream.api.web.body import JsonRequest
from midstream.schemas.access.keys import EVERYBODY
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.version import __version__

from .records import SessionRequest, SessionView

#: Bytes of a login's body: a key and little else.
MAX_BODY = 4096
NO_STORE = {"Cache-Control": "no-store"}


@get("/session", opt=needs(None), include_in_schema=False)
async def get_session(request: JsonRequest, context: AppContext) -> Response[SessionView]:
    return Response(_view(context, await visit_of(request)), headers=NO_STORE)


@post(
    "/session",
    opt=needs(None),
    status_code=200,
    include_in_schema=False,
    request_max_body_size=MAX_BODY,
)
async def log_in(
    data: JSONBody[SessionRequest], request: JsonRequest, context: AppContext
) -> Response[SessionView]:
    if {"sec-fetch-site", "origin"} & request.headers.keys() and not own_page(request):
        raise MidstreamError(
            "cross_site",
            "the page of another site sent this request",
            field="Origin",
            allowed="this API's own page",
        )
    key = await context.gate.key(data.key.strip())
    if key is None:
        context.gate.wrong.count(address_of(request))
        raise MidstreamError(
            "unauthorized",
            "the key is not valid, or has been revoked",
            field="key",
            allowed="an API key: ms_<id>_<secret>",
        )
    made = await context.sessions.create(key)
    visit = await context.gate.visit(made.id)
    if visit is None:
        raise MidstreamError("unauthorized", "the key has just been revoked", field="key")
    cookie = Cookie(
        COOKIE,
        value=made.id,
        path="/",
        httponly=True,
        samesite="strict",
        secure=_secure(request, context),
        max_age=max(1, int(made.session.expires - made.session.created)),
    )
    return Response(_view(context, visit), cookies=[cookie], headers=NO_STORE)


@delete("/session", opt=needs(None), include_in_schema=False)
async def log_out(request: JsonRequest, context: AppContext) -> Response[None]:
    """End the session and its open streams."""
    if (visit := await visit_of(request)) is not None:
        await context.sessions.end(visit.caller.session, visit.session.key)
        context.key_watch.end(visit.caller.session)
    cookie = Cookie(
        COOKIE,
        value="",
        path="/",
        httponly=True,
        samesite="strict",
        secure=_secure(request, context),
        max_age=0,
    )
    return Response(None, status_code=204, cookies=[cookie], headers=NO_STORE)


def _secure(request: JsonRequest, context: AppContext) -> bool:
    return request.url.scheme == "https" or context.settings.public_url.startswith("https:")


def _view(context: AppContext, visit: SessionVisit | None) -> SessionView:
    needs_key = context.gate.asks
    view = SessionView(
        version=__version__,
        auth="keys" if needs_key else "open",
        signed_in=visit is not None or not needs_key,
        links={name: url for name, (url, _) in links(context.settings).items()},
    )
    if visit is not None:
        return msgspec.structs.replace(
            view,
            csrf=visit.session.csrf,
            tenant=visit.caller.tenant,
            key=visit.key.id,
            key_name=visit.key.name,
            scopes=visit.key.scopes,
            expires=visit.session.expires,
        )
    return (
        view
        if needs_key
        else msgspec.structs.replace(view, tenant=EVERYBODY.tenant, scopes=sorted(EVERYBODY.scopes))
    )


ROUTES: list[Any] = [get_session, log_in, log_out]
