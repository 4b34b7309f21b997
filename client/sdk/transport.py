"""Transports of both clients: sending, waiting and computing, blocking or in an event loop.

Both have the same methods; those of the blocking transport never suspend.
"""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import httpx2

from ...schemas.base.errors import MidstreamError
from .wire import HttpCall

T = TypeVar("T")
H = TypeVar("H", httpx2.Client, httpx2.AsyncClient)


def _opened(http: H) -> H:
    """Return a client that can send. Raises MidstreamError for one that was closed."""
    if http.is_closed:
        hint = "make a new one: Client(), AsyncClient()"
        raise MidstreamError("conflict", "this client is closed", hint=hint)
    return http


class BlockingTransport:
    """Transport of `Client`; may be used by several threads."""

    blocks = True

    def __init__(self, url: str, headers: dict[str, str]):
        self.url = url
        self._http = httpx2.Client(
            base_url=url, headers=headers, limits=httpx2.Limits(max_connections=256)
        )

    def close(self) -> None:
        self._http.close()

    async def send(self, call: HttpCall) -> httpx2.Response:
        """Send a request. Raises httpx2.TransportError, MidstreamError for a closed client."""
        return _opened(self._http).request(**call.arguments())

    @asynccontextmanager
    async def stream(self, **arguments: Any) -> AsyncIterator[httpx2.Response]:
        """Send a request, and yield the response, whose body `chunks` reads; that of an error is
        read whole. `arguments`: those of `httpx2.Client.stream`.

        Raises httpx2.TransportError, here and while the body is read, and as `send`.
        """
        with _opened(self._http).stream(**arguments) as response:
            if response.is_error:
                response.read()
            yield response

    async def chunks(self, response: httpx2.Response, size: int) -> AsyncGenerator[bytes, None]:
        """Yield the body in chunks of `size` bytes."""
        for chunk in response.iter_bytes(size):
            yield chunk

    async def events(
        self, response: httpx2.Response
    ) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        """Yield the server-sent events of the body, as large as they are."""
        for sent in httpx2.EventSource(response, max_event_size=None):
            yield sent

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (no event loop runs this)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that uses files or computes for long; with an event loop, in a thread."""
        return function(*args)

    @asynccontextmanager
    async def beside(self, coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        """Run a coroutine for the duration of the context. Its errors are ignored."""

        def run() -> None:
            with suppress(Exception):  # including the error of a client that was closed
                coroutine.send(None)

        threading.Thread(target=run, daemon=True).start()
        yield


class AwaitingTransport:
    """Transport of `AsyncClient`; belongs to one event loop."""

    blocks = False

    def __init__(self, url: str, headers: dict[str, str]):
        self.url = url
        limits = httpx2.Limits(max_connections=4096, max_keepalive_connections=256)
        self._http = httpx2.AsyncClient(base_url=url, headers=headers, limits=limits)

    async def close(self) -> None:
        await self._http.aclose()

    async def send(self, call: HttpCall) -> httpx2.Response:
        return await _opened(self._http).request(**call.arguments())

    @asynccontextmanager
    async def stream(self, **arguments: Any) -> AsyncIterator[httpx2.Response]:
        async with _opened(self._http).stream(**arguments) as response:
            if response.is_error:
                await response.aread()
            yield response

    async def chunks(self, response: httpx2.Response, size: int) -> AsyncGenerator[bytes, None]:
        async for chunk in response.aiter_bytes(size):
            yield chunk

    async def events(
        self, response: httpx2.Response
    ) -> AsyncGenerator[httpx2.ServerSentEvent, None]:
        async for sent in httpx2.EventSource(response, max_event_size=None):
            yield sent

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        return await asyncio.to_thread(function, *args)

    @asynccontextmanager
    async def beside(self, coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
        task = asyncio.create_task(coroutine)
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


Transport: TypeAlias = BlockingTransport | AwaitingTransport
