"""Routes of fits: examples are resolved on the model, and the fit is accepted as a job that a
gradient worker runs.
"""

from collections.abc import Awaitable, Callable
from typing import TypeVar

from litestar import Response
from litestar.params import JSONBody

from ...schemas.base.records import to_json
from ...schemas.jobs.fits import FitRequest, LensFitRequest, StoredFit, StoredModuleFit
from ...schemas.jobs.jobs import JobView
from ...schemas.jobs.models import ModelInfo
from ...schemas.jobs.works import FitWork
from ..resolve.admission.fits import resolve_fit, resolve_lens_fit
from ..resolve.prompts.tokenizer import Codec
from ..resolve.readings.gradients import check_gradients
from .jobs import Submission, submits

#: Body of a fit.
B = TypeVar("B", FitRequest, LensFitRequest)


@submits(
    "/v1/modules/fit",
    summary="Fit a module to examples",
    description=(
        "Learns a direction or an edit from examples, measures its effect on held-out examples, "
        "and registers it as a named module. A job on the model's gradient worker: follow, fetch "
        "and cancel it like any job; its result has `fit`."
    ),
)
async def post_fit(data: JSONBody[FitRequest], submission: Submission) -> Response[JobView]:
    return await _submit(resolve_fit, data, submission)


@submits(
    "/v1/jacobians/fit",
    scope="steer-global",
    summary="Fit a Jacobian lens to a corpus",
    description=(
        "Computes a Jacobian lens from prompts, writes it below `lenses` in `artifacts_dir`, and "
        "registers it for all tenants. A job on the model's gradient worker, which shares that "
        "folder with the service; its result has `fit`."
    ),
)
async def post_lens_fit(
    data: JSONBody[LensFitRequest], submission: Submission
) -> Response[JobView]:
    return await _submit(resolve_lens_fit, data, submission)


async def _submit(
    resolve: Callable[[B, ModelInfo, Codec], Awaitable[StoredFit]], data: B, submission: Submission
) -> Response[JobView]:
    """Accept a fit as a job, and answer as any submission."""
    context = submission.context
    info, job_id = await context.served.model(data.model), await submission.known()
    if job_id is None:
        fit = await resolve(data, info, await context.served.codec(info))
        _, steering = await context.steering.standing(info.name, [])
        hooks = {"hook": fit.hook} if isinstance(fit, StoredModuleFit) else {}
        gradients = await context.ledger.gradients(info)
        check_gradients(hooks, info, gradients, bool(steering.entries))
        job = submission.job("fit", info, data, work=FitWork(fit=fit))
        job_id = await context.accept(job, info, {}, submission.idempotency, request=to_json(data))
    return await submission.answer(job_id)


ROUTES = [post_fit, post_lens_fit]
