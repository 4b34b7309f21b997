"""Celery tasks of a worker: one per kind of job, with the same body; their argument is a job id.

A task is over when the worker has done its part. Its job may end later, with its receipts, or in
another attempt: so the ledger, not the worker, sends Celery's events for the end of a job's tasks
(`report_end` in `broker/ledger/lua/shared/message.lua`).
"""

import time
from collections.abc import Callable
from typing import Any

from celery import Celery, Task
from celery.exceptions import Ignore
from celery.worker.request import Request

from ...schemas.jobs.kinds import KINDS
from .attempt import AttemptOutcome, JobFailed
from .host import EngineHost

#: Pause before a message goes back to the queue because the engine is dead or does not serve:
#: without it messages would circulate rapidly until the consumer closes.
REJECT_PAUSE_S = 0.2
#: Events that the ledger sends.
ENDS = ("task-succeeded", "task-failed")


class PutBack(Ignore):
    """The message goes back to the queue.

    Celery's own `Reject` is not used, because Celery logs it as a warning with a traceback.
    """


class TaskRequest(Request):
    """Celery's side of one task."""

    def send_event(self, type: str, **fields: Any) -> None:
        if type not in ENDS:
            super().send_event(type, **fields)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        error = exc_info.exception
        if isinstance(getattr(error, "exc", error), PutBack):  # Celery wraps some exceptions
            self.reject(requeue=True)  # keeps `on_failure` from acknowledging the message
        return super().on_failure(exc_info, send_failed_event, return_ok)


class JobTask(Task):
    Request = TaskRequest


def register_tasks(app: Celery, host: EngineHost) -> None:
    """Register the tasks `midstream.<kind>` with `app`; their argument is the job's id."""
    for kind in KINDS:
        app.task(name=f"midstream.{kind}", base=JobTask, throws=(JobFailed,))(_body(host, kind))


def _body(host: EngineHost, kind: str) -> Callable[[str], str]:
    def run(job_id: str) -> str:
        outcome = host.run(job_id, kind)
        if outcome is AttemptOutcome.PUT_BACK or (
            host.death and outcome is AttemptOutcome.NOT_OURS
        ):
            time.sleep(REJECT_PAUSE_S)
            raise PutBack(host.death or outcome.value)
        return outcome.value

    return run
