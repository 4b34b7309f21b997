"""Routes of fits, and of doses, which measure what fitted modules do."""

from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from litestar import Response
from litestar.params import JSONBody

from midstream.api.resolve.prompts.tokenizer import Codec
from midstream.api.routes.jobs import Submission, submits
from midstream.schemas.base.records import to_json
from midstream.schemas.jobs.jobs import JobView
from midstream.schemas.jobs.models import ModelInfo

from ..admit.doses import dose_layers, expanded, parse_dose
from ..admit.fits import resolve_fit, resolve_lens_fit
from ..admit.gradient_rows import check_gradients
from ..records.doses import DoseRequest
from ..records.fits import FitRequest, FitWork, LensFitRequest, StoredFit, StoredModuleFit


@submits(
    "/v1/doses",
    summary="Weigh the effect of steering against its damage",
    description=(
        "Steers a few prompts at several scales and layers, and measures the effect, the loss on "
        "held-out texts, repetition and the relative sizes of the edits. A job: follow, fetch and "
        "cancel it like any job; its result has `dose`."
    ),
)
async def post_dose(data: JSONBody[DoseRequest], submission: Submission) -> Response[JobView]:
    layers = dose_layers(data, await submission.context.served.model(data.model))
    job_id = await submission.context.submit(
        parse_dose(data),
        submission.idempotency,
        submission.caller,
        lambda job: expanded(job, data, layers),
    )
    return await submission.answer(job_id)


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
    return await _submit_fit(resolve_fit, data, submission)


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
    return await _submit_fit(resolve_lens_fit, data, submission)


async def _submit_fit(
    resolve: Callable[[B, ModelInfo, Codec], Coroutine[Any, Any, StoredFit]],
    data: B,
    submission: Submission,
) -> Response[JobView]:
    """Accept a fit as a job, and answer as any submission."""
    context = submission.context
    info = await context.served.model(data.model)
    job_id = await submission.known()
    if job_id is None:
        resolving = resolve(data, info, await context.served.codec(info))
        fit = await submission.request.resolved(resolving)
        steering = await context.steering.current(info.name)
        hooks = {"hook": fit.hook} if isinstance(fit, StoredModuleFit) else {}
        gradients = await context.ledger.gradients(info.name)
        check_gradients(hooks, info, gradients, bool(steering.entries))
        job = submission.job("fit", info, data, work=FitWork(fit=fit).packed)
        job_id = await context.accept(job, info, {}, submission.idempotency, request=to_json(data))
    return await submission.answer(job_id)


ROUTES: list[Any] = [post_dose, post_fit, post_lens_fit]
