"""Celery tasks of a worker: one per kind of job, with the same body; their argument is a job id."""

import time
from collections.abc import Callable

from celery import Celery, Task

from ...schemas.base import MidstreamError, Translated
from ...schemas.jobs.jobs import TERMINAL, JobView, State
from ...schemas.jobs.kinds import KINDS
from .attempt import AttemptOutcome, JobFailed
from .host import EngineHost
from .task_states import PutBack, TaskRequest, Told

#: Pause before a message goes back to the queue because the engine is dead or does not serve:
#: without it messages would circulate rapidly until the consumer closes.
REJECT_PAUSE_S = 0.2


class JobTask(Task):
    Request = TaskRequest


def register_tasks(app: Celery, host: EngineHost) -> None:
    """Register the tasks `midstream.<kind>` with `app`; their argument is the job's id."""
    for kind in KINDS:
        app.task(name=f"midstream.{kind}", base=JobTask, throws=(JobFailed,))(_body(host, kind))


def _body(host: EngineHost, kind: str) -> Callable[[str], str]:
    def run(job_id: str) -> str:
        outcome = host.run(job_id, kind)
        if outcome is AttemptOutcome.SUCCEEDED:
            return outcome.value
        if outcome is AttemptOutcome.GENERATED:
            raise Told(None, "its receipts are on their way")
        if outcome is AttemptOutcome.PUT_BACK or (
            host.death and outcome is AttemptOutcome.NOT_OURS
        ):
            time.sleep(REJECT_PAUSE_S)
            raise PutBack(host.death or outcome.value)
        # the job was removed; or Redis is unreachable, and Flower misses the job's end
        with Translated(
            MidstreamError,
            lambda error: Told(State.EXPIRED if error.kind == "not_found" else None, str(error)),
        ):
            view = host.view(job_id)
        return _became(view, outcome)

    return run


def _became(view: JobView, outcome: AttemptOutcome) -> str:
    """Reports a job that did not end here by its state in the ledger: returns for a success,
    otherwise raises JobFailed or Told.
    """
    if view.state is State.SUCCEEDED:
        return outcome.value
    if view.state is State.FAILED:
        raise JobFailed(
            f"{view.error.title}: {view.error.detail}"
            if view.error
            else "the ledger gives no reason"
        )
    if view.state is State.QUEUED or view.state in TERMINAL:
        raise Told(view.state, outcome.value)
    # another message's attempt runs it; this task ends as that one does
    raise Told(None, outcome.value)
