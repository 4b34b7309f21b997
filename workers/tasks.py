"""Which Celery tasks does a worker run? One per kind of job, all with the same body: the job's id is all that they carry."""

import time
from collections.abc import Callable

from celery import Celery
from celery.exceptions import Reject

from .host import EngineHost
from .runs import JobFailed, Outcome

KINDS = ("generate", "completion", "chat", "sweep")

#: Messages go back to the queue when the engine is dead or does not serve for long; not so fast that they come round in
#: circles until the consumer closes.
REJECT_PAUSE_S = 0.2


def register_tasks(app: Celery, host: EngineHost) -> None:
    """Give `app` the tasks `midstream.<kind>`; the route in Flower is the kind, the argument the job's id."""
    for kind in KINDS:
        app.task(name=f"midstream.{kind}", throws=(JobFailed,))(_body(host))


def _body(host: EngineHost) -> Callable[[str], str]:
    def run(job_id: str) -> str:
        outcome = host.run(job_id)
        if outcome is Outcome.PUT_BACK or (host.death and outcome is Outcome.NOT_OURS):
            time.sleep(REJECT_PAUSE_S)
            raise Reject(host.death or outcome.value, requeue=True)
        return outcome.value

    return run
