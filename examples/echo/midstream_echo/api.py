"""The route that accepts an echo."""

from dataclasses import replace

import msgspec
from litestar import Response
from litestar.params import JSONBody

from midstream.api.resolve.prompts.request_parsing import parse_job
from midstream.api.routes.jobs import Submission, submits
from midstream.schemas.jobs.jobs import JobRequest, JobView, SamplingRequest
from midstream.schemas.requests.specs import CaptureSpec

from .records import EchoRequest, EchoWork


@submits(
    "/v1/echoes",
    summary="Echo prompts",
    description="A job that answers its prompts' texts, and captures one layer.",
)
async def post_echo(data: JSONBody[EchoRequest], submission: Submission) -> Response[JobView]:
    asked = JobRequest(
        model=data.model,
        prompts=list(data.prompts),
        capture=CaptureSpec(layers=data.layer),
        sampling=SamplingRequest(max_tokens=0),
        metadata=data.metadata,
    )
    parsed = replace(parse_job(asked), kind="echo", handling=data)
    work = EchoWork(layer=data.layer).packed
    job_id = await submission.context.submit(
        parsed,
        submission.idempotency,
        submission.caller,
        lambda job: msgspec.structs.replace(job, work=work),
    )
    return await submission.answer(job_id)


ROUTES = [post_echo]
