"""Lets each call be written once, as a coroutine, for both clients.

`AsyncClient` awaits it. `Client` runs it to its end without an event loop: over the blocking
transport, a call never suspends.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator
from functools import wraps
from inspect import signature
from types import GenericAlias, MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, get_args, overload

import httpx2

from ...schemas.base.errors import MidstreamError
from . import wire
from .transport import Transport
from .wire import Call

P = ParamSpec("P")
T = TypeVar("T")

#: Seconds for which calls that are safe to repeat are repeated while the server does not answer.
REPEAT_S = 5.0


def finish(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine over the blocking transport; return its result, or raise its error."""
    try:
        coroutine.send(None)
    except StopIteration as done:
        return cast(T, done.value)
    error = RuntimeError("a call of the blocking client suspended: its transport must not")
    coroutine.throw(error)
    raise error


def iterate(items: AsyncGenerator[T, None]) -> Iterator[T]:
    """Yield the items of an asynchronous generator over the blocking transport; closing this
    iterator closes the generator.
    """
    try:
        while True:
            try:
                item = finish(anext(items))
            except StopAsyncIteration:
                return
            except MidstreamError as error:
                raise error.with_traceback(None) from None
            yield item
    finally:
        finish(items.aclose())


class Blocking:
    """Base of the client whose calls block.

    `_awaited`: the same calls as coroutines, over the blocking transport.
    """

    _awaited: Any


class call(Generic[P, T]):
    """A method written as a coroutine: on a `Blocking` client it returns the coroutine's result,
    elsewhere the coroutine.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]):
        @wraps(function)
        def blocking(client: Any, /, *args: P.args, **options: P.kwargs) -> T:
            try:
                return finish(function(client._awaited, *args, **options))
            except MidstreamError as error:  # its traceback ends here, below the caller's line
                raise error.with_traceback(None) from None

        self._awaiting, self._blocking = function, blocking
        self.__doc__ = function.__doc__

    @overload
    def __get__(self, client: None, kind: type[Blocking]) -> Callable[Concatenate[Any, P], T]: ...
    @overload
    def __get__(self, client: Blocking, kind: type[Any]) -> Callable[P, T]: ...
    @overload
    def __get__(self, client: object, kind: type[Any]) -> Callable[P, Coroutine[Any, Any, T]]: ...
    def __get__(self, client: object, kind: type[Any]) -> Any:
        return _bound(client, self._blocking if issubclass(kind, Blocking) else self._awaiting)


class stream(Generic[P, T]):
    """A method written as an asynchronous generator: on a `Blocking` client it returns an iterator
    of the same items.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], AsyncIterator[T]]):
        @wraps(function)
        def blocking(client: Any, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
            return iterate(
                cast(AsyncGenerator[T, None], function(client._awaited, *args, **options))
            )

        request = signature(function)
        (kind,) = get_args(request.return_annotation)
        vars(blocking)["__signature__"] = request.replace(
            return_annotation=GenericAlias(Iterator, kind)
        )
        self._awaiting, self._blocking = function, blocking
        self.__doc__ = function.__doc__

    @overload
    def __get__(
        self, client: None, kind: type[Blocking]
    ) -> Callable[Concatenate[Any, P], Iterator[T]]: ...
    @overload
    def __get__(self, client: Blocking, kind: type[Any]) -> Callable[P, Iterator[T]]: ...
    @overload
    def __get__(self, client: object, kind: type[Any]) -> Callable[P, AsyncGenerator[T, None]]: ...
    def __get__(self, client: object, kind: type[Any]) -> Any:
        return _bound(client, self._blocking if issubclass(kind, Blocking) else self._awaiting)


def _bound(client: object, function: Any) -> Any:
    return function if client is None else MethodType(function, client)


class Calls:
    """Base of each group of calls: sends them to the server."""

    _io: Transport

    async def _send(self, call: Call) -> httpx2.Response:
        """Return the response, regardless of its status. Raises ServerUnreachable."""
        try:
            return await self._io.send(call)
        except httpx2.TransportError as error:
            raise wire.unreachable(self._io.url, error) from None

    async def _ask(self, call: Call, kind: type[T]) -> T:
        """Return the body of a successful response as `kind`; raises what `wire.decode` raises."""
        return wire.decode(await self._send(call), kind)

    async def _do(self, call: Call) -> None:
        """Send a call whose response has no body; raises what `wire.raise_problem` raises."""
        wire.raise_problem(await self._send(call))

    async def _ask_patiently(self, call: Call, kind: type[T]) -> T:
        """Like `_ask`, but repeat the call for `REPEAT_S` while the server does not answer: only
        for calls that are safe to repeat.
        """
        patience = wire.Patience(seconds=REPEAT_S)
        while True:
            try:
                response = await self._send(call)
                if response.status_code not in wire.RETRYABLE:
                    return wire.decode(response, kind)
                wire.raise_problem(response)
            except MidstreamError as error:
                patience.check(error)
                await self._io.sleep(wire.PAUSE_S)
