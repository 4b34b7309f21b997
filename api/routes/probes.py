"""Routes of probes: registration, listing, removal."""

from typing import Annotated, Any

import anyio.to_thread
from litestar import Response, put
from litestar.params import JSONBody

from ...schemas.artifacts.probes import PROBES, Probe, ProbeRequest
from ..context import AppContext
from ..resolve.readings.probes import resolve_probe
from ..web.auth import needs
from .jobs import PROBLEM
from .registered import Named, name_parameter, name_routes, put_response, put_responses

Name = Annotated[str, name_parameter("probe")]


@put(
    "/v1/probes/{name:str}",
    opt=needs("steer-global"),
    status_code=200,
    summary="Register or replace a probe",
    description="A linear map of a row to a score for each label. Requests accepted earlier "
    "keep the previous version, and so do policies.",
    responses={**put_responses(Probe), 409: PROBLEM},
)
async def put_probe(
    name: Name, data: JSONBody[ProbeRequest], context: AppContext
) -> Response[Probe]:
    info = await context.the_model(data.model)
    made, blobs = await anyio.to_thread.run_sync(resolve_probe, data, name, info)
    made, former = await context.probes.put(info.name, name, lambda _: made, blobs)
    return put_response(context, PROBES, made, former)


ROUTES: list[Any] = [
    put_probe,
    *name_routes(
        Named(PROBES, "a probe", "probes", "probe"),
        lambda context: context.probes,
        "Requests accepted earlier keep it.",
    ),
]
