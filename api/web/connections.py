"""HTTP connections with deadlines and size limits: uvicorn's protocol waits without limit for a
client to send its request or to read its answer.

A connection that waits for a request, sends its head or body too slowly, or does not read its
answer, or goes on sending the body of a request that has its answer, is closed. Beyond
`max_connections`, a new connection closes the one that has waited longest
for a request; when none waits, only monitoring is answered.
"""

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...schemas.base.errors import STATUS_OF_KIND, MidstreamError
from ...schemas.base.records import to_json
from ...schemas.settings.settings import Settings
from .middleware import MONITORING
from .problems import closing_headers

#: Largest size in bytes of a request line with its headers.
HEAD_LIMIT = 64 * 1024
#: A body may take `body_timeout_s`, and one more second per this many bytes that have arrived.
BODY_BYTES_PER_S = 16 * 1024
#: Seconds that an answer may wait for a client that does not read it. (The kernel buffers a few
#: hundred KiB of it.)
READ_S = 300.0
#: Connections beyond the limit, for monitoring.
SPARE = 32
#: File descriptors that the process needs for other uses: Redis, captures that it sends.
FILES = 256


class Connections:
    """State that the connections of one server share."""

    def __init__(self, settings: Settings):
        self.head_s = settings.tuning.head_timeout_s
        self.body_s = settings.tuning.body_timeout_s
        # bytes of a body that are read where it has its answer, so that the client reads that
        self.most = 2 * max(settings.tuning.max_body_mib, settings.tuning.max_file_mib) << 20
        self.limit = _within_files(settings.tuning.max_connections)
        self.waiting: dict[HttpConnection, None] = {}  # without a request, longest wait first

    def __call__(self, **uvicorn: Any) -> "HttpConnection":
        return HttpConnection(self, **uvicorn)


def _within_files(requested: int) -> int:
    """Raise the soft limit of files, and return the number of connections that this process may
    open.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = requested + SPARE + FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return (
        requested
        if soft == resource.RLIM_INFINITY
        else max(1, min(requested, soft - SPARE - FILES))
    )


class HttpConnection(HttpToolsProtocol):
    """One connection.

    It always waits for one of: a request (`_head` is 0), the rest of a head, the rest of a body, an
    answer.
    """

    def __init__(self, common: Connections, **uvicorn: Any):
        super().__init__(**uvicorn)
        self._common = common
        self._served = self.app
        self._head = 0  # bytes of a head that is not complete
        self._body = -1  # bytes of a body that is not complete; -1: none is awaited
        self._since = 0.0  # when the current wait began
        self._timer: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        self._refused = False

    # --- Opening and closing

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        common = self._common
        if len(self.connections) > common.limit:
            oldest = next(iter(common.waiting), None)
            if oldest is not None:
                del common.waiting[oldest]
                oldest.transport.close()
            elif len(self.connections) > common.limit + SPARE:
                transport.abort()
                return
        common.waiting[self] = None
        self._await(common.head_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._common.waiting.pop(self, None)
        self._stop_timer()
        self._unset_keepalive_if_required()
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self.transport.is_closing() and not self.pipeline:
            self._common.waiting[self] = None

    # --- Data from the client

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        if self._body >= 0:
            self._body += len(data)
            if self._body > self._common.most and self.cycle.response_complete:
                self.transport.close()
                return
        else:
            if self._head == 0:
                self._await(self._common.head_s)
            self._head += len(data)
        super().data_received(data)
        if self._head > HEAD_LIMIT and self._body < 0:
            self._refuse_head()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._timer is None:  # it arrived together with the end of the previous request
            self._head = 1
            self._await(self._common.head_s)

    def on_headers_complete(self) -> None:
        if (
            len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            > HEAD_LIMIT
        ):
            self._refuse_head()
            return
        self._common.waiting.pop(self, None)
        self._head = 0
        self._body = 0
        self._await(self._common.body_s)
        is_full = (
            len(self.connections) > self._common.limit
            and self.url.partition(b"?")[0].decode("latin-1") not in MONITORING
        )
        self.app = _full if is_full else self._served
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            self._body = -1
            self._stop_timer()
            super().on_message_complete()

    # --- Deadlines

    def _await(self, seconds: float) -> None:
        self._stop_timer()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._late)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _late(self) -> None:
        """End the connection, whose deadline has passed. It gets more time if we have paused
        reading, or if so much of a body has arrived that it may take longer.
        """
        awaits_continue = self.cycle is not None and self.cycle.waiting_for_100_continue
        if self.flow.read_paused or awaits_continue:
            self._body = min(self._body, 0)
            self._await(self._common.body_s)
            return
        if self._body > 0:
            end = self._since + self._common.body_s + self._body / BODY_BYTES_PER_S
            remaining = end - self.loop.time()
            if remaining > 0:
                self._timer = self.loop.call_later(remaining, self._late)
                return
        if self._head == 0 and self._body < 0:
            self.transport.close()
            return
        self._refuse(
            "request_timeout",
            "the request did not arrive in time"
            if self._body < 0
            else "the body did not arrive in time",
        )

    def pause_writing(self) -> None:
        super().pause_writing()
        self._unread = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _refuse_head(self) -> None:
        detail = f"the request line and headers are longer than {HEAD_LIMIT} bytes"
        self._refuse("head_too_large", detail)

    def _refuse(self, kind: str, detail: str) -> None:
        """Answer with an error, unless an answer has begun, and close."""
        self._refused = True
        self._stop_timer()
        if self.transport.is_closing():
            return
        if self._body < 0 and self.cycle is not None and not self.cycle.response_complete:
            return self.transport.abort()  # the answer to an earlier request is being sent
        if self._body < 0 or not self.cycle.response_started:
            status, headers, body = _problem(kind, detail)
            lines = [
                f"HTTP/1.1 {status} {kind}".encode(),
                *(name + b": " + value for name, value in headers),
            ]
            self.transport.write(b"\r\n".join([*lines, b"", body]))
        self.transport.close()


def _problem(kind: str, detail: str) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    body = to_json(MidstreamError(kind, detail).problem())
    return STATUS_OF_KIND[kind], closing_headers(body), body


async def _full(scope: Any, receive: Any, send: Any) -> None:
    """ASGI application that answers while there are too many connections."""
    status, headers, body = _problem("overloaded", "too many connections: try again later")
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
