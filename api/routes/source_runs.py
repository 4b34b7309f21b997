"""Routes of source runs, which are named captures: list, describe and delete them."""

from typing import Annotated, Any

from litestar import delete, get
from litestar.params import PathParameter

from ...broker.ledger.named.source_runs import LedgerRuns
from ...schemas.access.keys import Caller
from ...schemas.base.limits import MAX_NAME
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.source_runs import RunPage, RunView
from ..context import AppContext
from ..web.auth import needs
from .jobs import ERRORS, PROBLEM, CursorParameter, PageSize

RunParameter = Annotated[
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
    context: AppContext,
    caller: Caller,
    info: ModelInfo,
    limit: PageSize = 50,
    cursor: CursorParameter = None,
) -> RunPage:
    return await LedgerRuns(context.ledger, caller).list(info.name, limit, cursor)


@get("/v1/runs/{name:str}", opt=needs("read"), summary="Describe a source run", responses=ERRORS)
async def get_run(
    name: RunParameter, context: AppContext, caller: Caller, info: ModelInfo
) -> RunView:
    return await LedgerRuns(context.ledger, caller).view(info.name, name)


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
async def delete_run(
    name: RunParameter, context: AppContext, caller: Caller, info: ModelInfo
) -> None:
    await LedgerRuns(context.ledger, caller).delete(info.name, name)


ROUTES: list[Any] = [list_runs, get_run, delete_run]
