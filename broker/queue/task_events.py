"""Celery task events for job states, so that Flower and the ledger agree.

Workers emit them for tasks that end with their jobs; Flower's own process emits them for jobs that
end later, when their receipts have arrived, and for tasks whose worker could not.
A task is one attempt at a job, and its state in Flower is the job's:

    succeeded                       SUCCESS
    failed                          FAILURE, with the problem
    cancelled, aborted, expired     REVOKED, as is any other end
    back in the queue               RETRY: another attempt in a new task, or the same message again
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from ...schemas.base import Problem, from_json
from ...schemas.jobs.jobs import TERMINAL, State

SUCCEEDED = "task-succeeded"
FAILED = "task-failed"
RETRIED = "task-retried"
REVOKED = "task-revoked"


class JobEnding(NamedTuple):
    """State of a job in the ledger, and how it ended."""

    state: State  # `expired` if the ledger no longer has the job
    problem: Problem | None = None  # of a failed job
    finished: float | None = None  # seconds since the epoch
    settled: bool = False  # it ended after its attempt, by receipts: no worker reports that


def endings(client: redis.Redis, job_ids: Sequence[str]) -> list[JobEnding]:
    """Return the states of these jobs, in one round trip. Raises redis.RedisError."""
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hmget(f"ms:job:{job_id}", "state", "error", "finished", "generated")
    return [_ending(*values) for values in pipe.execute()]


def _ending(
    state: bytes | None, error: bytes | None, finished: bytes | None, generated: bytes | None
) -> JobEnding:
    if state is None:
        return JobEnding(State.EXPIRED)
    return JobEnding(
        State(state.decode()),
        from_json(error, Problem) if error else None,
        float(finished) if finished else None,
        generated is not None and generated != finished,
    )


def event_of(state: State, problem: Problem | None = None) -> tuple[str, dict[str, Any]]:
    """Return type and fields of the event for a job that has ended or is queued again.

    Raises ValueError for a running job, which has no such event.
    """
    match state:
        case State.SUCCEEDED:
            return SUCCEEDED, {"result": repr(state.value)}
        case State.FAILED:
            return FAILED, {"exception": _one_line(problem), "traceback": ""}
        case State.QUEUED:
            return RETRIED, {"exception": "another attempt follows", "traceback": ""}
        case _ if state in TERMINAL:
            return REVOKED, {
                "terminated": state is State.CANCELLED,
                "signum": None,
                "expired": state is State.EXPIRED,
            }
        case _:
            raise ValueError(f"{state} is not a terminal state")


def _one_line(problem: Problem | None) -> str:
    """Return a problem in one line, like an exception's `repr`."""
    reason = f"{problem.title}: {problem.detail}" if problem else "the ledger gives no reason"
    return f"JobFailed({reason!r})"
