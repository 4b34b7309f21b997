"""The states of a job, the transitions between them, and the webhook events that report them."""

from enum import StrEnum
from typing import Literal, cast


class State(StrEnum):
    QUEUED = "queued"  # accepted and durable; no worker has it
    RUNNING = "running"  # a worker holds a lease on it
    CANCELLING = "cancelling"  # cancellation was requested while it ran
    SUCCEEDED = "succeeded"  # outputs stored, every capture durable, every rank agrees
    FAILED = "failed"  # `error` has the reason
    CANCELLED = "cancelled"  # stopped on request while it ran
    ABORTED = "aborted"  # ended while it was queued
    # reported, never stored: it ended more than `result_ttl_s` ago, and its result was deleted
    EXPIRED = "expired"


#: State → the states that may follow; the Lua transitions are generated from this table. Terminal
#: states have no successor. No transition leads to `expired`: readers see it instead of the stored
#: terminal state.
TRANSITIONS: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.RUNNING, State.ABORTED, State.FAILED}),
    State.RUNNING: frozenset({State.QUEUED, State.CANCELLING, State.SUCCEEDED, State.FAILED}),
    State.CANCELLING: frozenset({State.CANCELLED, State.SUCCEEDED, State.FAILED}),
    State.SUCCEEDED: frozenset(),
    State.FAILED: frozenset(),
    State.CANCELLED: frozenset(),
    State.ABORTED: frozenset(),
    State.EXPIRED: frozenset(),
}
TERMINAL = frozenset(state for state, following in TRANSITIONS.items() if not following)

#: The events that a webhook may report: an attempt began, a probe or a policy flagged a prompt, a
#: policy that acts was triggered, or the job ended.
CallbackEvent = Literal[
    "job.running",
    "job.flagged",
    "job.decided",
    "job.succeeded",
    "job.failed",
    "job.cancelled",
    "job.aborted",
]
ENDS = tuple(
    cast(CallbackEvent, f"job.{state}")
    for state in State
    if state in TERMINAL and state is not State.EXPIRED
)
