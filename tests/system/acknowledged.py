"""One client that writes and has each write acknowledged, as the API does it: which acknowledged
writes are gone in the end?
"""

import asyncio
from collections.abc import Callable

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from midstream.broker.ledger.core.aof_barrier import AofBarrier
from midstream.broker.redis_service import opening as redis_open

PAUSE_S = 0.01
#: So many writes are acknowledged before something happens, and again after it.
ENOUGH = 20


def lost_writes(url: str, replicas: int, happen: Callable[[], object]) -> list[str]:
    """Return the keys of acknowledged writes that are gone; `happen` takes place meanwhile."""
    acknowledged = asyncio.run(_write(url, replicas, happen))
    print(f"{len(acknowledged)} writes were acknowledged")
    with redis.Redis.from_url(url) as client:
        return [key for key in acknowledged if not client.exists(key)]


async def _write(url: str, replicas: int, happen: Callable[[], object]) -> list[str]:
    retry = Retry(ExponentialBackoff(cap=0.4, base=0.05), 3)
    pool = redis_open.async_pool(
        url, max_connections=10, timeout=5, socket_timeout=5, socket_connect_timeout=5, retry=retry
    )
    client = redis.asyncio.Redis.from_pool(pool)
    barrier = AofBarrier(client, replicas)
    over = asyncio.Event()
    acknowledged = list[str]()

    async def enough() -> None:
        wanted = len(acknowledged) + ENOUGH
        while len(acknowledged) < wanted:  # noqa: ASYNC110
            await asyncio.sleep(PAUSE_S)

    async def disturb() -> None:
        try:
            await enough()
            await asyncio.to_thread(happen)
            await enough()
        finally:
            over.set()

    disturbing = asyncio.create_task(disturb())
    number = 0
    while not over.is_set():
        number += 1
        try:
            await client.set(f"ms:write:{number}", 1)
            await barrier()
            acknowledged.append(f"ms:write:{number}")
        except redis.RedisError:
            pass
        await asyncio.sleep(PAUSE_S)
    await disturbing
    await client.aclose()
    return acknowledged
