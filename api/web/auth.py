"""Authentication and authorization. Every request passes `authorize` before its body is read.

A route handler states the scope that it requires (`needs`); one without a scope is for admins only.
Data of another tenant is answered like data that does not exist: handlers call `seen` for jobs, and
look up names within the caller's tenant.
"""

import hmac
import time
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from litestar.connection import ASGIConnection
from litestar.handlers.base import BaseRouteHandler
from litestar.routes import HTTPRoute

from ...broker.ledger.jobs.ledger import not_found
from ...broker.ledger.people import keys
from ...broker.ledger.people.keys import LedgerKeys
from ...broker.ledger.people.sessions import Sessions, name_of
from ...broker.processes.hosts import SAFE, Hosts
from ...schemas.access.keys import EVERYBODY, KEY_PREFIX, Caller, Scope, StoredKey
from ...schemas.access.sessions import Session
from ...schemas.base.errors import MidstreamError, invalid, suggestion
from ...schemas.base.recent import Recent
from ...schemas.jobs.jobs import JobView
from ...schemas.settings.settings import Settings, asks_for_keys
from .middleware import MONITORING
from .wrong_keys import WrongKeys

Connection = ASGIConnection[Any, Any, Any, Any]

#: Seconds for which a process caches a key: after that, a revoked key is rejected everywhere.
KNOWN_S = 3.0
#: Key ids that a process caches, including unknown ones; the least recently used are dropped.
REMEMBERED = 10_000

#: Cookie of the page's session, and header that its calls must carry if they change something.
COOKIE = "midstream_session"
CSRF_HEADER = "x-midstream-csrf"

#: Beginnings of the paths of pages and their files: a query there is for their scripts, such as the
#: search of the documentation.
PAGES = ("/docs", "/page/", "/schema")

#: What the header `Authorization` takes, and where keys come from.
KEY_FORM = f"Bearer {KEY_PREFIX}<id>_<secret>"
HOW = "an operator creates keys with `midstream create key`; the client reads MIDSTREAM_API_KEY"


def needs(scope: Scope | None) -> dict[str, Any]:
    """Return the `opt` of a route handler that requires `scope`; None: no authentication."""
    return {"scope": scope}


def scope_of(handler: BaseRouteHandler) -> Scope | None:
    """Return the scope that a route handler requires: admin, unless it states another."""
    scope: Scope | None = handler.opt.get("scope", "admin")
    return scope


class SessionVisit(NamedTuple):
    """A call that came with a session's cookie."""

    caller: Caller
    session: Session
    key: StoredKey


class Gate:
    """Turns a request's credentials into a `Caller`.

    One per process: it caches keys for `KNOWN_S`.
    """

    def __init__(self, settings: Settings, stored: LedgerKeys, sessions: Sessions) -> None:
        self.asks = asks_for_keys(settings)
        self.always = keys.of_settings(settings)  # by id: these cannot be revoked
        self._stored = stored
        # id → (end of caching, the key)
        self._known = Recent[str, tuple[float, StoredKey | None]](REMEMBERED)
        self._sessions = sessions
        self.wrong = WrongKeys()

    async def caller(self, headers: list[str], address: str) -> Caller:
        """Return the caller that the `Authorization` headers identify.

        `address`: the caller's network address.

        Raises `unauthorized`, `rate_limited` after many wrong keys, and `unavailable` if the key
        cannot be checked.

        If authentication is off, a valid key still identifies its caller, and anything else the
        default caller: OpenAI's clients always send a key.
        """
        if not headers:
            if self.asks:
                raise _unauthorized("no API key given")
            return EVERYBODY
        key = await self._key(headers[0]) if len(headers) == 1 else None
        if key is not None:
            return Caller(key.tenant, key.id, frozenset(key.scopes))
        if self.asks:
            self.wrong.count(address)
            raise _unauthorized("the API key is not valid")
        return EVERYBODY

    async def _key(self, header: str) -> StoredKey | None:
        scheme, _, text = header.partition(" ")
        return await self.key(text.strip(" ")) if scheme.lower() == "bearer" else None

    async def key(self, text: str) -> StoredKey | None:
        """Return the key if it is valid. The work is the same whether its id exists or not."""
        shown = keys.parse(text)
        if shown is None:
            return None
        key = await self._looked_up(shown.id)
        return key if keys.is_right(shown, key) else None

    async def visit(self, session_id: str) -> SessionVisit | None:
        """Return the visit of a session; None if the session, or the key that opened it, has
        ended.
        """
        name = name_of(session_id)
        session = None if name is None else await self._sessions.get(name)
        if name is None or session is None:
            return None
        key = await self._looked_up(session.key)
        if not keys.is_right(keys.PresentedKey(session.key, session.sha256), key):
            return None
        assert key is not None
        return SessionVisit(Caller(key.tenant, key.id, frozenset(key.scopes), name), session, key)

    async def _looked_up(self, key_id: str) -> StoredKey | None:
        if (always := self.always.get(key_id)) is not None:
            return always
        at = time.monotonic()
        until, key = self._known.get(key_id, (0.0, None))
        if at < until:
            return key
        try:
            key = await self._stored.get(key_id)
        except MidstreamError as error:
            # While Redis is unreachable, no key can be revoked either.
            if error.kind != "unavailable" or key is None:
                raise
        self._known[key_id] = at + KNOWN_S, key
        return key


def _unauthorized(detail: str) -> MidstreamError:
    return MidstreamError("unauthorized", detail, field="Authorization", allowed=KEY_FORM, hint=HOW)


async def well_called(connection: Connection, handler: BaseRouteHandler) -> None:
    """Check `Host` and `Origin`, before `authorize`. Raises `misdirected`, `cross_site`."""
    hosts: Hosts = connection.app.state.context.hosts
    headers = connection.headers
    hosts.check(
        connection.scope["method"],  # type: ignore[typeddict-item]
        headers.getall("host", []),
        headers.getall("origin", []),
    )


async def known_query(connection: Connection, handler: BaseRouteHandler) -> None:
    """Check the names of the query's parameters. Raises a 400 that names the nearest valid one.

    Those of monitoring are ignored: load balancers and scrapers add their own; so are those of a
    handler with the `opt` `any_query`.
    """
    path = connection.scope["path_template"]
    method = connection.scope["method"]  # type: ignore[typeddict-item]
    unread = path == "/" or path.startswith(PAGES) or path in MONITORING
    unread = unread or "any_query" in handler.opt
    if not connection.query_params or method == "OPTIONS" or unread:
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


async def authorize(connection: Connection, handler: BaseRouteHandler) -> None:
    """Check the caller's scope, on all routes.

    Raises `unauthorized`, `forbidden`, and what `OpenCalls.enter` raises.
    """
    scope = scope_of(handler)
    if scope is None or connection.scope["method"] == "OPTIONS":  # type: ignore[typeddict-item]
        return
    caller = await _caller(connection)
    if (by_path := handler.opt.get("scope_of")) is not None:
        scope = by_path(connection.path_params)
    if not caller.may(scope):
        has = ", ".join(sorted(caller.scopes))
        raise MidstreamError(
            "forbidden",
            f"scope {scope!r} is required; the key has {has}",
            allowed=f"a key with scope {scope}",
            hint=handler.opt.get("without_scope"),
        )
    connection.scope["auth"] = caller
    if connection.scope["path"] not in MONITORING:
        # monitoring of the service is never limited
        connection.app.state.context.open_calls.enter(
            caller.tenant, bool(handler.opt.get("events"))
        )


async def _caller(connection: Connection) -> Caller:
    gate: Gate = connection.app.state.context.gate
    headers = connection.headers.getall("authorization", [])
    if not headers and COOKIE in connection.cookies:
        visit = await visit_of(connection)
        if visit is not None:
            return visit.caller
        if gate.asks:
            raise MidstreamError(
                "unauthorized", "the session has ended", field=COOKIE, hint="log in again"
            )
    return await gate.caller(headers, address_of(connection))


def address_of(connection: Connection) -> str:
    """Return the caller's address, as a trusted proxy reports it; empty for a Unix socket."""
    return connection.client.host if connection.client else ""


async def visit_of(connection: Connection) -> SessionVisit | None:
    """Return the visit of the call's cookie, if any.

    Raises `cross_site` for a call that this API's page did not send.
    """
    gate: Gate = connection.app.state.context.gate
    visit = await gate.visit(connection.cookies.get(COOKIE, ""))
    if visit is not None:
        safe = connection.scope["method"] in SAFE  # type: ignore[typeddict-item]
        if not own_page(connection, safe):
            raise MidstreamError(
                "cross_site",
                "the page of another site sent this request",
                field="Origin",
                allowed="this API's own page",
            )
        if not safe and not hmac.compare_digest(
            connection.headers.get(CSRF_HEADER, "").encode(), visit.session.csrf.encode()
        ):
            raise MidstreamError(
                "cross_site",
                "is not that of the session",
                field=CSRF_HEADER,
                allowed="`csrf` of GET /session",
            )
    return visit


def own_page(connection: Connection, safe: bool = False) -> bool:
    """Return whether the browser reports that a page of this API sent the call; a `safe` call
    passes unless it reports another page.

    A cookie belongs to a host with all its ports, so a page at another port of this machine would
    send it too.
    """
    site = connection.headers.get("sec-fetch-site")
    origin = connection.headers.get("origin")
    if site is not None:
        return site == "same-origin" or (safe and site == "none")
    if origin is None:
        return safe
    public = connection.app.state.context.settings.public_url
    return urlsplit(origin).netloc in {
        connection.headers.get("host", ""),
        urlsplit(public).netloc,
    } - {""}


def caller_of(request: Connection) -> Caller:
    """Return the caller that `authorize` has identified."""
    caller: Caller = request.scope["auth"]
    return caller


async def may_observe(request: Connection) -> bool:
    """Return whether the caller of an unauthenticated route has scope `observe`."""
    try:
        return (await _caller(request)).may("observe")
    except MidstreamError:
        return False


def seen(caller: Caller, view: JobView) -> JobView:
    """Return the view. Raises `not_found` for a job of another tenant, as if it did not exist."""
    if not caller.sees(view.tenant):
        raise not_found(view.id)
    return view


def tenant_asked(caller: Caller, tenant: str | None) -> str | None:
    """Return the tenant whose data is listed; None for all.

    Raises `forbidden` for a tenant other than the caller's own.
    """
    if "admin" in caller.scopes:
        return tenant
    if tenant not in (None, caller.tenant):
        raise MidstreamError(
            "forbidden",
            "another tenant's data requires scope admin",
            field="tenant",
            allowed="a key with scope admin",
        )
    return caller.tenant
