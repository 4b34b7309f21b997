"""Routes of harvests: submit, get, list, follow, pause, resume, cancel, delete, and streams."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, closing
from functools import partial
from typing import Annotated, Any, Literal

import anyio.to_thread
from litestar import Litestar, Response, Router, delete, get, post
from litestar.datastructures import State
from litestar.di import Provide
from litestar.params import JSONBody, PathParameter, QueryParameter

from midstream.api.context import AppContext, unless_client_leaves
from midstream.api.resolve.edits.loras import named_lora
from midstream.api.resolve.edits.steering import modules_named
from midstream.api.responses import events
from midstream.api.routes.jobs import (
    ERRORS,
    PROBLEM,
    SUBMIT_ERRORS,
    IdempotencyKey,
    JobId,
    PageSize,
    Submission,
    WaitParameter,
    Whose,
    submits,
)
from midstream.api.web.auth import needs, tenant_asked
from midstream.api.web.body import JsonRequest
from midstream.api.web.key_watch import HeldKey
from midstream.api.web.open_calls import EVENTS
from midstream.broker.ledger.jobs.watch import SharedReads
from midstream.schemas.access.keys import Caller
from midstream.schemas.artifacts.loras import LORAS
from midstream.schemas.artifacts.saes import SAES
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.limits import MAX_INT64, MAX_NAME, MAX_SAE_WIDTH
from midstream.schemas.base.records import to_json
from midstream.schemas.jobs.jobs import JobView
from midstream.storage.store import around, open_store

from ..files.surveys import Surveyed
from ..ledger.harvests import LedgerHarvests
from ..names import OVER
from ..records.harvests import (
    HarvestPage,
    HarvestRequest,
    HarvestView,
    HarvestWork,
    StreamCursor,
    StreamPage,
    SurveyRequest,
    SurveyView,
)
from .admission import check_comparable, plan_harvest, plan_survey

#: Seconds between two reads of a harvest by its event streams, which share the reads.
LOOK_S = 0.5

HarvestId = Annotated[str, PathParameter(max_length=MAX_NAME, description="The harvest's id")]
FeatureParameter = Annotated[
    int | None,
    # the schema of a number that may be null loses a bound of 0
    QueryParameter(gt=-1, le=MAX_SAE_WIDTH, description="Of the examples; the first of the list"),
]

SurveyedParameter = Annotated[
    str | None,
    QueryParameter(
        min_length=1,
        max_length=MAX_NAME,
        description="An autoencoder: only harvests with finished surveys of its features, which "
        "they list, among the 200 newest",
    ),
]


@asynccontextmanager
async def lifespan(app: Litestar) -> AsyncIterator[None]:
    """Keep the ledger of harvests, and the reads that streams of events share."""
    app.state.harvests = LedgerHarvests(app.state.context.ledger)
    app.state.harvest_looks = SharedReads[tuple[HarvestView, bytes]](LOOK_S / 2)
    yield


def harvests_of(request: JsonRequest) -> LedgerHarvests:
    """Provide the dependency `harvests` of handlers."""
    harvests: LedgerHarvests = request.app.state.harvests
    return harvests


async def harvest_of(
    harvest_id: HarvestId, harvests: LedgerHarvests, caller: Caller
) -> HarvestView:
    """Provide the dependency `harvest` of handlers: the one in the path.

    Raises `not_found` if it does not exist or belongs to another tenant.
    """
    view = await harvests.view(harvest_id)
    if not caller.sees(view.tenant):
        raise MidstreamError("not_found", f"unknown harvest {harvest_id}")
    return view


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
    harvests: LedgerHarvests,
    caller: Caller,
    key: IdempotencyKey = None,
) -> Response[HarvestView]:
    idempotency = request.idempotency(key)
    info = await context.served.model(data.model)
    state = await context.names.state(info, modules_named(data.steering), caller)
    lora = named_lora(data.lora, info, await context.names.look_up(info, (LORAS, data.lora)))
    limits = (await context.ledger.tenants.get(caller.tenant)).limits
    harvest = await plan_harvest(
        data,
        info,
        context.settings,
        state=state,
        steering=(await context.steering.current(info.name)).digest,
        lora=lora,
        caller=caller,
        limits=limits,
    )
    harvest_id = await harvests.submit(harvest, idempotency)
    await harvests.advance(harvest_id)
    return Response(
        await harvests.view(harvest_id),
        status_code=202,
        headers={"Location": f"/v1/harvests/{harvest_id}"},
    )


@get("/v1/harvests", opt=needs("read"), summary="List harvests, newest first", responses=ERRORS)
async def list_harvests(
    harvests: LedgerHarvests,
    caller: Caller,
    limit: PageSize = 50,
    tenant: Whose = None,
    surveyed: SurveyedParameter = None,
) -> HarvestPage:
    return await harvests.list(tenant_asked(caller, tenant), limit, surveyed)


@get("/v1/harvests/{harvest_id:str}", opt=needs("read"), summary="Get a harvest", responses=ERRORS)
async def get_harvest(harvest: HarvestView) -> HarvestView:
    return harvest


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
    harvest: HarvestView, request: JsonRequest, context: AppContext, caller: Caller
) -> Response[Any]:
    url = f"/v1/harvests/{harvest.id}"
    return events.stream(
        context, caller, url, partial(_progress, request.app.state, context, harvest.id)
    )


async def _progress(
    state: State, context: AppContext, harvest_id: str, held_key: HeldKey
) -> AsyncGenerator[bytes]:
    version = 0
    silent = 0.0

    async def look() -> tuple[HarvestView, bytes]:
        view = await state.harvests.view(harvest_id)
        return view, to_json(view)

    while not context.waiting.closing:
        held_key.check()
        view, sent = await context.waiting.patiently(
            lambda: state.harvest_looks.of(harvest_id, look)
        )
        silent += LOOK_S
        if view.version != version:
            version = view.version
            silent = 0.0
            yield b"id: %d\nevent: progress\ndata: %b\n\n" % (version, sent)
        elif silent >= events.PING_S:
            silent = 0.0
            yield events.PING
        if view.state in OVER:
            yield b"event: done\ndata: %b\n\n" % to_json({"state": view.state})
            return
        await context.waiting.or_closing(asyncio.sleep(LOOK_S), held_key)


@post(
    "/v1/harvests/{harvest_id:str}/{action:str}",
    opt=needs("submit"),
    status_code=202,
    summary="Pause, resume or cancel a harvest",
    description=(
        "A pause drops shards that are under way, which `resume` computes again; those that are "
        "done stay. What was written of a cancelled harvest stays until it is deleted, without a "
        "manifest."
    ),
    responses={409: PROBLEM, **ERRORS},
)
async def act_on_harvest(
    harvest: HarvestView,
    action: Literal["pause", "resume", "cancel"],
    context: AppContext,
    harvests: LedgerHarvests,
) -> HarvestView:
    view = await harvests.ask(harvest.id, "run" if action == "resume" else action)
    if action != "resume":
        for job in view.jobs:
            await context.notify_worker(await context.ledger.view(job))
    return view


@delete(
    "/v1/harvests/{harvest_id:str}",
    opt=needs("submit"),
    summary="Delete a harvest",
    description="Its record and all its files. Only one that has ended.",
    responses={409: PROBLEM, **ERRORS},
)
async def delete_harvest(harvest: HarvestView, harvests: LedgerHarvests) -> None:
    if harvest.state not in OVER:
        raise MidstreamError("conflict", f"harvest {harvest.id} has not ended: cancel it first")
    base, name = around(harvest.uri)
    await anyio.to_thread.run_sync(lambda: open_store(base).delete(f"{name}/"))
    await harvests.forget(harvest.id)


@get(
    "/v1/harvests/{harvest_id:str}/stream",
    opt=needs("read"),
    summary="Get the next units of a harvest's stream",
    description="Units in order, at most those of one part: `after` is the number of units that "
    "the consumer has, by default those that it has acknowledged. With `wait`, the response is "
    "held until a unit is ready.",
    responses={409: PROBLEM, 410: PROBLEM, **ERRORS},
)
async def stream_harvest(
    harvest: HarvestView,
    request: JsonRequest,
    context: AppContext,
    harvests: LedgerHarvests,
    consumer: Annotated[
        str, QueryParameter(max_length=MAX_NAME, description="One of the stream's consumers")
    ],
    after: Annotated[
        int | None, QueryParameter(gt=-1, le=MAX_INT64, description="A cursor")
    ] = None,
    wait: WaitParameter = None,
) -> StreamPage:
    stored = await harvests.stored(harvest.id)
    # what a process that was killed after an acknowledgement has left
    await harvests.drop_shards(stored)
    until = time.monotonic() + (wait or 0.0)

    async def next_units() -> StreamPage:
        while True:
            page = await harvests.stream_page(stored, consumer, after)
            if page.units or page.ended or context.waiting.closing or time.monotonic() >= until:
                return page
            await context.waiting.or_closing(asyncio.sleep(LOOK_S))

    return await unless_client_leaves(request, next_units())


@post(
    "/v1/harvests/{harvest_id:str}/stream/ack",
    opt=needs("submit"),
    status_code=200,
    summary="Acknowledge units of a harvest's stream",
    description="The consumer has all units before `cursor`: it gets them no more, and shards that "
    "all consumers have acknowledged are deleted, unless the stream keeps them. Repeatable.",
    responses={409: PROBLEM, **ERRORS},
)
async def acknowledge_harvest(
    harvest: HarvestView, data: JSONBody[StreamCursor], harvests: LedgerHarvests
) -> StreamCursor:
    stored = await harvests.stored(harvest.id)
    await harvests.acknowledge(stored, data.consumer, data.cursor)
    await harvests.advance(harvest.id)
    return data


@submits(
    "/v1/harvests/{harvest_id:str}/surveys",
    summary="Survey a harvest",
    description="One pass over the rows of a finished harvest: the density of each feature of an "
    "autoencoder, and the contexts where it is most active. A job: follow, fetch and cancel it "
    "like any job; the harvest lists the survey under the job's id.",
)
async def post_survey(
    harvest: HarvestView,
    data: JSONBody[SurveyRequest],
    submission: Submission,
    harvests: LedgerHarvests,
) -> Response[JobView]:
    context = submission.context
    job_id = await submission.known()
    if job_id is None:
        info = await context.served.model(harvest.model)
        stored = await harvests.stored(harvest.id)
        uris = [harvest.uri]
        if data.against is not None:
            state = (await harvest_of(data.against, harvests, submission.caller)).state
            other = await harvests.stored(data.against)
            await check_comparable(stored, other, state, harvests)
            uris.append(other.uri)
        found = await context.names.look_up(info, (SAES, data.sae))
        part = plan_survey(data, harvest, stored, uris, info, found)
        job = submission.job("harvest", info, data, work=HarvestWork(part=part).packed)
        job_id = await context.accept(job, info, {}, submission.idempotency, request=to_json(data))
    return await submission.answer(job_id)


@get(
    "/v1/harvests/{harvest_id:str}/surveys/{job_id:str}",
    opt=needs("read"),
    summary="Get a survey's features, and examples of one",
    description="Features come by `order`, the largest first; of a comparison, by the change.",
    responses=ERRORS,
)
async def get_survey(
    harvest: HarvestView,
    job_id: JobId,
    order: Literal["density", "mean"] = "density",
    limit: PageSize = 50,
    feature: FeatureParameter = None,
) -> SurveyView:
    def read() -> SurveyView:
        with closing(Surveyed.of(harvest, job_id)) as found:
            return found.view(order, limit, feature)

    return await anyio.to_thread.run_sync(read)


ROUTES = [
    Router(
        path="/",
        dependencies={
            "harvest": Provide(harvest_of),
            "harvests": Provide(harvests_of, sync_to_thread=False),
        },
        route_handlers=[
            post_harvest,
            list_harvests,
            get_harvest,
            harvest_events,
            act_on_harvest,
            delete_harvest,
            stream_harvest,
            acknowledge_harvest,
            post_survey,
            get_survey,
        ],
    )
]
