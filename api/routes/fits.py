"""Routes of fits: examples are resolved on the model, and the fit is accepted as a job that a
gradient worker runs.
"""

from litestar import Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from ...broker.ledger.jobs.ledger import new_job_id
from ...schemas.access.keys import Caller
from ...schemas.base.records import now, to_json
from ...schemas.jobs.fits import FitRequest
from ...schemas.jobs.jobs import Job, JobResult, JobView, Sampling
from ...schemas.requests.attributions import GRADIENTS
from ..context import AppContext
from ..resolve.admission.admission import handled
from ..resolve.admission.fits import resolve_fit
from ..resolve.sweeps.attribution import check_gradients
from ..web.auth import needs
from ..web.body import JsonRequest
from .jobs import SUBMIT_ERRORS, Key, Prefer, answer_submission


@post(
    "/v1/modules/fit",
    opt=needs("submit"),
    status_code=202,
    summary="Fit a module to examples",
    description=(
        "Learns a direction or an edit from examples, measures its effect on held-out examples, "
        "and registers it as a named module. A job on the model's gradient worker: follow, fetch "
        "and cancel it like any job; its result has `fit`."
    ),
    responses={
        200: ResponseSpec(
            JobResult, description="The result, with `Prefer: wait=N`", generate_examples=False
        ),
        **SUBMIT_ERRORS,
    },
)
async def post_fit(
    data: JSONBody[FitRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: Key = None,
    prefer: Prefer = None,
) -> Response[JobView]:
    info, idempotency = await context.model(data.model), request.idempotency(key)
    if not (idempotency and (job_id := await context.ledger.repeated(idempotency))):
        fit = await resolve_fit(data, info, await context.codec(info))
        state = await context.model_state(info.name, [], caller)
        gradients = await context.ledger.gradients(info)
        check_gradients({"hook": fit.hook}, info, gradients, bool(state.global_steering.entries))
        job = Job(
            id=new_job_id(),
            kind="fit",
            model=info.name,
            prompts=[],
            sampling=Sampling(max_tokens=1),
            created=now(),
            metadata=data.metadata,
            fit=fit,
            identity=info.identity,
            queue=GRADIENTS,
            **handled(data, caller),
        )
        job_id = await context.accept(job, info, {}, idempotency, request=to_json(data))
    return await answer_submission(request, context, job_id, prefer)


ROUTES = [post_fit]
