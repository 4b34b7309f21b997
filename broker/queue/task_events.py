"""Celery task events for job states, so that Flower and the ledger agree.

Workers tell it of their tasks; Flower's own process tells it of tasks whose worker could not. A task carries one attempt at a job,
and its state in Flower is the job's:

    succeeded                       SUCCESS
    failed                          FAILURE, with the problem
    cancelled, aborted, expired     REVOKED, as any other end
    back in the queue               RETRY: another attempt, a task of its own, or the same message again
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from ...schemas.base import from_json
from ...schemas.errors import Problem
from ...schemas.jobs import TERMINAL, State

SUCCEEDED, FAILED, RETRIED, REVOKED = "task-succeeded", "task-failed", "task-retried", "task-revoked"


class JobEnding(NamedTuple):
    """How a job stands in the ledger."""

    state: State  # of what the ledger no longer has: expired
    problem: Problem | None = None  # of a failed one
    finished: float | None = None  # seconds since the epoch


def standings(client: redis.Redis, job_ids: Sequence[str]) -> list[JobEnding]:
    """How these jobs stand, in one round trip. Raises redis.RedisError."""
    pipe = client.pipeline(transaction=False)
    for job_id in job_ids:
        pipe.hmget(f"ms:job:{job_id}", "state", "error", "finished")
    return [_standing(*values) for values in pipe.execute()]


def _standing(state: bytes | None, error: bytes | None, finished: bytes | None) -> JobEnding:
    if state is None:
        return JobEnding(State.EXPIRED)
    return JobEnding(State(state.decode()), from_json(error, Problem) if error else None, float(finished) if finished else None)


def event_of(state: State, problem: Problem | None = None) -> tuple[str, dict[str, Any]]:
    """The type of the event that tells that a job is over, or queued again, and what is in it.

    Raises ValueError for a job that runs: nothing is to be told of it.
    """
    match state:
        case State.SUCCEEDED:
            return SUCCEEDED, {"result": repr(state.value)}
        case State.FAILED:
            return FAILED, {"exception": said(problem), "traceback": ""}
        case State.QUEUED:
            return RETRIED, {"exception": "another attempt follows", "traceback": ""}
        case _ if state in TERMINAL:
            return REVOKED, {"terminated": state is State.CANCELLED, "signum": None, "expired": state is State.EXPIRED}
        case _:
            raise ValueError(f"{state} is not a terminal state")


def said(problem: Problem | None) -> str:
    """A problem in one line."""
    return f"JobFailed({f'{problem.title}: {problem.detail}' if problem else 'the ledger gives no reason'!r})"
