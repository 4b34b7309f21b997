"""Lets each call be written once, as a coroutine, for both clients.

`AsyncClient` awaits it. `Client` runs it to its end without an event loop: over the blocking
transport, a call never suspends.
"""

from __future__ import annotations

import re
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
    Collection,
    Coroutine,
    Iterable,
    Iterator,
)
from contextlib import aclosing
from functools import cached_property, wraps
from inspect import Parameter, Signature, signature, unwrap
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, cast, overload

import httpx2

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.jobs.jobs import JobView
from ...schemas.packages import part
from .. import values
from . import wire
from .transport import Transport
from .wire import HttpCall

P = ParamSpec("P")
T = TypeVar("T")
M = TypeVar("M")
#: What a function returns in `Client`, and in `AsyncClient`.
R = TypeVar("R")
A = TypeVar("A")

#: Seconds for which calls that are safe to repeat are repeated while the server does not answer.
REPEAT_S = 5.0
_UNPACKED = re.compile(r"Unpack\[(\w+)\]")


class Blocks:
    """Type argument of the calls of `Client`."""


class Awaits:
    """Type argument of the calls of `AsyncClient`."""


class Blocking:
    """Base of other classes whose calls block. `_awaited`: an object with these as coroutines."""

    _blocking = True
    _awaited: Any


# A coroutine needs a loop only when it suspends. A loop in a background thread would have trouble
# inside a running loop (a notebook's cell), in threads and with Ctrl-C.
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


class Calls(Generic[M]):
    """Base of each group of calls: sends them to the server. `Calls[Blocks]` blocks, and
    `Calls[Awaits]` returns coroutines.
    """

    _blocking = False

    def __init__(self, io: Transport, blocking: bool = False):
        self._io = io
        self._blocking = blocking

    def __repr__(self) -> str:
        names = [name for name in dir(self) if not name.startswith("_")]
        return f"<{type(self).__name__}: {', '.join(names)}>"

    @property
    def _awaited(self) -> Any:
        """The same calls as coroutines, over the same transport."""
        return type(self)(self._io)

    async def _send(self, call: HttpCall) -> httpx2.Response:
        """Return the response, regardless of its status. Raises ServerUnreachable."""
        with Translated(
            httpx2.TransportError,
            lambda error: wire.unreachable(self._io.url, error),
            hidden=True,
        ):
            return await self._io.send(call)

    async def _ask(self, call: HttpCall, kind: type[T]) -> T:
        """Return the body of a successful response as `kind`; raises what `wire.decode` raises."""
        return wire.decode(await self._send(call), kind)

    async def _get(self, path: str, kind: type[T], **params: Any) -> T:
        """Return what a path has, as `_ask` does. `params`: of the query, without those that are
        None.
        """
        return await self._ask(HttpCall("GET", path, params=values.given(**params)), kind)

    async def _do(self, call: HttpCall) -> None:
        """Send a call whose response has no body; raises what `wire.raise_problem` raises."""
        wire.raise_problem(await self._send(call))

    async def _models(self) -> list[str]:
        return [entry["id"] for entry in (await self._get("/v1/models", dict[str, Any]))["data"]]

    async def _body(
        self,
        request: T | None,
        fields: dict[str, Any],
        kind: type[T],
        build: Callable[[T | None, dict[str, Any], type[T]], T] = values.request,
    ) -> T:
        """Build a request body as `values.request` does. One that names no model gets the only
        served one; raises MidstreamError if there are none or several.
        """
        try:
            return build(request, fields, kind)
        except MidstreamError as error:
            if request is not None or fields.get("model") is not None or error.field != "model":
                raise
            model = wire.only_model(await self._models())
            return build(None, {**fields, "model": model}, kind)

    async def _submit(self, path: str, body: Any, key: str | None) -> JobView:
        """Submit a job, and return it without waiting. Arguments as for `wire.submission`."""
        return await self._ask_patiently(wire.submission(path, body, key), JobView)

    async def _ask_patiently(self, call: HttpCall, kind: type[T], seconds: float = REPEAT_S) -> T:
        """Like `_ask`, but repeat the call for `seconds` while the server does not answer: only
        for calls that are safe to repeat.
        """
        patience = wire.Patience(seconds)
        while True:
            try:
                response = await self._send(call)
                if response.status_code not in wire.RETRYABLE:
                    return wire.decode(response, kind)
                wire.raise_problem(response)
            except MidstreamError as error:
                patience.check(error)
                await self._io.sleep(wire.PAUSE_S)


class _Asking(Generic[P, R, A]):
    """Base of attributes whose function returns R in `Client`, and A in `AsyncClient`."""

    @overload
    def __get__(self, group: None, kind: type[Any]) -> Callable[Concatenate[Any, P], R]: ...
    @overload
    def __get__(self, group: Calls[Blocks] | Blocking, kind: type[Any]) -> Callable[P, R]: ...
    @overload
    def __get__(self, group: object, kind: type[Any]) -> Callable[P, A]: ...
    def __get__(self: Any, group: object, kind: type[Any]) -> Any:
        return self._bound(group, kind)


class _Method:
    """Base of methods of `Calls` with a function for each client."""

    def __init__(self, awaiting: Any, blocking: Any):
        vars(awaiting)["__signature__"] = written = _signature(awaiting)
        returned = _Text(written.return_annotation.removeprefix("Async"))
        vars(blocking)["__signature__"] = written.replace(return_annotation=returned)
        self._awaiting = awaiting
        self._blocking = blocking
        self.__doc__ = awaiting.__doc__

    def __set_name__(self, group: type, name: str) -> None:
        for function in (self._awaiting, self._blocking):
            function.group = group
            function.__name__ = name
            function.__qualname__ = f"{group.__qualname__}.{name}"

    def _bound(self, group: Any, kind: Any) -> Any:
        owner = kind if group is None else group
        function = self._blocking if getattr(owner, "_blocking", False) else self._awaiting
        return function if group is None else MethodType(function, group)


# Not generated from one client (two copies in the tree), and not a description of a request with a
# parser: calls that poll, stream or retry do not fit into one.
class call(_Method, _Asking[P, T, Coroutine[Any, Any, T]]):
    """A method written as a coroutine: it returns the coroutine's result in `Calls[Blocks]`, the
    coroutine elsewhere.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]]):
        check = keyword_check(list(signature(function).parameters.values())[1:])

        @wraps(function)
        async def awaiting(group: Any, /, *args: P.args, **options: P.kwargs) -> T:
            check(options)
            return await function(group, *args, **options)

        @wraps(function)
        def blocking(group: Any, /, *args: P.args, **options: P.kwargs) -> T:
            try:
                return finish(awaiting(group._awaited, *args, **options))
            except MidstreamError as error:  # its traceback ends here, below the caller's line
                raise error.with_traceback(None) from None

        super().__init__(awaiting, blocking)


class stream(_Method, _Asking[P, Iterator[T], AsyncGenerator[T, None]]):
    """A method written as an asynchronous generator: in `Calls[Blocks]`, it returns an iterator of
    the same items.
    """

    def __init__(self, function: Callable[Concatenate[Any, P], AsyncIterator[T]]):
        check = keyword_check(list(signature(function).parameters.values())[1:])

        @wraps(function)
        async def awaiting(group: Any, /, *args: P.args, **options: P.kwargs) -> AsyncIterator[T]:
            check(options)
            items = cast(AsyncGenerator[T, None], function(group, *args, **options))
            async with aclosing(items):
                async for item in items:
                    yield item

        @wraps(function)
        def blocking(group: Any, /, *args: P.args, **options: P.kwargs) -> Iterator[T]:
            return iterate(
                cast(AsyncGenerator[T, None], awaiting(group._awaited, *args, **options))
            )

        super().__init__(awaiting, blocking)


class verb(_Asking[P, T, Coroutine[Any, Any, T]]):
    """Exposes a call of a group as a method of the client itself."""

    def __init__(self, function: Callable[Concatenate[Any, P], T]):
        self._function: Any = function
        self.__doc__ = function.__doc__

    def _bound(self, client: Any, kind: Any) -> Any:
        group = self._function.group
        name = self._function.__name__
        if client is None:
            return vars(group)[name]._bound(None, kind)
        return getattr(group(client._io, client._blocking), name)


class added_verb(verb[P, T]):
    """A call of a group, by its path, which is loaded when it is used."""

    def __init__(self, path: str):
        self._path = path

    @cached_property
    def _function(self) -> Any:
        return part(self._path)


def keyword_check(parameters: Collection[Parameter]) -> Callable[[Iterable[str]], None]:
    """Return a function that raises UnknownArgument for the first keyword that is no parameter, in
    place of Python's TypeError, which does not name those that are.
    """
    takes_any = any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters)
    names = [each.name for each in parameters if each.kind is not Parameter.POSITIONAL_ONLY]

    def check(given: Iterable[str]) -> None:
        for name in given:
            if not (takes_any or name in names):
                raise values.unknown_argument(name, names)

    return check


class _Text(str):
    """An annotation that signatures show as it is written."""

    def __repr__(self) -> str:
        return str(self)


def _signature(function: Callable[..., Any]) -> Signature:
    """Return the signature as it is written, with the keywords of `**fields` one by one: editors
    and `help` show it.
    """
    original = signature(function)
    names = unwrap(function).__globals__
    parameters: list[Parameter] = []
    for parameter in original.parameters.values():
        written = parameter.annotation
        unpacked = _UNPACKED.fullmatch(written) if isinstance(written, str) else None
        if unpacked is None:
            shown = _Text(written) if isinstance(written, str) else written
            parameters.append(parameter.replace(annotation=shown))
            continue
        parameters += [
            Parameter(
                name,
                Parameter.KEYWORD_ONLY,
                default=None,
                annotation=_Text(kind.__forward_arg__.removesuffix(" | None")),
            )
            for name, kind in names[unpacked[1]].__annotations__.items()
        ]
    return original.replace(
        parameters=parameters, return_annotation=_Text(original.return_annotation)
    )
