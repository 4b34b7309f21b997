"""The route of sweeps: a body is resolved on the model, held against the quota of cells, and accepted as a job like any other."""

from litestar import Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from ...broker.ledger.jobs import new_job_id
from ...schemas.base import now
from ...schemas.jobs import Job, JobResult, JobView, Sampling
from ...schemas.keys import Caller
from ...schemas.sweeps import SweepRequest
from ..context import AppContext, context_of
from ..resolve.admission import handled
from ..resolve.loras import named_lora
from ..resolve.sweep_plan import plan_sweep
from ..web.auth import caller_of
from ..web.body import JsonRequest
from .jobs import SUBMIT_ERRORS, Key, Prefer, answer_submission


async def submit_sweep(context: AppContext, body: SweepRequest, idempotency: tuple[str, str] | None, caller: Caller) -> str:
    """As `AppContext.submit`, of a sweep. Raises MidstreamError also with `too_many_cells`."""
    info = await context.model(body.model)
    if idempotency and (known := await context.ledger.repeated(idempotency)):
        return known  # counted already
    lora = await named_lora(body.lora, info, context.loras)
    global_steering = (await context.model_state(info.name, [], caller)).global_steering
    sweep, blobs = await plan_sweep(body, info, await context.codec(info), context.settings, global_steering)
    job = Job(
        id=new_job_id(),
        kind="sweep",
        model=info.name,
        prompts=[],
        sampling=Sampling(max_tokens=1),
        created=now(),
        metadata=body.metadata,
        sweep=sweep,
        lora=lora,
        **handled(body, caller),
    )
    return await context.accept(job, info, blobs, idempotency)


@post(
    "/v1/sweeps",
    status_code=202,
    summary="Submit a sweep of patches",
    description="One job: both prompts of every pair unpatched, then every cell. Follow, fetch and cancel it like any job.",
    responses={200: ResponseSpec(JobResult, description="The result, with `Prefer: wait=N`", generate_examples=False), **SUBMIT_ERRORS},
)
async def post_sweep(data: JSONBody[SweepRequest], request: JsonRequest, key: Key = None, prefer: Prefer = None) -> Response[JobView]:
    context = context_of(request)
    job_id = await submit_sweep(context, data, request.idempotency(key), caller_of(request))
    return await answer_submission(request, context, job_id, prefer)


ROUTES = [post_sweep]
