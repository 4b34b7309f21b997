"""The routes of source runs: which captures have a name, what is in one, and its end."""

from typing import Annotated, Any

from litestar import delete, get
from litestar.params import PathParameter, QueryParameter

from ..broker.runs import SourceRuns
from ..schemas.runs import RunPage, RunView
from .body import JsonRequest
from .edge import edge_of
from .jobs import ERRORS, MAX_PAGE, PROBLEM

Name = Annotated[str, PathParameter(description="A run's name, or the id of a job that captured into files")]
Model = Annotated[str | None, QueryParameter(description="May be left out while there is one model")]


@get("/v1/runs", summary="List the source runs, newest first", description="Those that have a name.", responses=ERRORS)
async def list_runs(
    request: JsonRequest,
    model: Model = None,
    limit: Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)] = 50,
    cursor: Annotated[str | None, QueryParameter(description="`next` of the page before")] = None,
) -> RunPage:
    edge = edge_of(request)
    return await SourceRuns(edge.ledger).list((await edge.the_model(model)).name, limit, cursor)


@get("/v1/runs/{name:str}", summary="What is in a source run", responses=ERRORS)
async def get_run(name: Name, request: JsonRequest, model: Model = None) -> RunView:
    edge = edge_of(request)
    return await SourceRuns(edge.ledger).view((await edge.the_model(model)).name, name)


@delete(
    "/v1/runs/{name:str}",
    status_code=204,
    summary="Delete a source run",
    description="Its captures, as `DELETE /v1/captures/{id}` does, and its name. Who has its rows by now keeps them; who needs them "
    "later fails.",
    responses={**ERRORS, 409: PROBLEM},
)
async def delete_run(name: Name, request: JsonRequest, model: Model = None) -> None:
    edge = edge_of(request)
    await SourceRuns(edge.ledger).delete((await edge.the_model(model)).name, name)


ROUTES: list[Any] = [list_runs, get_run, delete_run]
