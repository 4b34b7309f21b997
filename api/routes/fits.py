"""Routes of fits: examples are resolved on the model, and the fit is accepted as a job that a
gradient worker runs.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from litestar import Response, post
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import JSONBody

from ...broker.ledger.jobs.ledger import new_job_id
from ...schemas.access.keys import Caller
from ...schemas.base.records import now, to_json
from ...schemas.jobs.fits import FitRequest, LensFitRequest, StoredFit, StoredModuleFit
from ...schemas.jobs.jobs import Job, JobResult, JobView, Sampling
from ...schemas.jobs.models import ModelInfo
from ...schemas.requests.attributions import GRADIENTS
from ..context import AppContext
from ..resolve.admission.admission import handled
from ..resolve.admission.fits import resolve_fit, resolve_lens_fit
from ..resolve.prompts.tokenizer import Codec
from ..resolve.sweeps.attribution import check_gradients
from ..web.auth import needs
from ..web.body import JsonRequest
from .jobs import SUBMIT_ERRORS, Key, Prefer, answer_submission

#: Body of a fit.
B = TypeVar("B", FitRequest, LensFitRequest)
RESPONSES = {
    200: ResponseSpec(
        JobResult, description="The result, with `Prefer: wait=N`", generate_examples=False
    ),
    **SUBMIT_ERRORS,
}


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
    responses=RESPONSES,
)
async def post_fit(
    data: JSONBody[FitRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: Key = None,
    prefer: Prefer = None,
) -> Response[JobView]:
    return await _submit(resolve_fit, data, request, context, caller, key, prefer)


@post(
    "/v1/jacobians/fit",
    opt=needs("steer-global"),
    status_code=202,
    summary="Fit a Jacobian lens to a corpus",
    description=(
        "Computes a Jacobian lens from prompts, writes it below the setting `lens_dir`, and "
        "registers it for all tenants. A job on the model's gradient worker, which shares that "
        "folder with the service; its result has `fit`."
    ),
    responses=RESPONSES,
)
async def post_lens_fit(
    data: JSONBody[LensFitRequest],
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: Key = None,
    prefer: Prefer = None,
) -> Response[JobView]:
    return await _submit(resolve_lens_fit, data, request, context, caller, key, prefer)


async def _submit(
    resolve: Callable[[B, ModelInfo, Codec], Awaitable[StoredFit]],
    data: B,
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: str | None,
    prefer: str | None,
) -> Response[JobView]:
    """Accept a fit as a job, and answer as any submission."""
    info, idempotency = await context.model(data.model), request.idempotency(key)
    if not (idempotency and (job_id := await context.ledger.repeated(idempotency))):
        fit = await resolve(data, info, await context.codec(info))
        state = await context.model_state(info.name, [], caller)
        gradients = await context.ledger.gradients(info)
        hooks = {"hook": fit.hook} if isinstance(fit, StoredModuleFit) else {}
        check_gradients(hooks, info, gradients, bool(state.global_steering.entries))
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


ROUTES = [post_fit, post_lens_fit]
