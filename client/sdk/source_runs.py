"""Calls on source runs."""

from urllib.parse import quote

from ...schemas.requests.source_runs import RunPage, RunView
from . import wire
from .calls import Calls, call
from .wire import Call, of_model

_RUNS = "/v1/runs"


def _page(model: str | None, limit: int | None, cursor: str | None) -> Call:
    return Call("GET", _RUNS, params=wire.given(model=model, limit=limit, cursor=cursor))


def _one(method: str, name: str, model: str | None) -> Call:
    return Call(method, f"{_RUNS}/{quote(name, safe='')}", params=of_model(model))


class RunCalls(Calls):
    """`model` may be left out where one is served; `name` may be the id of a job that captured."""

    @call
    async def source_runs(
        self, model: str | None = None, *, limit: int | None = None, cursor: str | None = None
    ) -> RunPage:
        """One page of the runs that have a name, newest first; `next` of the page is the next
        `cursor`.
        """
        return await self._ask(_page(model, limit, cursor), RunPage)

    @call
    async def source_run(self, name: str, model: str | None = None) -> RunView:
        """A run's state, and the layers and positions of each prompt. Raises `not_found`."""
        return await self._ask(_one("GET", name, model), RunView)

    @call
    async def delete_run(self, name: str, model: str | None = None) -> None:
        """Delete its captures and its name.

        Raises `not_found`, and `conflict` while its job runs.
        """
        await self._do(_one("DELETE", name, model))
