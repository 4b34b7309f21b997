"""The states of a job, the transitions between them, and the webhook events that report them."""

from enum import StrEnum
from typing import Literal, cast


class State(StrEnum):
    QUEUED = "queued"  # accepted and durable; no worker has it
    RUNNING = "running"  # a worker holds it under a lease
    CANCELLING = "cancelling"  # cancellation was requested while it ran
    SUCCEEDED = "succeeded"  # outputs stored, every capture durable, every rank agrees
    FAILED = "failed"  # `error` says why
    CANCELLED = "cancelled"  # stopped on request while it ran
    ABORTED = "aborted"  # ended while it was queued
    # shown only, never stored: it ended longer than `result_ttl_s` ago, and its result was deleted
    EXPIRED = "expired"


#: Which state may follow which; the Lua transitions are generated from this table. Terminal states
#: have no successor. No transition leads to `expired`: a reader sees it instead of the stored
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

#: What a webhook may report: that an attempt began, that a probe flagged a prompt, and each way in
#: which a job ends.
CallbackEvent = Literal[
    "job.running", "job.flagged", "job.succeeded", "job.failed", "job.cancelled", "job.aborted"
]
ENDS = tuple(
    cast(CallbackEvent, f"job.{state}")
    for state in State
    if state in TERMINAL and state is not State.EXPIRED
)
