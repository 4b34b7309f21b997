"""One client that writes and has each write acknowledged, as the API does it: which acknowledged
writes are gone in the end?
"""

import asyncio
import time
from collections.abc import Callable

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff
from redis_group import RedisGroup

from midstream.broker.ledger.core.aof_barrier import AofBarrier
from midstream.broker.redis_service import opening as redis_open
from midstream.broker.redis_service.acl import OPERATOR

PAUSE_S = 0.01
AFTER_S = 3.0


def key(number: int) -> str:
    return f"ms:write:{number}"


def write_through(
    group: RedisGroup, replicas: int, happen: Callable[[], object]
) -> tuple[list[float], list[str]]:
    """When each acknowledgement came (monotonic), and the keys that are lost; `happen` takes place
    meanwhile.
    """
    acknowledged = asyncio.run(_write(group.url(OPERATOR), replicas, happen))
    with group.client(group.master()) as client:
        return sorted(acknowledged.values()), [
            key(number) for number in acknowledged if not client.exists(key(number))
        ]


async def _write(url: str, replicas: int, happen: Callable[[], object]) -> dict[int, float]:
    retry = Retry(ExponentialBackoff(cap=0.4, base=0.05), 3)
    pool = redis_open.async_pool(
        url, max_connections=10, timeout=5, socket_timeout=5, socket_connect_timeout=5, retry=retry
    )
    client = redis.asyncio.Redis.from_pool(pool)
    barrier = AofBarrier(client, replicas)
    over = asyncio.Event()
    acknowledged = dict[int, float]()
    number = 0

    async def disturb() -> None:
        try:
            await asyncio.sleep(1)
            await asyncio.to_thread(happen)
            await asyncio.sleep(AFTER_S)
        finally:
            over.set()

    disturbing = asyncio.create_task(disturb())
    while not over.is_set():
        number += 1
        try:
            await client.set(key(number), 1)
            await barrier()
            acknowledged[number] = time.monotonic()
        except redis.RedisError:
            pass
        await asyncio.sleep(PAUSE_S)
    await disturbing
    await client.aclose()
    return acknowledged
