"""Routes of probes: registration, listing, removal, and which of them watch all traffic."""

from typing import Annotated, Any

import anyio.to_thread
import msgspec
from litestar import Response, delete, put
from litestar.params import JSONBody

from ...schemas.artifacts.probes import PROBES, Probe, ProbeRequest, WatchRequest
from ...schemas.base.errors import invalid
from ..context import AppContext
from ..resolve.readings.probes import check_action, resolve_probe
from ..web.auth import needs
from .jobs import ERRORS, PROBLEM, Model
from .registered import Named, name_parameter, name_routes, put_response, put_responses

Name = Annotated[str, name_parameter("probe")]


@put(
    "/v1/probes/{name:str}",
    opt=needs("steer-global"),
    status_code=200,
    summary="Register or replace a probe",
    description="A linear map of a row to a score for each label. Requests accepted earlier "
    "keep the previous version; a probe that watches "
    "all traffic continues with the new one.",
    responses={**put_responses(Probe), 409: PROBLEM},
)
async def put_probe(
    name: Name, data: JSONBody[ProbeRequest], context: AppContext
) -> Response[Probe]:
    info = await context.the_model(data.model)
    made, blobs = await anyio.to_thread.run_sync(resolve_probe, data, name, info)
    former = await context.probes.get(info.name, name)
    if former is not None and former.watch is not None:
        check_action(made, former.watch, "thresholds", info)
        made = msgspec.structs.replace(made, watch=former.watch)
    former = await context.probes.put(made, blobs)
    return put_response(context, PROBES, made, former)


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
    name: Name, data: JSONBody[WatchRequest], context: AppContext, model: Model = None
) -> Probe:
    info = await context.the_model(model)
    probe = await context.probes.known(info.name, name)
    if data.action == "steer":
        raise invalid(
            "action",
            "'steer' is not valid for all traffic: only a request can steer, by a module it names",
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
async def unwatch(name: Name, context: AppContext, model: Model = None) -> Probe:
    info = await context.the_model(model)
    probe = msgspec.structs.replace(await context.probes.known(info.name, name), watch=None)
    await context.probes.put(probe, {})
    return probe


ROUTES: list[Any] = [
    put_probe,
    watch,
    unwatch,
    *name_routes(
        Named(PROBES, "a probe", "probes", "probe"),
        lambda context: context.probes,
        "Requests accepted earlier keep it.",
    ),
]
