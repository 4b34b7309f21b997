"""The routes of source runs: which captures have a name, what is in one, and its end."""

from typing import Annotated, Any

from litestar import delete, get
from litestar.params import PathParameter

from ...broker.ledger.named.source_runs import SourceRuns
from ...schemas.base.limits import MAX_NAME
from ...schemas.requests.source_runs import RunPage, RunView
from ..context import context_of
from ..web.auth import caller_of, needs
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, Cursor, Model, PageSize

Name = Annotated[
    str,
    PathParameter(
        max_length=MAX_NAME, description="A run's name, or the id of a job with capture files"
    ),
]


@get(
    "/v1/runs",
    opt=needs("read"),
    summary="List the source runs, newest first",
    description="Named runs only.",
    responses=ERRORS,
)
async def list_runs(
    request: JsonRequest,
    model: Model = None,
    limit: PageSize = 50,
    cursor: Cursor = None,
) -> RunPage:
    context = context_of(request)
    return await SourceRuns(context.ledger, caller_of(request)).list(
        (await context.the_model(model)).name, limit, cursor
    )


@get("/v1/runs/{name:str}", opt=needs("read"), summary="Describe a source run", responses=ERRORS)
async def get_run(name: Name, request: JsonRequest, model: Model = None) -> RunView:
    context = context_of(request)
    info = await context.the_model(model)
    return await SourceRuns(context.ledger, caller_of(request)).view(info.name, name)


@delete(
    "/v1/runs/{name:str}",
    opt=needs("submit"),
    status_code=204,
    summary="Delete a source run",
    description="Deletes its captures, as `DELETE /v1/captures/{id}` does, and its name. Jobs "
    "that have loaded its rows keep them; "
    "later jobs fail.",
    responses={**ERRORS, 409: PROBLEM},
)
async def delete_run(name: Name, request: JsonRequest, model: Model = None) -> None:
    context = context_of(request)
    info = await context.the_model(model)
    await SourceRuns(context.ledger, caller_of(request)).delete(info.name, name)


ROUTES: list[Any] = [list_runs, get_run, delete_run]
