"""The twin: a second process of the API for calls that take long to decode or to resolve.

Python runs one thread at a time, so beside one that computes, a small call waits for the
interpreter some ten times. The twin runs the same application and gives way to this process. It is
started when a call first needs it, and again after its end, as a fork of a process that imported
everything, has no thread, and only waits.
"""

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any, NoReturn

import httpcore2
from litestar import Response

from ...broker.processes.orphans import die_with_parent
from ...schemas.base.errors import MidstreamError, Translated
from ..web import problems
from ..web.middleware import REFUSED, RELEASED, RawHeaders
from ..web.pace import PACE
from ..web.request_context import AnyRequest, ApiCall, HandedOver, current
from .waiting import ended, left

#: What is added to the niceness of the twin: its calls wait for processors, not those of others.
NICE = 10
BACKLOG = 2048
#: Bytes of a body that are sent to the twin at once.
PIECE = 1 << 16
#: Seconds in which the twin must accept a connection; it answers as late as the call allows.
CONNECT_S = 30.0

#: Header with the proof that a call comes from the twin's own starter.
TOKEN = b"x-midstream-token"
#: Headers of a request that the two processes' own connection sets anew, or that say who calls.
NOT_SENT = frozenset(
    {b"connection", b"content-length", b"expect", b"te", b"traceparent", b"transfer-encoding"}
    | {TOKEN, b"x-forwarded-for", b"x-forwarded-proto", b"x-request-id"}
)
#: Headers of an answer that this process sets anew.
NOT_RETURNED = frozenset(
    {b"connection", b"keep-alive", b"transfer-encoding", b"x-request-id", REFUSED, RELEASED}
)

#: What is raised where the twin has ended, and what its callers read then.
GONE = (httpcore2.NetworkError, httpcore2.ProtocolError, httpcore2.TimeoutException)
ENDED = (
    "the process that resolves large requests ended while it had this one, which may have been "
    "accepted: repeat the call, with the same Idempotency-Key if it has one"
)

#: Serves the application on a listening socket, for callers that know the token.
Serve = Callable[[socket.socket, str], None]


class Twin:
    """The twin of this process. Belongs to one event loop; made before there is any thread."""

    def __init__(self, serve: Serve) -> None:
        self._token = secrets.token_hex(16)
        self._orders, theirs = socket.socketpair()
        own = os.getpid()
        if os.fork() == 0:
            self._orders.close()
            _fork_when_asked(theirs, own, lambda listening: serve(listening, self._token))
        theirs.close()
        self._pid = 0
        self._url = ""
        # a connection for each call: one that was kept could be that of a twin that has ended
        self._pool = httpcore2.AsyncConnectionPool(
            max_connections=None, max_keepalive_connections=0
        )

    async def close(self) -> None:
        await self._pool.aclose()
        self._orders.close()  # the process that forks ends, and its forks with it

    def stop(self) -> None:
        """Have the twin answer held responses, as this process does when it stops."""
        if self._pid:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGTERM)

    async def answer(self, scope: Any, call: ApiCall, send: Any) -> None:
        """Answer a call with what the twin answers.

        Raises `unavailable` if the twin ends before its answer begins.
        """
        with Translated(GONE, lambda error: MidstreamError("unavailable", ENDED)):
            response = await self._asked(scope, call)
        try:
            said = dict(response.headers)
            call.refused = said.get(REFUSED, b"").decode()
            call.released = RELEASED in said
            headers = [
                (name, value)
                for name, value in response.headers
                if name.lower() not in NOT_RETURNED
            ]
            await send(
                {"type": "http.response.start", "status": response.status, "headers": headers}
            )
            async for piece in response.aiter_stream():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    async def _asked(self, scope: Any, call: ApiCall) -> httpcore2.Response:
        """Send the call to the twin, which is started if it does not run."""
        body = call.received
        call.received = ()
        headers = [
            *_sent(scope, call),
            (b"content-length", str(sum(map(len, body))).encode()),
            (TOKEN, self._token.encode()),
        ]
        path = scope["raw_path"]
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        for again in (True, False):
            if not self._url:
                self._start()
            url = self._url
            try:
                return await self._pool.handle_async_request(
                    httpcore2.Request(
                        scope["method"],
                        url.encode() + path,
                        headers=headers,
                        content=_in_pieces(body),
                        extensions={"timeout": {"connect": CONNECT_S}},
                    )
                )
            except httpcore2.ConnectError:  # nothing was sent
                if self._url == url:  # else another call has started the next twin
                    self._url = ""
                if not again:
                    raise
        raise AssertionError("the second attempt returned or raised")

    def _start(self) -> None:
        """Have a twin forked. It listens at once, and accepts as soon as it serves."""
        with socket.create_server(("127.0.0.1", 0), backlog=BACKLOG) as listening:
            try:
                socket.send_fds(self._orders, [b"\0"], [listening.fileno()])
                self._pid = int.from_bytes(self._orders.recv(8), "big")
            except OSError as error:
                raise MidstreamError(
                    "unavailable", f"cannot start a process for large requests: {error.strerror}"
                ) from error
            self._url = f"http://127.0.0.1:{listening.getsockname()[1]}"


def _sent(scope: Any, call: ApiCall) -> RawHeaders:
    """Return the headers of a call, with what this process found out about it."""
    yield from ((name, value) for name, value in scope["headers"] if name not in NOT_SENT)
    yield b"x-request-id", call.request_id.encode()
    yield b"x-forwarded-proto", scope["scheme"].encode()
    if scope["client"]:
        yield b"x-forwarded-for", str(scope["client"][0]).encode()
    if call.span.traceparent:
        yield b"traceparent", call.span.traceparent.encode()


async def _in_pieces(body: Sequence[bytes]) -> AsyncIterator[bytes]:
    """Yield a body at its pace, such that each piece is sent in a moment."""
    for received in body:
        for start in range(0, len(received), PIECE):
            piece = received[start : start + PIECE]
            await PACE.wait(len(piece))
            yield piece


def _fork_when_asked(
    orders: socket.socket, parent: int, serve: Callable[[socket.socket], None]
) -> NoReturn:
    """For each listening socket that arrives, fork a process that serves on it, and return its pid.

    Ends with the process that asks.
    """
    # a stop is for that process, which stops its twin and ends this one
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    die_with_parent(parent)
    own = os.getpid()
    while True:
        _, (*sockets,), _, _ = socket.recv_fds(orders, 1, 1)
        if not sockets:
            os._exit(0)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        child = os.fork()
        if child == 0:
            _be_the_twin(orders, own, sockets[0], serve)
        os.close(sockets[0])
        orders.send(child.to_bytes(8, "big"))


def _be_the_twin(
    orders: socket.socket, parent: int, listening: int, serve: Callable[[socket.socket], None]
) -> NoReturn:
    status = 1
    try:
        orders.close()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent)
        os.nice(NICE)
        serve(socket.socket(fileno=listening))
        status = 0
    finally:
        os._exit(status)


class TwinAnswer(Response[bytes]):
    """The twin's answer to the current call."""

    def __init__(self, twin: Twin, request: AnyRequest) -> None:
        super().__init__(b"")
        self._twin = twin
        self._request = request

    def to_asgi_response(self, *_: Any, **__: Any) -> Any:
        return self._answer

    async def _answer(self, scope: Any, receive: Any, send: Any) -> None:
        answering = asyncio.ensure_future(self._twin.answer(scope, current(), send))
        leaving = asyncio.ensure_future(left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if answering.done():
                answering.result()
        except MidstreamError as error:
            answer = problems.on_midstream_error(self._request, error)
            await answer.to_asgi_response(app=None, request=self._request)(scope, receive, send)
        finally:
            await ended(answering, leaving)


def hand_over(request: AnyRequest, error: HandedOver) -> Response[bytes]:
    return TwinAnswer(request.app.state.context.twin, request)


def only_for(token: str, app: Any) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """Return the application for calls with the token; others are answered 404."""
    expected = (TOKEN, token.encode())

    async def called(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and expected not in scope["headers"]:
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            await app(scope, receive, send)

    return called
