"""Routes about the service itself: models, health, readiness, status, metrics."""

import asyncio
import os
import re
from collections import Counter as Tally
from contextlib import suppress
from typing import Annotated, Any

import msgspec
from litestar import Response, get
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import PathParameter
from prometheus_client import CONTENT_TYPE_LATEST, REGISTRY, generate_latest

from ...broker.ledger.jobs.ledger import Ledger, reachable
from ...broker.ledger.jobs.status import read_status
from ...broker.ledger.named.steering import Account
from ...broker.processes.liveness import RELAY_KEY
from ...broker.telemetry.metrics import HELD, LEDGER, LEDGER_DURABLE, READY
from ...broker.telemetry.scraped_metrics import (
    OF_SERVICE,
    OF_STEERING,
    ScrapedMetrics,
    SteeringReport,
)
from ...schemas.base.errors import MidstreamError
from ...schemas.base.limits import MAX_NAME
from ...schemas.base.records import fields_of
from ...schemas.base.version import __version__, full_version
from ...schemas.jobs.models import ModelFacts, ModelInfo, WorkerInfo
from ...schemas.jobs.openai import ModelCard, ModelList
from ...schemas.service.compatibility import judged, misfit_of
from ...schemas.service.health import Health, Readiness
from ...schemas.service.status import ServiceStatus
from ...schemas.settings.instance import instance_of
from ...schemas.settings.settings import asks_for_keys
from ..context import AppContext
from ..operations.rank_agreement import stage_agreements
from ..web.auth import may_observe, needs
from ..web.body import JsonRequest
from .jobs import PROBLEM, reads
from .steering import answers_of_ranks

#: Litestar adds the charset itself.
METRICS_TYPE = CONTENT_TYPE_LATEST.partition("; charset")[0]
#: Seconds that a scrape waits for the workers' reports on their ranks before it uses the last ones.
SCRAPE_S = 1.0
#: Seconds after which readiness is refused although neither Redis nor a disk has answered.
READY_S = 1.5
#: The state of the service and of its workers' steering as of the last scrape.
_scraped: list[ServiceStatus] = []
_steering: list[SteeringReport] = []
for _collector in (
    *(LEDGER_DURABLE, LEDGER, READY, HELD),
    ScrapedMetrics(OF_SERVICE, lambda: _scraped),
    ScrapedMetrics(OF_STEERING, lambda: _steering),
):
    REGISTRY.register(_collector)


#: Clients ask for the models before a submission that names none.
_FOR_SUBMISSIONS = {
    "without_scope": "a submission, which may ask for this, needs the scope 'submit'"
}


@get(
    "/v1/models",
    opt=needs("read") | _FOR_SUBMISSIONS,
    summary="List the served models",
    responses={503: PROBLEM},
)
async def list_models(context: AppContext) -> ModelList:
    ledger = context.ledger
    live = Tally(worker.model for worker in await ledger.workers())
    return ModelList(
        object="list", data=[_card(info, live[info.name]) for info in await ledger.models()]
    )


ModelName = Annotated[
    str,
    PathParameter(
        description="The model's name, as `GET /v1/models` lists it", max_length=MAX_NAME
    ),
]


@reads("/v1/models/{name:str}", summary="Get a model, with the certificate of its hook points")
async def get_model(name: ModelName, context: AppContext) -> ModelCard:
    info = await context.served.the_model(name)
    gradients = await context.ledger.gradients(info.name)
    return msgspec.structs.replace(
        _card(info, sum(worker.model == info.name for worker in await context.ledger.workers())),
        certificate=info.certificate,
        attention=info.attention,
        gradients=gradients if gradients is not None and gradients.fits(info) else None,
    )


def _card(info: ModelInfo, workers: int) -> ModelCard:
    left_out: dict[str, Any] = {"certificate": None, "attention": [], "multiplied": []}
    return ModelCard(
        id=info.name,
        object="model",
        created=0,
        owned_by="midstream",
        workers=workers,
        **fields_of(info, ModelFacts) | left_out,
    )


#: The parent is `midstream up`, if that started this process.
_INSTANCE = instance_of(os.getppid())


@get("/healthz", opt=needs(None), summary="Liveness: this process responds")
async def healthz(context: AppContext) -> Health:
    build = "" if asks_for_keys(context.settings) else full_version()
    return Health(status="ok", version=__version__, build=build, instance=_INSTANCE)


@get(
    "/readyz",
    opt=needs(None),
    summary="Readiness: a job would run now",
    responses={
        503: ResponseSpec(
            Readiness, description="Not ready; `missing` gives the reasons", generate_examples=False
        )
    },
)
async def readyz(request: JsonRequest, context: AppContext) -> Response[Readiness]:
    observes = False
    try:
        async with asyncio.timeout(READY_S):
            observes = await may_observe(request)
            readiness = await context.looks.of_next("ready", lambda: look(context))
    except TimeoutError:
        readiness = _not_ready(f"redis: no answer from it, or from a disk, within {READY_S} s")
    if not observes:
        missing = sorted({re.split(r"\W", what, maxsplit=1)[0] for what in readiness.missing})
        readiness = msgspec.structs.replace(readiness, missing=missing, models=[], workers=[])
    return Response(
        readiness,
        status_code=200 if readiness.ready else 503,
        headers={} if readiness.ready else {"Retry-After": "1"},
    )


async def look(context: AppContext) -> Readiness:
    """Return whether the service is ready: Redis answers, and a healthy worker serves a published
    model, both of compatible versions.

    Without a relay jobs run, but captures wait for it. If captures, receipts or Redis' log cannot
    be written to disk, the service is not ready.
    """
    disks = [f"{name}: {trouble}" for name, trouble in (await context.disks.troubles()).items()]
    try:
        await context.ledger.ping()
        await context.ledger.check_durable()
        relay = await _relay_seen(context.ledger)
        workers = [judged(worker) for worker in await context.ledger.workers()]
        models = await context.ledger.models()
    except MidstreamError as error:
        return _not_ready(f"redis: {error.detail}", *disks)
    healthy = {worker.model for worker in workers if worker.healthy}
    served = sorted(
        info.name for info in models if info.name in healthy and misfit_of(info) is None
    )
    missing = (
        disks
        + ([] if served else _why(workers, models))
        + ([] if relay else ["relay: has not reported recently; captures would wait for it"])
    )
    return Readiness(
        ready=bool(served) and not disks,
        missing=missing,
        models=served,
        workers=workers,
        relay=relay,
    )


def _not_ready(*missing: str) -> Readiness:
    return Readiness(ready=False, missing=[*missing], models=[], workers=[], relay=False)


@reachable
async def _relay_seen(ledger: Ledger) -> bool:
    return bool(await ledger.redis.exists(RELAY_KEY))


def _why(workers: list[WorkerInfo], models: list[ModelInfo]) -> list[str]:
    ill = [
        f"worker {worker.worker}: {worker.detail or 'is not healthy'}"
        for worker in workers
        if not worker.healthy
    ]
    live = {worker.model for worker in workers}
    foreign = [
        f"model {info.name}: {trouble.detail}"
        for info in models
        if info.name in live and (trouble := misfit_of(info)) is not None
    ]
    unknown = [
        f"model {name}: is not published yet"
        for name in sorted(live - {info.name for info in models})
    ]
    return ill or foreign or unknown or ["worker: none is running"]


@get(
    "/v1/status",
    opt=needs("observe"),
    summary="Status of the whole service",
    description="Queues by model, priority and tenant; live workers and their load; relay, "
    "webhooks and Redis. Needs the scope "
    "`observe`. Worker figures are as of their last heartbeat.",
    responses={503: PROBLEM},
)
async def service_status(context: AppContext) -> ServiceStatus:
    return await _status(context)


async def _status(context: AppContext) -> ServiceStatus:
    status: ServiceStatus = await context.looks.of_next(
        "status", lambda: read_status(context.ledger, held=context.watcher.waiting)
    )
    return status


@get(
    "/metrics",
    opt=needs("observe"),
    summary="Prometheus metrics",
    include_in_schema=False,
    media_type=METRICS_TYPE,
)
async def metrics(context: AppContext) -> Response[Any]:
    status: ServiceStatus | None = None
    accounts: list[Account] = []
    durable = ready = False
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                ready = (await context.looks.of_next("ready", lambda: look(context))).ready
        status = await _status(context)
        with suppress(MidstreamError):
            await context.ledger.check_durable()
            durable = True
        _, accounts = await answers_of_ranks(context, None, SCRAPE_S)
    except MidstreamError:  # the metrics of this process are useful while Redis is unreachable
        status = None
    # No await from here on: scrapes may be concurrent.
    LEDGER.set(status is not None)
    _scraped[:] = [] if status is None else [status]
    _steering[:] = [
        SteeringReport(
            account.report,
            {stage.pp: stage.consistent for stage, _ in stage_agreements(account.report)},
        )
        for account in accounts
        if account.report is not None
    ]
    HELD.set(context.watcher.waiting)
    LEDGER_DURABLE.set(durable)
    READY.set(ready)
    return Response(generate_latest(REGISTRY), media_type=METRICS_TYPE)


ROUTES = [list_models, get_model, healthz, readyz, service_status, metrics]
