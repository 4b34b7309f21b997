"""Service-wide status, as returned by `GET /v1/status` and shown by `midstream top`."""

from ..base.records import Published
from ..jobs.models import WorkerInfo


class QueueStatus(Published):
    """The jobs of one model, queue and priority that no worker has begun."""

    model: str
    # high | interactive (a client waits for a held response) | batch | low: served in this order
    priority: str
    sent: int  # jobs whose message is in Celery's queue
    waiting: dict[str, int]  # tenant → jobs that wait in the ledger
    queue: str = ""  # of the model: empty for its vLLM workers, or `gradients`
    oldest_s: float = 0.0  # since when the first of those that wait in the ledger has waited


class RedisStatus(Published):
    version: str
    used_bytes: int
    limit_bytes: int  # maxmemory; 0: none
    share: float  # used / limit; 0 without a limit
    policy: str  # maxmemory-policy
    aof: bool
    clients: int
    milliseconds: float  # response time


class RelayStatus(Published):
    alive: bool
    url: str = ""
    version: str = ""
    received: int = 0  # receipts since it started


class CallbacksStatus(Published):
    alive: bool
    last_sweep: float | None = None  # seconds since the epoch
    webhooks_pending: int = 0
    webhooks_overdue_s: float = 0.0  # how long the most overdue webhook has been due


class DesyncStatus(Published):
    worker: str
    at: float
    detail: str


class ServiceStatus(Published):
    """Answer of `GET /v1/status`."""

    version: str  # of this API
    at: float
    held: int  # responses that this API holds
    live: int  # jobs that have not ended
    queued: int  # live jobs that no worker has begun
    counts: dict[str, dict[str, int]]  # model → state → how many jobs have ever entered it
    queues: list[QueueStatus]
    # a worker of an incompatible version is not healthy, and its `detail` names both versions
    workers: list[WorkerInfo]
    relay: RelayStatus
    callbacks: CallbacksStatus
    redis: RedisStatus
    last_desync: DesyncStatus | None = None
    build: str = ""  # the version of this API with its commit
