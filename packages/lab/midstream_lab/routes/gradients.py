"""What `/v1/jobs` does with a request of gradient rows."""

from midstream.api.context import AppContext
from midstream.api.resolve.admission.names import Referents, artifacts_of
from midstream.api.resolve.prompts.request_parsing import ParsedRequest
from midstream.api.routes.jobs import Submission
from midstream.api.web.request_context import current
from midstream.broker.ledger.jobs.ledger import new_job_id
from midstream.schemas.jobs.models import ModelInfo

from ..admit.gradients import admit_gradients


async def submit(parsed: ParsedRequest, submission: Submission) -> str:
    """Submit a job of gradient rows like `AppContext.submit`; return its id."""
    context = submission.context
    caller = submission.caller
    info = await context.served.model(parsed.model)
    job_id = await submission.known()
    if job_id is not None:
        return job_id
    codec = await context.served.codec(info)
    job_id = new_job_id()
    named = await _named(parsed, info, context)
    admitted = await submission.request.resolved(
        admit_gradients(parsed, info, codec, job_id, named, caller)
    )
    return await context.accept(
        admitted.job, info, {}, submission.idempotency, admitted.pinned, current().body
    )


async def _named(parsed: ParsedRequest, info: ModelInfo, context: AppContext) -> Referents:
    """Return what a request of gradient rows names: it runs the model as it is."""
    found = await context.names.look_up(info, *artifacts_of(parsed, info.extensions))
    return Referents(found=found._replace(gradients=await context.ledger.gradients(info.name)))
