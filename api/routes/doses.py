"""Route of doses, which are jobs of ordinary prompts."""

from litestar import Response
from litestar.params import JSONBody

from ...schemas.jobs.doses import DoseRequest
from ...schemas.jobs.jobs import JobView
from ..resolve.admission.doses import expanded, parse_dose
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
    job_id = await submission.context.submit(
        parse_dose(data),
        submission.idempotency,
        submission.caller,
        lambda job, info: expanded(job, data, info.num_layers),
    )
    return await submission.answer(job_id)


ROUTES = [post_dose]
