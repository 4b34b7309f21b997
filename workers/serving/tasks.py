"""Celery tasks of a worker: one per kind of job, all with the same body; the job's id is their only
argument.
"""

import time
from collections.abc import Callable

from celery import Celery, Task

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import TERMINAL, JobView, State
from .attempt import AttemptOutcome, JobFailed
from .host import EngineHost
from .task_states import JobRequest, PutBack, Settlements, Settling, Told

KINDS = ("generate", "completion", "chat", "sweep", "harvest")

#: Messages go back to the queue when the engine is dead or does not serve for long; not so fast
#: that they come round in circles until the consumer closes.
REJECT_PAUSE_S = 0.2


class JobTask(Task):
    Request = JobRequest


def register_tasks(app: Celery, host: EngineHost) -> None:
    """Give `app` the tasks `midstream.<kind>`; the route in Flower is the kind, the argument the
    job's id.
    """
    app.task_events = None  # the consumer's, as soon as it is connected
    app.settlements = Settlements(host.settings.redis_url, lambda: app.task_events)
    for kind in KINDS:
        app.task(name=f"midstream.{kind}", base=JobTask, throws=(JobFailed,))(_body(host, kind))


def _body(host: EngineHost, kind: str) -> Callable[[str], str]:
    def run(job_id: str) -> str:
        outcome = host.run(job_id, kind)
        if outcome is AttemptOutcome.SUCCEEDED:
            return outcome.value
        if outcome is AttemptOutcome.GENERATED:
            raise Settling
        if outcome is AttemptOutcome.PUT_BACK or (
            host.death and outcome is AttemptOutcome.NOT_OURS
        ):
            time.sleep(REJECT_PAUSE_S)
            raise PutBack(host.death or outcome.value)
        try:
            view = host.view(job_id)
        except MidstreamError as error:
            # removed since; or Redis is unreachable, and Flower misses this end
            raise Told(State.EXPIRED if error.kind == "not_found" else None, str(error)) from error
        return _became(view, outcome)

    return run


def _became(view: JobView, outcome: AttemptOutcome) -> str:
    """The outcome of a job that did not end here, from the ledger; returned for a success,
    otherwise raised.
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
    raise Settling  # another message has it: its end is this message's as well
