"""The one place through which changes of what is shared get into the audit log.

A route that changes something states with `audited` what that is, and how it is read. Its state is
read before the handler runs and after; the entry is written before the answer is given. An API with
a writing route for operators that states nothing does not start.
"""

from collections.abc import Awaitable, Callable, Iterable
from typing import Any, NamedTuple

from litestar import Response
from litestar.routes import BaseRoute, HTTPRoute

from ...broker.ledger.people.audit import LedgerAudit
from ...schemas.access.keys import Caller
from .auth import scope_of
from .request_context import TRACED, AnyRequest, current

#: Scopes of operators: what these change concerns others. With `submit`, users change their own.
OF_OPERATORS = frozenset({"admin", "steer-global"})

StateReader = Callable[[AnyRequest], Awaitable[Any]]


class Audited(NamedTuple):
    """What a route changes."""

    what: str  # empty: the path's parameter `kind`
    read: StateReader | None  # None: the answer says what there is after it
    parameter: str = ""  # of the path, that names it


def audited(what: str, read: StateReader | None = None, parameter: str = "") -> dict[str, Audited]:
    """Return the `opt` of a route that changes something."""
    return {"audit": Audited(what, read, parameter)}


async def nothing(request: AnyRequest) -> None:
    """Read nothing: an entry says by whom and when."""


class PendingEntry(NamedTuple):
    """An entry of the call that is being answered."""

    request: AnyRequest
    audited: Audited
    before: Any

    async def write(self, response: Response[Any]) -> None:
        """Append the entry, unless the call was refused."""
        if (response.status_code or 200) >= 400:
            return
        read = self.audited.read
        after = _shown(response.content) if read is None else await read(self.request)
        caller: Caller = self.request.scope["auth"]
        parameters = self.request.path_params
        await LedgerAudit(self.request.app.state.context.ledger).append(
            f"{self.request.method} {self.request.scope['path_template']}",
            self.audited.what or str(parameters["kind"]),
            str(parameters.get(self.audited.parameter, "")) or _name_of(after),
            by=caller.key,
            tenant=caller.tenant,
            before=self.before,
            after=after,
        )


#: Fields of answers that are secrets: the rest of these answers is logged.
SECRET_FIELDS = ("key", "secrets", "secret")


def _shown(content: Any) -> Any:
    """Return an answer without what is secret in it."""
    fields = getattr(content, "__struct_fields__", ())
    return {name: getattr(content, name) for name in fields if name not in SECRET_FIELDS}


def _name_of(state: Any) -> str:
    return str(state.get("id", "")) if isinstance(state, dict) else ""


async def begin(request: AnyRequest) -> None:
    """Read the state that the call will change, if its route states what that is."""
    found: Audited | None = request.route_handler.opt.get("audit")
    if found is not None:
        before = None if found.read is None else await found.read(request)
        current().audit = PendingEntry(request, found, before)


async def end(response: Response[Any]) -> None:
    """Write the call's entry, if it has one."""
    pending: PendingEntry | None = current().audit
    if pending is not None:
        await pending.write(response)


def check_routes(routes: Iterable[BaseRoute]) -> None:
    """Raise ValueError for a route that changes what is shared and states nothing."""
    silent = [
        f"{method} {route.path_format}"
        for route in routes
        if isinstance(route, HTTPRoute)
        for method, (handler, _) in route.route_handler_map.items()
        if method in TRACED and scope_of(handler) in OF_OPERATORS and "audit" not in handler.opt
    ]
    if silent:
        raise ValueError(f"routes without `audited`: {', '.join(silent)}")
