"""Health responses of the API."""

from ..base.records import Published, Record
from ..jobs.models import WorkerInfo


class Health(Published):
    """Answer of `GET /healthz`: this process responds; nothing else is checked."""

    status: str
    version: str
    # of the `midstream up` that started it; of an API that was started otherwise: that of its
    # parent, or empty
    instance: str = ""


class Readiness(Record):
    """Answer of `GET /readyz`: 200 when a job would run now, 503 otherwise; `missing` gives the
    reasons.
    """

    ready: bool
    missing: list[str]
    models: list[str]  # with a live worker
    workers: list[WorkerInfo]
    relay: bool  # seen lately: without it captures and interventions are not settled
