"""Routes of attributions: grids that gradients estimate, with some cells computed exactly."""

from litestar import Response, get, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from ...broker.ledger.jobs.sweeps import Sweeps
from ...schemas.access.keys import Caller
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import from_json
from ...schemas.jobs.attributions import AttributionRequest, AttributionResult
from ...schemas.jobs.jobs import JobResult, JobView
from ...schemas.jobs.sweep_views import AttributionView, SweepPlan
from ..context import AppContext
from ..web.auth import needs, seen
from ..web.body import JsonRequest
from .jobs import ERRORS, PROBLEM, SUBMIT_ERRORS, JobId, Key, Prefer, answer_submission
from .sweeps import plan_of, submit_sweep


@post(
    "/v1/attributions",
    opt=needs("submit"),
    status_code=202,
    summary="Submit an attribution: a grid estimated by gradients and checked by exact patches",
    description=(
        "One job: a gradient worker estimates every cell, then vLLM workers compute the cells "
        "of `verify` exactly. Follow, fetch and cancel it like any job."
    ),
    responses={
        200: ResponseSpec(
            JobResult, description="The result, with `Prefer: wait=N`", generate_examples=False
        ),
        **SUBMIT_ERRORS,
    },
)
async def post_attribution(
    data: JSONBody[AttributionRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: Key = None,
    prefer: Prefer = None,
) -> Response[JobView]:
    job_id = await submit_sweep(context, data, request.idempotency(key), caller)
    return await answer_submission(request, context, job_id, prefer)


@post(
    "/v1/attributions/plan",
    opt=needs("read"),
    status_code=200,
    summary="Check an attribution without running it",
    description="Takes a body of `POST /v1/attributions`; see `POST /v1/sweeps/plan`.",
    responses=SUBMIT_ERRORS,
)
async def post_attribution_plan(
    data: JSONBody[AttributionRequest], context: AppContext, caller: Caller
) -> SweepPlan:
    return await plan_of(data, context, caller)


@get(
    "/v1/attributions/{job_id:str}",
    opt=needs("read"),
    summary="Get an attribution: its job, its request and its grids so far",
    responses={410: PROBLEM, **ERRORS},
)
async def get_attribution(job_id: JobId, context: AppContext, caller: Caller) -> AttributionView:
    view = seen(caller, await context.ledger.view(job_id))
    if view.kind != "attribution":
        raise MidstreamError("not_found", f"job {job_id} is not an attribution")
    raw, result, last_event = await Sweeps(context.ledger).standing(job_id)
    await context.ledger.written()
    assert isinstance(result, AttributionResult)
    request = from_json(raw, AttributionRequest)
    return AttributionView(job=view, request=request, result=result, last_event=last_event)


ROUTES = [post_attribution, post_attribution_plan, get_attribution]
