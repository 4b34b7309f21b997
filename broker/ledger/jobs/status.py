"""Reads the service-wide status from Redis, where every process reports; queries no process."""

import time
from typing import Any

from ....schemas.base.records import from_json, now
from ....schemas.base.version import __version__, full_version
from ....schemas.jobs.models import WorkerInfo
from ....schemas.service.compatibility import judged
from ....schemas.service.status import (
    CallbacksStatus,
    DesyncStatus,
    QueueStatus,
    RedisStatus,
    RelayStatus,
    ServiceStatus,
)
from ...processes.liveness import REAPER_KEY, RELAY_ALIVE_S, RELAY_KEY, RELAY_LATE_S
from ...redis_service.durability import RedisInfo
from .ledger import Ledger, reachable

#: Step of the queue → its name: 0 and 9 are the priorities `high` and `low`, the others the
#: defaults of kinds of jobs.
NAME_OF_STEP = {"0": "high", "3": "interactive", "6": "batch", "9": "low"}


@reachable
async def read_status(ledger: Ledger, held: int = 0) -> ServiceStatus:
    """Return the status. `held`: number of responses that the caller holds open.

    Raises MidstreamError("unavailable") while Redis is unreachable.
    """
    redis = ledger.redis
    began = time.perf_counter()
    info: RedisInfo = await redis.info()
    milliseconds = (time.perf_counter() - began) * 1000
    async with redis.pipeline(transaction=False) as pipe:
        pipe.hgetall("ms:counts").zcard("ms:live").hget("ms:usage", "/queued").smembers(
            "ms:queues"
        ).get(RELAY_KEY).get(REAPER_KEY)
        pipe.zcard("ms:hooks").zrange("ms:hooks", 0, 0, withscores=True)
        counts, live, queued, queues, relay, sweep, pending, first = await pipe.execute()
    workers = [judged(worker) for worker in await ledger.workers(queue=None)]
    at = now()
    return ServiceStatus(
        version=__version__,
        build=full_version(),
        at=at,
        held=held,
        live=live,
        queued=int(queued or 0),
        counts=_counts(counts),
        queues=[
            queue
            for name in sorted(queues)
            if (queue := await _queue(ledger, name.decode())) is not None
        ],
        workers=workers,
        relay=_relay(relay),
        callbacks=CallbacksStatus(
            alive=sweep is not None,
            last_sweep=float(sweep) if sweep is not None else None,
            webhooks_pending=pending,
            webhooks_overdue_s=round(max(0.0, at - first[0][1]), 1) if first else 0.0,
        ),
        redis=_redis(info, milliseconds),
        last_desync=_last_desync(workers),
    )


def _counts(raw: dict[bytes, bytes]) -> dict[str, dict[str, int]]:
    counts: dict[str, dict[str, int]] = {}
    for name, count in sorted(raw.items()):
        model, _, state = name.decode().rpartition("/")
        counts.setdefault(model, {})[state] = int(count)
    return counts


async def _queue(ledger: Ledger, name: str) -> QueueStatus | None:
    """Return the status of one line, `{model}:{step}` or `{model}:{step}.{queue}`; None if it is
    empty.
    """
    model, _, line = name.rpartition(":")
    step, _, queue = line.partition(".")
    tenants: list[bytes] = await ledger.redis.zrange(f"ms:fair:{name}", 0, -1)
    async with ledger.redis.pipeline(transaction=False) as pipe:
        pipe.scard(f"ms:sent:{name}")
        for tenant in tenants:
            waits = f"ms:wait:{name}:{tenant.decode()}"
            pipe.zcard(waits).zrange(waits, 0, 0, withscores=True)
        sent, *found = await pipe.execute()
    result = {
        tenant.decode(): count for tenant, count in zip(tenants, found[::2], strict=True) if count
    }
    since = [at for first in found[1::2] for _, at in first]
    return (
        QueueStatus(
            model=model,
            priority=NAME_OF_STEP.get(step, step),
            sent=sent,
            waiting=result,
            queue=queue,
            oldest_s=round(max(0.0, now() - min(since)), 1) if since else 0.0,
        )
        if sent or result
        else None
    )


@reachable
async def relay_since(ledger: Ledger, at: float) -> float:
    """Return since when a relay has been alive without a break, in seconds since the epoch; `at`,
    the present time, if none is alive, or if its sign of life is late.

    The wait for receipts counts from then: while no relay is alive, none can arrive.
    """
    async with ledger.redis.pipeline(transaction=True) as pipe:
        raw, left_ms = await pipe.get(RELAY_KEY).pttl(RELAY_KEY).execute()
    if raw is None or left_ms < (RELAY_ALIVE_S - RELAY_LATE_S) * 1000:
        return at
    return float(from_json(raw, dict[str, Any]).get("since", 0.0))


async def relay_alive_for(ledger: Ledger, seconds: float) -> bool:
    """Return whether a relay has been alive for longer than `seconds` without a break."""
    at = now()
    return at - await relay_since(ledger, at) > seconds


def _relay(raw: bytes | None) -> RelayStatus:
    if raw is None:
        return RelayStatus(alive=False)
    beat = from_json(raw, dict[str, Any])
    return RelayStatus(
        alive=True, url=beat["url"], version=beat["version"], received=beat["received"]
    )


def _redis(info: RedisInfo, milliseconds: float) -> RedisStatus:
    used = int(info["used_memory"])
    limit = int(info["maxmemory"])
    return RedisStatus(
        version=str(info["redis_version"]),
        used_bytes=used,
        limit_bytes=limit,
        share=round(used / limit, 4) if limit else 0.0,
        policy=str(info["maxmemory_policy"]),
        aof=bool(info["aof_enabled"]),
        clients=int(info["connected_clients"]),
        milliseconds=round(milliseconds, 2),
    )


def _last_desync(workers: list[WorkerInfo]) -> DesyncStatus | None:
    desyncs = [
        DesyncStatus(
            worker=worker.worker, at=worker.stats.last_desync_at, detail=worker.stats.last_desync
        )
        for worker in workers
        if worker.stats is not None and worker.stats.last_desync_at is not None
    ]
    return max(desyncs, key=lambda desync: desync.at, default=None)
