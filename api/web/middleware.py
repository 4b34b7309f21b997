"""Middleware of every call: id (`X-Request-ID`), log line, a span for calls that change something,
and an answer when the server stops.

It runs around Litestar, so it also covers calls without a route.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import Iterable
from typing import Any

import anyio
from litestar import Litestar

from ...broker.ledger.jobs.ledger import JobSnapshot
from ...broker.telemetry import logs, metrics, traces
from ...broker.telemetry.traces import TraceSpan
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import now
from . import problems, request_context
from .request_context import TRACED, ApiCall

log = logging.getLogger("midstream.api.access")

RawHeaders = Iterable[tuple[bytes, bytes]]

#: Headers in which a twin names the kind of a refusal, and says that a held response is released,
#: to its process, which counts it.
REFUSED = b"x-midstream-refused"
RELEASED = b"x-midstream-released"
REQUEST_ID = b"x-request-id"
TRACEPARENT = b"traceparent"
CACHE_CONTROL = b"cache-control"
#: Ids that are accepted from callers: short and plain, so that they cannot forge log lines or
#: headers.
_SANE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:+/=-]{0,127}")
#: Paths that monitoring requests every few seconds: logged at level DEBUG, and
#: outside the limits on tenants and connections.
MONITORING = frozenset({"/healthz", "/readyz", "/metrics"})


#: When the server stops, calls still open after that many seconds are answered with 503: Redis may
#: hang. Less than `__main__.GRACE_S`.
STOP_S = 3.0


def released(outcome: JobSnapshot) -> None:
    """Record that a held request is answered now, because its job reached the state that the
    caller waits for.
    """
    view = outcome.view
    call = request_context.current()
    call.released = True
    at = now()
    call.written = outcome.written and outcome.result is not None
    traces.record(
        "release",
        call.span.traceparent,
        view.finished or view.generated or at,
        at,
        job=view.id,
        state=view.state.value,
    )


class App(Litestar):
    """The application with metrics and logs of its calls."""

    access_level = logging.DEBUG  # of a call's log line: INFO if machines read the log
    has_twin = is_twin = False  # whether it hands calls over, or is who answers them

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._open: set[anyio.CancelScope] = set()  # of calls whose answer has not begun
        self._stopping = False

    def stop(self) -> None:
        """Answer calls still open after `STOP_S` with 503; called when the server stops."""

        def end() -> None:
            self._stopping = True
            for waiting in self._open:
                waiting.cancel()

        asyncio.get_running_loop().call_later(STOP_S, end)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        given = {
            name: value.decode("latin-1")
            for name, value in scope["headers"]
            if name in (REQUEST_ID, TRACEPARENT)
        }
        request_id = given.get(REQUEST_ID, "")
        if not _SANE.fullmatch(request_id):
            request_id = secrets.token_hex(16)
        call, traced = _begin(scope["method"], traces.valid(given.get(TRACEPARENT)), request_id)
        call.has_twin = self.has_twin
        status = 0
        waiting = anyio.CancelScope()

        async def answer(message: Any) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                self._open.discard(waiting)
                status = message["status"]
                message["headers"] = [
                    *_with_no_store(message.get("headers", ()), scope),
                    (REQUEST_ID, request_id.encode()),
                ]
                if self.is_twin:
                    message["headers"] += _to_count(call)
                else:
                    _count(call, scope)
            await send(message)

        token = request_context.CURRENT.set(call)
        with logs.bound(request_id=request_id, trace_id=traces.trace_id(call.span.traceparent)):
            try:
                self._open.add(waiting)
                with waiting:
                    if self._stopping:
                        waiting.cancel()
                    await super().__call__(scope, receive, answer)
                if waiting.cancelled_caught and not status:
                    await _stopped(scope["path"], answer)
            finally:
                call.held.close()
                self._open.discard(waiting)
                status = status or 500
                request_context.CURRENT.reset(token)
                if traced:
                    _end(call.span, scope, status)
                level = logging.DEBUG if scope["path"] in MONITORING else self.access_level
                if log.isEnabledFor(level):
                    log.log(
                        level,
                        "%s %s %d",
                        scope["method"],
                        scope["path"],
                        status,
                        extra=_access(scope, status, call),
                    )


def _to_count(call: ApiCall) -> RawHeaders:
    """Return a twin's headers with what its process counts of the call."""
    if call.refused:
        yield REFUSED, call.refused.encode()
    if call.released:
        yield RELEASED, b"true"


def _count(call: ApiCall, scope: Any) -> None:
    """Count the call whose answer begins now."""
    if call.refused:
        metrics.REFUSALS.labels(call.refused).inc()
    if call.released:
        seconds = time.perf_counter() - call.began
        metrics.RELEASE.labels(scope["path_template"]).observe(seconds)


def _with_no_store(headers: RawHeaders, scope: Any) -> RawHeaders:
    """Return an answer's headers, with `no-store` for the page's calls: browsers would otherwise
    write the data to disk.
    """
    caller = scope.get("auth")
    if not isinstance(caller, Caller) or not caller.session:
        return headers
    return [
        *(header for header in headers if header[0].lower() != CACHE_CONTROL),
        (CACHE_CONTROL, b"no-store"),
    ]


async def _stopped(path: str, answer: Any) -> None:
    """Answer a call that was open when the server stopped."""
    error = MidstreamError("unavailable", "the server is stopping")
    problem, more = problems.with_job(error.problem(path))
    body = problems.body_of(problem, path)
    own = [(name.lower().encode(), value.encode()) for name, value in more.items()]
    headers = [*own, *problems.closing_headers(body)]
    await answer({"type": "http.response.start", "status": problem.status, "headers": headers})
    await answer({"type": "http.response.body", "body": body})


def _begin(method: str, parent: str, request_id: str) -> tuple[ApiCall, bool]:
    """Return the call, and whether it is traced here."""
    began = time.perf_counter()
    if not traces.enabled() or not (parent or method in TRACED):
        return ApiCall(TraceSpan(parent), began, method, request_id), False
    span = traces.begin(method, parent, root=True, kind="server", request_id=request_id)
    return ApiCall(span, began, method, request_id), True


def _end(span: TraceSpan, scope: Any, status: int) -> None:
    span.rename(f"{scope['method']} {scope.get('path_template') or scope['path']}")
    span.note(status=status)
    if status >= 500:
        span.fail(str(status))
    span.end()


def _access(scope: Any, status: int, call: ApiCall) -> dict[str, Any]:
    milliseconds = round((time.perf_counter() - call.began) * 1000, 2)
    caller = scope.get("auth")
    return {
        "method": scope["method"],
        "path": scope["path"],
        "status": status,
        "ms": milliseconds,
        "tenant": caller.tenant if isinstance(caller, Caller) else None,
    }
