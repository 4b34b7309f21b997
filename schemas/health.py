"""What does the API say of its own health?"""

from .base import Record
from .models import WorkerInfo


class Health(Record):
    """Answer of `GET /healthz`: this process answers; says nothing of the rest."""

    status: str
    version: str


class Readiness(Record):
    """Answer of `GET /readyz`: 200 when a job would run now, 503 otherwise; `missing` says what is not there."""

    ready: bool
    missing: list[str]
    models: list[str]  # with a live worker
    workers: list[WorkerInfo]
    relay: bool  # seen lately: without it captures and interventions are not settled
