"""Health responses of the API."""

from ..base.records import Published, Record
from ..jobs.models import WorkerInfo


class Health(Published):
    """Answer of `GET /healthz`: this process responds; nothing else is checked."""

    status: str
    version: str
    build: str = ""  # the version with its commit; empty where the API requires keys
    # of the `midstream up` that started the API; otherwise that of its parent process, or empty
    instance: str = ""


class Readiness(Record):
    """Answer of `GET /readyz`: 200 if a job would run now, otherwise 503; `missing` lists the
    reasons.
    """

    ready: bool
    missing: list[str]
    models: list[str]  # with a live worker
    workers: list[WorkerInfo]
    relay: bool  # seen recently; without it, captures and interventions are not settled
