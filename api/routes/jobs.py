"""Routes of jobs: submit, get, list, follow, fetch the result, cancel."""

import re
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, NamedTuple

from litestar import Response, get, post
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.datastructures import ResponseSpec
from litestar.params import HeaderParameter, JSONBody, PathParameter, QueryParameter

from ...broker.ledger.jobs.ledger import JobSnapshot, new_job_id
from ...schemas.access.keys import Caller, Scope
from ...schemas.base.errors import MidstreamError, Problem, invalid, shortened
from ...schemas.base.limits import (
    MAX_HEADER,
    MAX_IDEMPOTENCY_KEY,
    MAX_MODULE_NAME,
    MAX_NAME,
    MAX_PAGE,
    MAX_TAG,
    MAX_WAIT_S,
)
from ...schemas.base.records import now
from ...schemas.jobs.job_requests import (
    SHOWN_PROMPT,
    SHOWN_PROMPTS,
    Idempotency,
    JobRequestView,
    ShownPrompt,
)
from ...schemas.jobs.jobs import (
    Job,
    JobPage,
    JobPlan,
    JobRequest,
    JobView,
    Sampling,
    State,
)
from ...schemas.jobs.kinds import KINDS, installed, kind_of
from ...schemas.jobs.models import ModelInfo
from ...schemas.jobs.results import JobResult
from ...schemas.prompts.sites import asked_names
from ..context import AppContext, unless_client_leaves
from ..resolve.admission.admission import handled
from ..resolve.prompts.request_parsing import ParsedRequest, parse_job
from ..responses import events
from ..responses.outcome import (
    ACCEPTED,
    LIVE,
    accepted,
    etag,
    failed,
    finished,
    is_over,
    matches,
    not_ready,
)
from ..web import problems
from ..web.audit import audited, nothing
from ..web.auth import needs, seen, tenant_asked
from ..web.body import JsonRequest
from ..web.middleware import released
from ..web.open_calls import EVENTS

WAIT = re.compile(r"\s*wait\s*=\s*\"?(\d{1,9})\"?\s*")

PROBLEM = ResponseSpec(
    Problem,
    media_type=problems.MEDIA_TYPE,
    description="The error, with the field's path",
    generate_examples=False,
)
ERRORS = {400: PROBLEM, 404: PROBLEM, 503: PROBLEM}
#: The decorator of a route that shows the caller's own objects.
reads = partial(get, opt=needs("read"), responses=ERRORS)
#: 409, 500 and 504 may also be a job's own failure, if the response was held for it.
SUBMIT_ERRORS = {**ERRORS, **dict.fromkeys((409, 413, 415, 422, 429, 500, 504, 507), PROBLEM)}
HELD = ResponseSpec(
    JobResult, description="The result, with `Prefer: wait=N`", generate_examples=False
)

JobId = Annotated[str, PathParameter(max_length=MAX_NAME, description="The job's id")]
WaitParameter = Annotated[
    float | None,
    QueryParameter(
        ge=0,
        le=MAX_WAIT_S,
        description=(
            "Seconds to hold the response: until the job ends, or with If-None-Match until "
            "it changes"
        ),
    ),
]
Known = Annotated[
    str | None,
    HeaderParameter(name="If-None-Match", max_length=MAX_HEADER, description="The client's ETag"),
]
Whose = Annotated[
    str | None,
    QueryParameter(
        max_length=MAX_TAG, description="Only this tenant's; other tenants require scope `admin`"
    ),
]
IdempotencyKey = Annotated[
    str | None,
    HeaderParameter(
        name="Idempotency-Key",
        max_length=MAX_IDEMPOTENCY_KEY,
        description="Repeated submissions with one key return the same job",
    ),
]
Prefer = Annotated[
    str | None,
    HeaderParameter(
        name="Prefer",
        max_length=MAX_HEADER,
        description=(
            "`wait=N`: hold the response for up to N seconds; `respond-async` alone: do "
            "not hold it (the default)"
        ),
    ),
]
Last = Annotated[
    str | None,
    HeaderParameter(
        name="Last-Event-ID", max_length=MAX_NAME, description="Id of the last event received"
    ),
]
DryRun = Annotated[
    bool,
    QueryParameter(
        description="Run nothing: 200 with the plan, such as how many layers are computed, or the "
        "errors of the submission"
    ),
]

PageSize = Annotated[int, QueryParameter(ge=1, le=MAX_PAGE)]
CursorParameter = Annotated[
    str | None, QueryParameter(max_length=MAX_NAME, description="`next` of the previous page")
]
ModelFilter = Annotated[
    str | None,
    QueryParameter(max_length=MAX_NAME, description="Optional while only one model is served"),
]


async def info_of(context: AppContext, model: ModelFilter = None) -> ModelInfo:
    """Provide the dependency `info` of handlers: the model that the query names, or the only one
    that is served.
    """
    return await context.served.the_model(model)


async def view_of(job_id: JobId, context: AppContext, caller: Caller) -> JobView:
    """Provide the dependency `view` of handlers: the job in the path, if the caller may see it."""
    return seen(caller, await context.ledger.view(job_id))


def preferred_wait(header: str | None) -> float | None:
    """Return the seconds of `Prefer: wait=N`; an unreadable preference is ignored (RFC 7240)."""
    preferences = map(WAIT.fullmatch, (header or "").split(","))
    return next((float(match[1]) for match in preferences if match), None)


def submits(
    path: str,
    *,
    summary: str,
    description: str,
    scope: Scope = "submit",
    held: ResponseSpec = HELD,
) -> Callable[[Callable[..., Any]], HTTPRouteHandler]:
    """Return the decorator of a route that accepts a job: its handler takes a `Submission`.
    `held`: its answer with 200.
    """
    recorded = {} if scope == "submit" else audited("job", nothing)
    return post(
        path,
        opt=needs(scope) | recorded,
        status_code=202,
        summary=summary,
        description=description,
        responses={200: held, **SUBMIT_ERRORS},
    )


class Submission(NamedTuple):
    """The arguments of a route that accepts a job, without the body."""

    request: JsonRequest
    context: AppContext
    caller: Caller
    key: str | None
    prefer: str | None

    @property
    def idempotency(self) -> Idempotency | None:
        return self.request.idempotency(self.key)

    async def known(self) -> str | None:
        """Return the id of the job that was accepted with the same key, if any."""
        return await self.context.repeated(self.idempotency)

    def job(self, kind: str, info: ModelInfo, body: Any, **own: Any) -> Job:
        """Return a job without prompts, whose body has `Handling` and `metadata`."""
        return Job(
            id=new_job_id(),
            kind=kind,
            model=info.name,
            prompts=[],
            sampling=Sampling(max_tokens=1),
            created=now(),
            metadata=body.metadata,
            identity=info.identity,
            queue=KINDS[kind].queue,
            hook_names=asked_names(body),
            **handled(body, self.caller),
            **own,
        )

    async def answer(self, job_id: str) -> Response[JobView]:
        """Return 202 and the job's address; or, if `Prefer` asks, the result of a job over in
        time.
        """
        request = self.request
        context = self.context
        seconds = preferred_wait(self.prefer)
        headers = {} if seconds is None else {"Preference-Applied": f"wait={seconds:.0f}"}
        try:
            held = context.waiting.outcome(
                job_id, is_over, seconds or 0.0, quiet=LIVE, known=ACCEPTED
            )
            outcome = await unless_client_leaves(request, held)
            if not (seconds and is_over(outcome.view)):
                return accepted(context, outcome.view, headers)
            released(outcome)
            return await finished(request, context, outcome, headers)
        except MidstreamError as error:  # the job is accepted nevertheless: return its address
            url = context.job_url(job_id)
            return failed(request, error.problem(instance=url), {"Location": url})


def submission_of(
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    key: IdempotencyKey = None,
    prefer: Prefer = None,
) -> Submission:
    return Submission(request, context, caller, key, prefer)


@submits(
    "/v1/jobs",
    summary="Submit a job",
    description="The job is durable once the response is sent. `Prefer: wait=N` holds the "
    "response and returns the result with 200 "
    "if the job ends in time; repeating a submission with the same "
    "`Idempotency-Key` returns the same job.",
    held=ResponseSpec(
        JobResult | JobPlan,  # type: ignore[arg-type]
        description="The result, with `Prefer: wait=N`; or the plan, with `dry_run`",
        generate_examples=False,
    ),
)
async def submit_job(
    data: JSONBody[JobRequest], submission: Submission, dry_run: DryRun = False
) -> Response[JobView]:
    parsed = await submission.request.computed(parse_job, data)
    row = installed(parsed.kind)
    if dry_run:
        if row.submit:
            raise invalid("dry_run", f"is not served for jobs of kind {parsed.kind!r}")
        planned: Any = await submission.context.plan(parsed, submission.caller)
        return Response(planned, status_code=200)
    submit = row.load("submit") if row.submit else submit_prompts
    return await submission.answer(await submit(parsed, submission))


async def submit_prompts(parsed: ParsedRequest, submission: Submission) -> str:
    return await submission.context.submit(parsed, submission.idempotency, submission.caller)


@reads("/v1/jobs", summary="List jobs, newest first")
async def list_jobs(
    context: AppContext,
    caller: Caller,
    job_state: Annotated[
        State | None, QueryParameter(name="state", description="Only jobs in this state")
    ] = None,
    model: Annotated[
        str | None, QueryParameter(max_length=MAX_NAME, description="Only jobs of this model")
    ] = None,
    policy: Annotated[
        str | None,
        QueryParameter(max_length=MAX_MODULE_NAME, description="Only jobs that triggered it"),
    ] = None,
    flagged: Annotated[
        bool | None,
        QueryParameter(description="Only jobs that a probe or a policy flagged, or no others"),
    ] = None,
    limit: PageSize = 50,
    cursor: CursorParameter = None,
    tenant: Whose = None,
) -> JobPage:
    whose = tenant_asked(caller, tenant)
    page = await context.ledger.list(
        job_state,
        model,
        limit,
        cursor,
        tenant=whose,
        policy=policy,
        flagged=flagged,
    )
    await context.ledger.written()
    return page


@reads(
    "/v1/jobs/{job_id:str}",
    summary="Get a job",
    responses={304: ResponseSpec(None, description="Unchanged since If-None-Match"), **ERRORS},
)
async def get_job(
    job_id: JobId,
    request: JsonRequest,
    context: AppContext,
    caller: Caller,
    wait: WaitParameter = None,
    known: Known = None,
) -> Response[JobView]:

    def news(view: JobView) -> bool:
        seen(caller, view)
        changed = known is not None and not matches(known, etag(view.version))
        return is_over(view) or changed

    held = context.waiting.outcome(job_id, news, wait or 0.0, with_result=False)
    view = (await unless_client_leaves(request, held)).view
    if is_over(view):
        await context.ledger.written()
    headers = {"ETag": etag(view.version), "Cache-Control": "no-cache"}
    if matches(known, etag(view.version)):
        return Response(None, status_code=304, headers=headers)  # type: ignore[arg-type]
    return Response(view, headers=headers)


@get(
    "/v1/jobs/{job_id:str}/events",
    summary="Stream a job's events",
    description="Server-sent events: `state`, `token`, `output`, `receipt`; for sweeps also "
    "`start`, `cell` and `summary`; `done` is the "
    "last, or `error` with a problem if the key is revoked or expires. Resume with "
    "`Last-Event-ID`; "
    "204 if the job has ended and no event follows.",
    media_type=events.MEDIA_TYPE,
    opt=needs("read") | EVENTS,
    responses={
        204: ResponseSpec(None, description="The job has ended and no event follows"),
        **ERRORS,
    },
)
async def job_events(
    view: JobView, context: AppContext, caller: Caller, last: Last = None
) -> Response[Any]:
    after = events.resume_point(last)
    if is_over(view) and not await context.ledger.events(view.id, after, 1):
        await context.ledger.written()
        return Response(None, status_code=204)  # an EventSource stops reconnecting at this
    return events.stream(
        context,
        caller,
        context.job_url(view.id),
        partial(events.of_job, context, view.id, after),
        kinds=("unauthorized",),
    )


@reads(
    "/v1/jobs/{job_id:str}/result",
    summary="Get a job's result",
    responses={409: PROBLEM, 410: PROBLEM, 500: PROBLEM, 504: PROBLEM, **ERRORS},
)
async def job_result(
    view: JobView, request: JsonRequest, context: AppContext
) -> Response[JobResult]:
    if not is_over(view):
        raise not_ready(view)
    await context.ledger.written()
    return await finished(request, context, JobSnapshot(view))


@reads(
    "/v1/jobs/{job_id:str}/request",
    summary="Get the request that a job came from",
    description="The body as it was sent, up to 16 KiB, and the beginning of the prompts.",
)
async def job_request(view: JobView, context: AppContext) -> JobRequestView:
    job, body = await context.ledger.request(view.id)
    return JobRequestView(
        id=view.id,
        path=kind_of(view.kind).path,
        body=body,
        prompts=[
            ShownPrompt(
                text=None if prompt.text is None else shortened(prompt.text, SHOWN_PROMPT),
                tokens=len(prompt.token_ids),
            )
            for prompt in job.prompts[:SHOWN_PROMPTS]
        ],
        prompts_total=len(job.prompts),
    )


@post(
    "/v1/jobs/{job_id:str}/cancel",
    opt=needs("submit"),
    status_code=202,
    summary="Cancel a job",
    responses={409: PROBLEM, **ERRORS},
)
async def cancel_job(view: JobView, context: AppContext) -> Response[JobView]:
    cancelled = await context.cancel(view.id)
    return Response(
        cancelled,
        status_code=202,
        headers={"Location": context.job_url(view.id), "ETag": etag(cancelled.version)},
    )


ROUTES = [submit_job, list_jobs, get_job, job_events, job_result, job_request, cancel_job]
