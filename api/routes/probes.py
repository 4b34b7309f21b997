"""Routes of probes: registration, listing, removal, and which of them watch all traffic."""

from typing import Annotated, Any

import anyio.to_thread
import msgspec
from litestar import Response, delete, get, put
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody, PathParameter

from ...schemas.artifacts.probes import Probe, ProbePage, ProbeRequest, WatchRequest
from ...schemas.base.errors import MidstreamError, invalid, unknown
from ...schemas.base.limits import MAX_MODULE_NAME, NAME_PATTERN
from ..context import AppContext, context_of
from ..resolve.readings.probes import check_action, resolve_probe
from ..web.auth import needs
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, Model

Name = Annotated[
    str,
    PathParameter(
        description="The probe's name: letters, digits, `.`, `_` and `-`",
        max_length=MAX_MODULE_NAME,
        pattern=NAME_PATTERN,
    ),
]


@put(
    "/v1/probes/{name:str}",
    opt=needs("steer-global"),
    status_code=200,
    summary="Register or replace a probe",
    description="A linear map of a row to a score for each label. Requests accepted earlier "
    "keep the former one; a probe that watches "
    "all traffic goes on with the new one.",
    responses={
        201: ResponseSpec(Probe, description="The name is new", generate_examples=False),
        **ERRORS,
        409: PROBLEM,
        413: PROBLEM,
        415: PROBLEM,
    },
)
async def put_probe(
    name: Name, data: JSONBody[ProbeRequest], request: JsonRequest
) -> Response[Probe]:
    context = context_of(request)
    info = await context.the_model(data.model)
    made, blobs = await anyio.to_thread.run_sync(resolve_probe, data, name, info)
    former = await context.probes.get(info.name, name)
    if former is not None and former.watch is not None:
        check_action(made, former.watch, "thresholds", info)
        made = msgspec.structs.replace(made, watch=former.watch)
    former = await context.probes.put(made, blobs)
    if former is None:
        where = f"{context.settings.public_url.rstrip('/')}/v1/probes/{name}"
        return Response(made, status_code=201, headers={"Location": where})
    return Response(
        msgspec.structs.replace(
            made, replaced=former.digest if former.digest != made.digest else ""
        ),
        status_code=200,
    )


@get("/v1/probes", opt=needs("read"), summary="List probes", responses=ERRORS)
async def list_probes(request: JsonRequest, model: Model = None) -> ProbePage:
    context = context_of(request)
    return ProbePage(probes=await context.probes.of_model((await context.the_model(model)).name))


@get("/v1/probes/{name:str}", opt=needs("read"), summary="Get a probe", responses=ERRORS)
async def get_probe(name: Name, request: JsonRequest, model: Model = None) -> Probe:
    context = context_of(request)
    return await _known(context, (await context.the_model(model)).name, name)


@delete(
    "/v1/probes/{name:str}",
    opt=needs("steer-global"),
    status_code=204,
    summary="Delete a probe",
    description="Requests accepted earlier keep it.",
    responses=ERRORS,
)
async def delete_probe(name: Name, request: JsonRequest, model: Model = None) -> None:
    context = context_of(request)
    info = await context.the_model(model)
    if not await context.probes.delete(info.name, name):
        raise await _unknown(context, info.name, name)


@put(
    "/v1/probes/{name:str}/watch",
    opt=needs("steer-global"),
    status_code=200,
    summary="Let a probe watch all traffic",
    description=(
        "It scores every request to the model that is accepted from now on, also those "
        "of other tenants."
    ),
    responses={**ERRORS, 409: PROBLEM, 415: PROBLEM},
)
async def watch(
    name: Name, data: JSONBody[WatchRequest], request: JsonRequest, model: Model = None
) -> Probe:
    context = context_of(request)
    info = await context.the_model(model)
    probe = await _known(context, info.name, name)
    if data.action == "steer":
        raise invalid(
            "action",
            ("'steer' is not valid for all traffic: a request asks for it, and names a module"),
            allowed="none, flag, stop",
        )
    check_action(probe, data.action, "action", info)
    probe = msgspec.structs.replace(probe, watch=data.action)
    await context.probes.put(probe, {})
    return probe


@delete(
    "/v1/probes/{name:str}/watch",
    opt=needs("steer-global"),
    status_code=200,
    summary="End a probe's watch",
    responses={**ERRORS, 409: PROBLEM},
)
async def unwatch(name: Name, request: JsonRequest, model: Model = None) -> Probe:
    context = context_of(request)
    info = await context.the_model(model)
    probe = msgspec.structs.replace(await _known(context, info.name, name), watch=None)
    await context.probes.put(probe, {})
    return probe


async def _known(context: AppContext, model: str, name: str) -> Probe:
    probe = await context.probes.get(model, name)
    if probe is None:
        raise await _unknown(context, model, name)
    return probe


async def _unknown(context: AppContext, model: str, name: str) -> MidstreamError:
    return unknown("probe", name, model, await context.probes.names(model))


ROUTES: list[Any] = [put_probe, list_probes, get_probe, delete_probe, watch, unwatch]
