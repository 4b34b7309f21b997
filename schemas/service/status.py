"""Service-wide status, as returned by `GET /v1/status` and shown by `midstream top`."""

from ..base.records import Published
from ..jobs.models import WorkerInfo


class QueueStatus(Published):
    """The jobs of one model and priority that no worker has begun."""

    model: str
    # high | interactive (someone holds a response) | batch | low: served in this order
    priority: str
    sent: int  # their message is with Celery
    waiting: dict[str, int]  # tenant → jobs whose turn has not come


class RedisStatus(Published):
    version: str
    used_bytes: int
    limit_bytes: int  # maxmemory; 0: none
    share: float  # used / limit; 0 without a limit
    policy: str  # maxmemory-policy
    aof: bool
    clients: int
    milliseconds: float  # that it took to answer


class RelayStatus(Published):
    alive: bool
    url: str = ""
    version: str = ""
    received: int = 0  # receipts since it started


class CallbacksStatus(Published):
    alive: bool
    last_sweep: float | None = None  # seconds since the epoch
    webhooks_pending: int = 0
    webhooks_overdue_s: float = 0.0  # for how long the most overdue one has been due


class DesyncStatus(Published):
    worker: str
    at: float
    detail: str


class Status(Published):
    """Answer of `GET /v1/status`."""

    version: str  # of this API
    at: float
    held: int  # responses that this API holds
    live: int  # jobs that are not over
    queued: int  # of those, jobs that no worker has begun
    counts: dict[str, dict[str, int]]  # model → state → how often a job came into it, ever
    queues: list[QueueStatus]
    # one whose version this API cannot work with is not healthy, and its `detail` names both
    workers: list[WorkerInfo]
    relay: RelayStatus
    callbacks: CallbacksStatus
    redis: RedisStatus
    last_desync: DesyncStatus | None = None
