"""The task events that a worker sends when its part in a job is over; `broker.queue.task_events`
has their content.

A job whose receipts are still on their way has not succeeded yet, nor has one that another attempt
has taken over. Such a task frees its place in the pool and stays STARTED until Flower's process
finds the job's end in the ledger (`broker.flower`).
"""

from typing import Any

from celery.exceptions import Ignore
from celery.worker.request import Request

from ...broker.queue.task_events import RETRIED, REVOKED, event_of
from ...schemas.jobs.jobs import State


class Told(Ignore):
    """The message is done. `state`: the job's state to report; None: unknown, or not over yet: not
    reported here.
    """

    def __init__(self, state: State | None, why: str = ""):
        super().__init__(why)
        self.state = state
        self.why = why


class PutBack(Ignore):
    """The message goes back to the queue.

    Celery's own `Reject` is not used, because Celery logs it as a warning with a traceback.
    """

    def __init__(self, why: str):
        super().__init__(why)
        self.why = why


class TaskRequest(Request):
    """Celery's side of one task; it sends the events that Flower shows."""

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        error = exc_info.exception
        error = getattr(error, "exc", error)  # Celery wraps what comes with a traceback
        state = error.state if isinstance(error, Told) else None
        kind, fields = event_of(state) if state else ("", {})
        if state and kind == REVOKED:
            return self._announce_revoked(state.value, **fields)  # acknowledges the message
        if isinstance(error, PutBack):
            self.reject(requeue=True)  # keeps `on_failure` from acknowledging the message
            kind = RETRIED
            fields = {"exception": error.why, "traceback": ""}
        done = super().on_failure(exc_info, send_failed_event, return_ok)
        if kind:
            self.send_event(kind, **fields)
        return done
