"""Transports of both clients: sending, waiting and computing, blocking or in an event loop."""

import asyncio
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from typing import Any, Protocol, TypeVar

import httpx2

from .wire import HttpCall

T = TypeVar("T")

#: Bytes per chunk of a download.
CHUNK = 1 << 20


class StreamedResponse(Protocol):
    """A response whose body is read as it arrives."""

    response: httpx2.Response

    async def read(self) -> httpx2.Response:
        """Read the whole body, and return the response. Used for error responses."""

    def pieces(self) -> AsyncGenerator[bytes, None]: ...

    def chunks(self) -> AsyncGenerator[bytes, None]: ...


class Transport(Protocol):
    """The side effects that calls need.

    The methods of the blocking transport never suspend.
    """

    url: str
    blocks: bool

    async def send(self, call: HttpCall) -> httpx2.Response:
        """Send a request. Raises httpx2.TransportError."""

    def stream(self, **arguments: Any) -> AbstractAsyncContextManager[StreamedResponse]:
        """Send a request, and read its body as a stream. `arguments`: those of
        `httpx2.Client.stream`.

        Raises httpx2.TransportError, here and while the body is read.
        """

    async def sleep(self, seconds: float) -> None: ...

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that uses files or computes for long; with an event loop, in a thread."""

    def beside(self, coroutine: Coroutine[Any, Any, None]) -> AbstractAsyncContextManager[None]:
        """Run a coroutine for the duration of the context. Its errors are ignored."""


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
        return self._http.request(**call.arguments())

    @asynccontextmanager
    async def stream(self, **arguments: Any) -> AsyncIterator[StreamedResponse]:
        with self._http.stream(**arguments) as response:
            yield _BlockingStream(response)

    async def sleep(self, seconds: float) -> None:
        time.sleep(seconds)  # noqa: ASYNC251 (no event loop runs this)

    async def work(self, function: Callable[..., T], *args: Any) -> T:
        return function(*args)

    @asynccontextmanager
    async def beside(self, coroutine: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
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
        return await self._http.request(**call.arguments())

    @asynccontextmanager
    async def stream(self, **arguments: Any) -> AsyncIterator[StreamedResponse]:
        async with self._http.stream(**arguments) as response:
            yield _AwaitingStream(response)

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


class _BlockingStream:
    def __init__(self, response: httpx2.Response):
        self.response = response

    async def read(self) -> httpx2.Response:
        self.response.read()
        return self.response

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        for piece in self.response.iter_bytes():
            yield piece

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        for chunk in self.response.iter_bytes(CHUNK):
            yield chunk


class _AwaitingStream:
    def __init__(self, response: httpx2.Response):
        self.response = response

    async def read(self) -> httpx2.Response:
        await self.response.aread()
        return self.response

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        async for piece in self.response.aiter_bytes():
            yield piece

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        async for chunk in self.response.aiter_bytes(CHUNK):
            yield chunk
