"""Route of doses: a request is resolved on the model, and accepted as a job of ordinary prompts."""

import msgspec
from litestar import Response
from litestar.params import JSONBody

from ...schemas.base.records import to_json
from ...schemas.jobs.doses import DoseRequest
from ...schemas.jobs.jobs import JobView, Sampling
from ..resolve.admission.doses import resolve_dose
from ..resolve.readings.probes import probes_of
from .jobs import Submission, submits


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
    context, caller = submission.context, submission.caller
    if (known := await submission.known()) is not None:
        return await submission.answer(known)
    info, watching = await context.ledger.watched_model(data.model)
    info = info or await context.model(data.model)
    asked = [] if data.effect.probe is None else [data.effect.probe]
    probes = await probes_of(asked, info, context.probes, watching)
    named = [] if data.steering.module is None else [data.steering.module]
    state = await context.model_state(info.name, named, caller)
    plan = await resolve_dose(data, info, await context.codec(info), state, probes)
    job = submission.job("dose", info, data, dose=plan.dose)
    job = msgspec.structs.replace(
        job,
        prompts=plan.prompts,
        steering=plan.steering,
        captures=plan.captures,
        probes=plan.probes,
        sampling=Sampling(max_tokens=data.max_tokens),
        modules={name: module.digest for name, module in state.modules.items()},
    )
    pinned = {name for module in state.modules.values() for name in module.tensors}
    pinned |= {name for probe in plan.probes for name in probe.content.tensors}
    job_id = await context.accept(
        job, info, plan.blobs, submission.idempotency, sorted(pinned), to_json(data)
    )
    return await submission.answer(job_id)


ROUTES = [post_dose]
