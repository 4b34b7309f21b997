"""Routes of replays."""

from typing import Annotated

from litestar import Response
from litestar.params import JSONBody

from midstream.api.context import AppContext
from midstream.api.responses.outcome import is_over
from midstream.api.routes.jobs import JobId, Submission, reads, submits
from midstream.api.routes.registered import name_parameter
from midstream.api.web.auth import tenant_asked
from midstream.broker.ledger.named.registry import Registry
from midstream.schemas.access.keys import Caller
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import to_json
from midstream.schemas.jobs.jobs import JobView, State
from midstream.schemas.jobs.models import ModelInfo
from midstream.schemas.requests.policies import POLICIES

from ..replays import ReplayRequest, ReplayView, ReplayWork
from .replay_admission import admitted
from .replay_outcome import compared

PolicyName = Annotated[str, name_parameter("policy")]


@submits(
    "/v1/policies/{name:str}/replays",
    scope="steer-global",
    summary="Replay prompts under another version of a policy",
    description=(
        "Reads the newest prompts that are kept and that the caller may see, under two versions or "
        "another condition. Generates nothing, and takes no action. A job, whose comparison is "
        "`GET /v1/policies/{name}/replays/{id}`."
    ),
)
async def post_replay(
    name: PolicyName, data: JSONBody[ReplayRequest], submission: Submission, info: ModelInfo
) -> Response[JobView]:
    context = submission.context
    caller = submission.caller
    job_id = await submission.known()
    if job_id is None:
        policy = await Registry(context.ledger, POLICIES).known(info.name, name)
        tenant = tenant_asked(caller, None)
        made = await submission.request.resolved(
            admitted(policy, data, info, context, caller, tenant)
        )
        job_id = await context.accept(
            made.job,
            info,
            made.blobs,
            submission.idempotency,
            made.pinned,
            request=to_json(data),
        )
    return await submission.answer(job_id)


@reads("/v1/policies/{name:str}/replays/{job_id:str}", summary="Get a replay of a policy")
async def get_replay(
    name: PolicyName, job_id: JobId, view: JobView, context: AppContext, caller: Caller
) -> ReplayView:
    job = await context.ledger.job(job_id)
    if not isinstance(job.opened, ReplayWork) or job.opened.policy != name:
        raise MidstreamError("not_found", f"{job_id} is no replay of the policy {name!r}")
    probes = []
    if view.state is State.SUCCEEDED:
        probes = (await context.ledger.result(job_id)).probes
    elif is_over(view) and view.error is not None:
        raise MidstreamError("conflict", f"the replay {view.state}: {view.error.detail}")
    codec = await context.served.codec(await context.served.model(view.model))
    return await compared(view, job, probes, codec, caller)
