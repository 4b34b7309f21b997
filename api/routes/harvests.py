"""Routes of harvests: submit, get, list, follow, pause, resume, cancel, delete."""

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, delete, get, post
from litestar.params import JSONBody, PathParameter
from litestar.response import Stream

from ...broker.ledger.recovery.harvests import Wanted
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ...schemas.base.limits import MAX_NAME
from ...schemas.base.records import to_json
from ...schemas.jobs.harvests import OVER, HarvestPage, HarvestRequest, HarvestView
from ...storage.store import around, open_store
from ..context import HARVEST_LOOK_S as LOOK_S
from ..context import AppContext
from ..resolve.admission.harvests import plan_harvest
from ..responses import events
from ..web.auth import needs, tenant_asked
from ..web.body import JsonRequest
from ..web.open_calls import EVENTS
from .jobs import ERRORS, PROBLEM, SUBMIT_ERRORS, Key, PageSize, Whose

HarvestId = Annotated[str, PathParameter(max_length=MAX_NAME, description="The harvest's id")]


@post(
    "/v1/harvests",
    opt=needs("submit"),
    status_code=202,
    summary="Harvest a corpus",
    description="Rows of every document of a source become shards in a store, each once. The "
    "harvest is durable once the response is "
    "sent; repeating a submission with the same `Idempotency-Key` returns the same harvest.",
    responses=SUBMIT_ERRORS,
)
async def post_harvest(
    data: JSONBody[HarvestRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: Key = None,
) -> Response[HarvestView]:
    idempotency = request.idempotency(key)
    info = await context.model(data.model)
    steering = (await context.model_state(info.name, [], caller)).global_steering.digest
    sources = (await context.ledger.tenants.get(caller.tenant)).limits.harvest_sources
    harvest = await plan_harvest(data, info, context.settings, steering, caller, sources)
    harvest_id = await context.harvests.submit(harvest, idempotency)
    await context.harvests.advance(harvest_id)
    return Response(
        await context.harvests.view(harvest_id),
        status_code=202,
        headers={"Location": f"/v1/harvests/{harvest_id}"},
    )


@get("/v1/harvests", opt=needs("read"), summary="List harvests, newest first", responses=ERRORS)
async def list_harvests(
    context: AppContext, caller: Caller, limit: PageSize = 50, tenant: Whose = None
) -> HarvestPage:
    return await context.harvests.list(tenant_asked(caller, tenant), limit)


@get("/v1/harvests/{harvest_id:str}", opt=needs("read"), summary="Get a harvest", responses=ERRORS)
async def get_harvest(harvest_id: HarvestId, context: AppContext, caller: Caller) -> HarvestView:
    return await seen_harvest(context, caller, harvest_id)


@get(
    "/v1/harvests/{harvest_id:str}/events",
    summary="Stream a harvest's progress",
    description="Server-sent events: `progress` with the harvest as `GET "
    "/v1/harvests/{harvest_id}` answers, whenever it has changed; "
    "`done` is the last.",
    media_type=events.MEDIA_TYPE,
    opt=needs("read") | EVENTS,
    responses=ERRORS,
)
async def harvest_events(
    harvest_id: HarvestId, context: AppContext, caller: Caller
) -> Response[Any]:
    await seen_harvest(context, caller, harvest_id)
    return Stream(
        _progress(context, harvest_id, caller),
        media_type=events.MEDIA_TYPE,
        headers=events.HEADERS,
    )


async def _progress(context: AppContext, harvest_id: str, caller: Caller) -> AsyncIterator[bytes]:
    version, silent = 0, 0.0

    async def look() -> tuple[HarvestView, bytes]:
        view = await context.harvests.view(harvest_id)
        return view, to_json(view)

    with context.key_watch.of(caller) as held_key:
        yield events.RETRY
        while not context.closing:
            try:
                held_key.check()
                view, sent = await context.patiently(
                    lambda: context.harvest_looks.of(harvest_id, look)
                )
            except MidstreamError as error:
                yield events.encode_problem(error.problem(f"/v1/harvests/{harvest_id}"))
                return
            silent += LOOK_S
            if view.version != version:
                version, silent = view.version, 0.0
                yield b"id: %d\nevent: progress\ndata: %b\n\n" % (version, sent)
            elif silent >= events.PING_S:
                silent = 0.0
                yield events.PING
            if view.state in OVER:
                yield b"event: done\ndata: %b\n\n" % to_json({"state": view.state})
                return
            await context.or_closing(asyncio.sleep(LOOK_S), held_key)


@post(
    "/v1/harvests/{harvest_id:str}/pause",
    opt=needs("submit"),
    status_code=202,
    summary="Pause a harvest",
    description=(
        "Shards that are under way are dropped, and computed again after `resume`; "
        "those that are done stay."
    ),
    responses={409: PROBLEM, **ERRORS},
)
async def pause_harvest(harvest_id: HarvestId, context: AppContext, caller: Caller) -> HarvestView:
    return await _ask(context, caller, harvest_id, "pause")


@post(
    "/v1/harvests/{harvest_id:str}/resume",
    opt=needs("submit"),
    status_code=202,
    summary="Resume a harvest",
    responses={409: PROBLEM, **ERRORS},
)
async def resume_harvest(harvest_id: HarvestId, context: AppContext, caller: Caller) -> HarvestView:
    return await _ask(context, caller, harvest_id, "run")


@post(
    "/v1/harvests/{harvest_id:str}/cancel",
    opt=needs("submit"),
    status_code=202,
    summary="Cancel a harvest",
    description="What was written stays until it is deleted, without a manifest.",
    responses={409: PROBLEM, **ERRORS},
)
async def cancel_harvest(harvest_id: HarvestId, context: AppContext, caller: Caller) -> HarvestView:
    return await _ask(context, caller, harvest_id, "cancel")


@delete(
    "/v1/harvests/{harvest_id:str}",
    opt=needs("submit"),
    status_code=204,
    summary="Delete a harvest",
    description="Its record and all its files. Only one that has ended.",
    responses={409: PROBLEM, **ERRORS},
)
async def delete_harvest(harvest_id: HarvestId, context: AppContext, caller: Caller) -> None:
    view = await seen_harvest(context, caller, harvest_id)
    if view.state not in OVER:
        raise MidstreamError("conflict", f"harvest {harvest_id} has not ended: cancel it first")
    base, name = around(view.uri)
    await anyio.to_thread.run_sync(lambda: open_store(base).delete(f"{name}/"))
    await context.harvests.forget(harvest_id)


async def _ask(context: AppContext, caller: Caller, harvest_id: str, needed: Wanted) -> HarvestView:
    await seen_harvest(context, caller, harvest_id)
    view = await context.harvests.ask(harvest_id, needed)
    if needed != "run":
        for job in view.jobs:
            await context.notify_worker(await context.ledger.view(job))
    return view


async def seen_harvest(context: AppContext, caller: Caller, harvest_id: str) -> HarvestView:
    """Return the harvest. Raises `not_found` if it does not exist or belongs to another tenant."""
    view = await context.harvests.view(harvest_id)
    if not caller.sees(view.tenant):
        raise MidstreamError("not_found", f"unknown harvest {harvest_id}")
    return view


ROUTES = [
    post_harvest,
    list_harvests,
    get_harvest,
    harvest_events,
    pause_harvest,
    resume_harvest,
    cancel_harvest,
    delete_harvest,
]
