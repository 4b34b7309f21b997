"""Reports of a service on itself, for what shows or judges them."""

from typing import Any

from midstream import __version__
from midstream.schemas.jobs.models import WorkerInfo, WorkerStats
from midstream.schemas.service.status import (
    CallbacksStatus,
    QueueStatus,
    RedisStatus,
    RelayStatus,
    ServiceStatus,
)

AT = 1_800_000_000.0


def stats(**changes: Any) -> WorkerStats:
    numbers = dict.fromkeys(WorkerStats.__struct_fields__, 0) | {
        "rows": 256,
        "tenant_tokens": {},
        "tenant_tokens_s": {},
        "last_desync": "",
        "last_desync_at": None,
        "at": AT - 2,
    }
    return WorkerStats(**(numbers | changes))


def worker(
    name: str = "gpu-node-17.cluster.example", told: WorkerStats | None = None, **changes: Any
) -> WorkerInfo:
    facts: dict[str, Any] = {
        "worker": name,
        "boot": "b",
        "model": "meta-llama-3.1-70b-instruct",
        "version": __version__,
        "host": "h",
        "pid": 1,
        "started": AT,
        "tp": 8,
        "pp": 2,
        "stats": told or stats(),
    }
    return WorkerInfo(**(facts | changes))


def status(**changes: Any) -> ServiceStatus:
    facts: dict[str, Any] = {
        "version": __version__,
        "at": AT,
        "held": 512,
        "live": 123_456,
        "queued": 100_000,
        "counts": {
            "meta-llama-3.1-70b-instruct": {
                "queued": 1_234_567,
                "running": 1_234_567,
                "succeeded": 1_200_000,
                "failed": 12,
            }
        },
        "queues": [
            QueueStatus(
                model="meta-llama-3.1-70b-instruct",
                priority="interactive",
                sent=64,
                waiting={"a-long-tenant": 99_936},
                oldest_s=7300,
            )
        ],
        "workers": [
            worker(
                told=stats(
                    jobs=128,
                    running=64,
                    waiting=4096,
                    generated_tokens_s=12_345.6,
                    kv_cache=0.973,
                    rows_used=256,
                )
            )
        ],
        "relay": RelayStatus(
            alive=True, url="tcp://10.0.0.1:5557", version=__version__, received=12_345_678
        ),
        "callbacks": CallbacksStatus(
            alive=True, last_sweep=AT - 1, webhooks_pending=3, webhooks_overdue_s=2.0
        ),
        "redis": RedisStatus(
            version="7.0.1",
            used_bytes=3 << 30,
            limit_bytes=4 << 30,
            share=0.75,
            policy="noeviction",
            aof=True,
            clients=99,
            milliseconds=0.4,
        ),
    }
    return ServiceStatus(**(facts | changes))
