"""What is told of every call? Its id (`X-Request-ID`), one line in the log, and for calls that change something a span of its own.

Outside of Litestar, so that calls which find no route are told of as well.
"""

import logging
import re
import secrets
import time
from contextvars import ContextVar
from typing import Any, NamedTuple

from litestar import Litestar, Request

from ..broker import logs, metrics, traces
from ..broker.traces import Span
from ..schemas.base import now
from ..schemas.jobs import JobView
from ..schemas.keys import Caller

log = logging.getLogger("midstream.api.access")

REQUEST_ID, TRACEPARENT = b"x-request-id", b"traceparent"
#: An id that a caller gives is taken if it is short and plain, so that it cannot forge lines or headers.
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/=-]{0,127}")
#: Asked every few seconds by machines: a line for each would hide the others.
QUIET = frozenset({"/healthz", "/readyz", "/metrics"})
#: These change something: their answers are promises, and they are traced; of the others those whose caller traces them.
TRACED = frozenset({"POST", "PUT", "DELETE", "PATCH"})


class Call(NamedTuple):
    """The call that is being answered."""

    span: Span
    began: float  # as `time.perf_counter` has it
    method: str


_current: ContextVar[Call | None] = ContextVar("midstream_call", default=None)


def traceparent() -> str:
    """For what this call begins; empty when nobody traces it."""
    call = _current.get()
    return call.span.traceparent if call is not None else ""


def changes_something() -> bool:
    """Whether the call that is being answered may have accepted or changed anything."""
    call = _current.get()
    return call is not None and call.method in TRACED


def released(request: Request[Any, Any, Any], view: JobView) -> None:
    """A response that was held is answered now: the job has come as far as its caller wanted."""
    call = _current.get()
    if call is not None:
        metrics.RELEASE.labels(request.scope["path_template"]).observe(time.perf_counter() - call.began)
        at = now()
        traces.record("release", call.span.traceparent, view.finished or view.generated or at, at, job=view.id, state=view.state.value)


class App(Litestar):
    """The application, and what is told of its calls."""

    access_level = logging.DEBUG  # of the line about a call: INFO where lines are read by machines

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        given = {name: value.decode("latin-1") for name, value in scope["headers"] if name in (REQUEST_ID, TRACEPARENT)}
        request_id = given.get(REQUEST_ID, "")
        if not _SANE.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        call, traced = _begin(scope["method"], traces.valid(given.get(TRACEPARENT)), request_id)
        status = 500

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (REQUEST_ID, request_id.encode())]
            await send(message)

        token = _current.set(call)
        with logs.bound(request_id=request_id, trace_id=traces.trace_id(call.span.traceparent)):
            try:
                await super().__call__(scope, receive, answer)
            finally:
                _current.reset(token)
                if traced:
                    _end(call.span, scope, status)
                level = logging.DEBUG if scope["path"] in QUIET else self.access_level
                if log.isEnabledFor(level):
                    log.log(level, "%s %s %d", scope["method"], scope["path"], status, extra=_access(scope, status, call))


def _begin(method: str, parent: str, request_id: str) -> tuple[Call, bool]:
    """And whether the call is traced here."""
    began = time.perf_counter()
    if not traces.enabled() or not (parent or method in TRACED):
        return Call(Span(parent), began, method), False
    return Call(traces.begin(method, parent, root=True, kind="server", request_id=request_id), began, method), True


def _end(span: Span, scope: Any, status: int) -> None:
    span.rename(f"{scope['method']} {scope.get('path_template') or scope['path']}")
    span.note(status=status)
    if status >= 500:
        span.fail(str(status))
    span.end()


def _access(scope: Any, status: int, call: Call) -> dict[str, Any]:
    milliseconds = round((time.perf_counter() - call.began) * 1000, 2)
    caller = scope.get("auth")
    tenant = caller.tenant if isinstance(caller, Caller) else None
    return {"method": scope["method"], "path": scope["path"], "status": status, "ms": milliseconds, "tenant": tenant}
