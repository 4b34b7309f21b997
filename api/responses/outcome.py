"""Answers with the outcome of a job: a failed job is a problem document with its status, never a
success.
"""

from typing import Any

import msgspec
from litestar import Response

from ...broker.ledger.jobs.ledger import JobSnapshot
from ...schemas.base.errors import MidstreamError, Problem
from ...schemas.jobs.jobs import (
    TERMINAL,
    JobProblem,
    JobView,
    State,
)
from ...schemas.jobs.results import JobResult
from ..context import AppContext
from ..web import problems
from ..web.body import JsonRequest
from ..web.problems import JOB_HEADER

#: States that cannot end a wait for a job's outputs.
UNDER_WAY = frozenset({"queued", "running"})
#: States that cannot end a wait for a job's end; `generated`: only receipts are awaited.
LIVE = UNDER_WAY | {"generated"}
#: The version of a job that has only been accepted, and is queued.
ACCEPTED = 1
#: Seconds after which a client should look again at a job that is not over.
RETRY_AFTER_S = 1


def is_over(view: JobView) -> bool:
    return view.state in TERMINAL


def etag(version: int) -> str:
    return f'"{version}"'


def matches(header: str | None, tag: str) -> bool:
    """Return whether `If-None-Match` names this tag (weakly compared, as RFC 9110 says for GET)."""
    if header is None:
        return False
    return header.strip() == "*" or any(
        given.strip().removeprefix("W/") == tag for given in header.split(",")
    )


def failure_of(view: JobView) -> Problem | None:
    """Return the problem of an ended job without a result; None for another job."""
    instance = f"/v1/jobs/{view.id}"
    if view.state is State.SUCCEEDED or not is_over(view):
        return None
    if view.state is State.EXPIRED:
        return MidstreamError("gone", "the result was deleted after its retention time").problem(
            instance
        )
    if view.error is not None:
        return msgspec.structs.replace(view.error, instance=instance)
    return MidstreamError("conflict", f"the job was {view.state}, so it has no result").problem(
        instance
    )


def not_ready(view: JobView) -> MidstreamError:
    return MidstreamError(
        "conflict",
        f"the job is {view.state}: it has no result yet",
        hint=f"wait with GET /v1/jobs/{view.id}?wait=30",
    )


def failed(request: JsonRequest, problem: Problem, headers: dict[str, str]) -> Response[Any]:
    """Return the response for a failed job, or for one that is accepted and cannot be waited for.

    A retry would run the job again, so a header stops OpenAI's clients from retrying.
    """
    return problems.answer(request, problem, {**headers, "x-should-retry": "false"})


def accepted(
    context: AppContext, view: JobView, headers: dict[str, str] | None = None
) -> Response[Any]:
    """Return 202 with the job's address: the job is durable."""
    where = {
        "Location": context.job_url(view.id),
        "Retry-After": str(RETRY_AFTER_S),
        "ETag": etag(view.version),
        JOB_HEADER: view.id,
    }
    return Response(view, status_code=202, headers={**where, **(headers or {})})


async def result_of(context: AppContext, job_id: str) -> JobResult:
    """Return the outputs and receipts so far. Raises `gone`, `not_found`."""
    return await context.waiting.patiently(lambda: context.ledger.result(job_id))


async def finished(
    request: JsonRequest,
    context: AppContext,
    outcome: JobSnapshot,
    headers: dict[str, str] | None = None,
) -> Response[Any]:
    """Return the answer for a job that is over: 200 with its result, or its problem and status."""
    view = outcome.view
    headers = {JOB_HEADER: view.id, "Location": context.job_url(view.id), **(headers or {})}
    problem = failure_of(view)
    if problem is not None:
        if view.probed and view.state is State.FAILED:
            problem = JobProblem(
                **msgspec.structs.asdict(problem),
                probes=(await result_of(context, view.id)).probes,
            )
        return failed(request, problem, headers)
    result = outcome.result or await result_of(context, view.id)
    return Response(result, status_code=200, headers={**headers, "ETag": etag(view.version)})
