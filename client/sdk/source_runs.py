"""Calls on source runs, of both clients."""

from abc import ABC, abstractmethod
from urllib.parse import quote

import httpx

from ...schemas.source_runs import RunPage, RunView
from . import wire
from .wire import Call, of_model

_RUNS = "/v1/runs"


def _page(model: str | None, limit: int | None, cursor: str | None) -> Call:
    given = {"model": model, "limit": limit, "cursor": cursor}
    return Call("GET", _RUNS, params={name: value for name, value in given.items() if value is not None})


def _one(method: str, name: str, model: str | None) -> Call:
    return Call(method, f"{_RUNS}/{quote(name, safe='')}", params=of_model(model))


class RunCalls(ABC):
    """Of the blocking client. `model` may be left out where one is served; `name` may be the id of a job that captured."""

    @abstractmethod
    def _send(self, call: Call) -> httpx.Response: ...

    def source_runs(self, model: str | None = None, *, limit: int | None = None, cursor: str | None = None) -> RunPage:
        """One page of the runs that have a name, newest first; `next` of the page is the next `cursor`."""
        return wire.decode(self._send(_page(model, limit, cursor)), RunPage)

    def source_run(self, name: str, model: str | None = None) -> RunView:
        """A run's state, and the layers and positions of each prompt. Raises `not_found`."""
        return wire.decode(self._send(_one("GET", name, model)), RunView)

    def delete_run(self, name: str, model: str | None = None) -> None:
        """Delete its captures and its name. Raises `not_found`, and `conflict` while its job runs."""
        wire.raise_problem(self._send(_one("DELETE", name, model)))


class AsyncRunCalls(ABC):
    """Of the awaiting client: the same, as coroutines."""

    @abstractmethod
    async def _send(self, call: Call) -> httpx.Response: ...

    async def source_runs(self, model: str | None = None, *, limit: int | None = None, cursor: str | None = None) -> RunPage:
        return wire.decode(await self._send(_page(model, limit, cursor)), RunPage)

    async def source_run(self, name: str, model: str | None = None) -> RunView:
        return wire.decode(await self._send(_one("GET", name, model)), RunView)

    async def delete_run(self, name: str, model: str | None = None) -> None:
        wire.raise_problem(await self._send(_one("DELETE", name, model)))
