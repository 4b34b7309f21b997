"""The ledger's connection to Redis: typed errors, durability, memory limit, blobs."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ParamSpec, Self, TypeVar

import redis.asyncio
import redis.exceptions
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from ....schemas.base.errors import MidstreamError
from ....schemas.base.records import from_msgpack
from ....schemas.base.tensors import Tensor
from ....schemas.settings.settings import Settings
from ...redis_service import (
    availability as redis_availability,
    durability as redis_durability,
    opening as redis_open,
)
from . import scripts
from .aof_barrier import AofBarrier
from .auto_pipeline import PipelinedRedis
from .memory_pressure import MemoryPressure
from .reachable import reachable
from .tenants import LedgerTenants, limits_of, refusal

P = ParamSpec("P")
T = TypeVar("T")

#: Connections to Redis that one process opens at most; more callers wait for a free one.
MAX_CONNECTIONS = 64
#: Seconds without an answer after which Redis counts as unreachable.
SOCKET_TIMEOUT_S = 10.0
#: Repeats of a command whose connection broke. Every script may be repeated: a completed change is
#: recognised or refused.
RETRIES = 3


async def of_each(
    redis: Any, items: Iterable[T], ask: Callable[[Any, T], object], transaction: bool = False
) -> list[Any]:
    """Return the answers to the commands that `ask` adds to a pipeline for each item, in one round
    trip.
    """
    async with redis.pipeline(transaction=transaction) as pipe:
        for item in items:
            ask(pipe, item)
        answers: list[Any] = await pipe.execute()
    return answers


class LedgerConnection:
    """One asyncio Redis client, and what every change of the ledger needs.

    Belongs to the event loop on which it is first used.
    """

    def __init__(self, client: redis.asyncio.Redis, settings: Settings) -> None:
        # redis-py types each answer as the union of all that it can be configured to return
        self.redis: Any = client
        self.settings = settings
        self.tenants = LedgerTenants(self.redis, settings)
        self._pressure = MemoryPressure(self.redis, settings.redis_allow_lossy)
        self._written = AofBarrier(self.redis, settings.redis_replicas, settings.redis_allow_lossy)
        self._bound: dict[Path, scripts.Scripts] = {}
        self.scripts = self.scripts_of(scripts.LUA)

    @classmethod
    def connect(cls, settings: Settings, answer_s: float = SOCKET_TIMEOUT_S) -> Self:
        """Connect to `settings.redis_url` with a new connection pool; close it with `close()`.

        `answer_s`: seconds without an answer after which a connection is dropped and the call
        repeated over a new one.
        """
        pool = redis_open.async_pool(
            settings.redis_url,
            max_connections=MAX_CONNECTIONS,
            timeout=answer_s,
            socket_timeout=answer_s,
            socket_connect_timeout=answer_s,
            # A pooled connection cut by a restart of Redis is reconnected silently; an unreachable
            # Redis is reported within a second.
            retry=Retry(ExponentialBackoff(cap=min(0.4, answer_s / 5), base=0.05), RETRIES),
        )
        return cls(PipelinedRedis.from_pool(pool), settings)

    def scripts_of(self, folder: Path, parts: tuple[str, ...] = scripts.PARTS) -> scripts.Scripts:
        """Return the scripts of a folder, bound once: that hashes their texts. See `sources`."""
        if folder not in self._bound:
            self._bound[folder] = scripts.Scripts(self.redis, folder, parts)
        return self._bound[folder]

    async def run(self, script: str, at: float | None = None, **own: Any) -> Any:
        """Return the reply of a script of the ledger that takes the common arguments and `own`."""
        return await getattr(self.scripts, script)(args=scripts.pack(self.settings, at, **own))

    async def close(self) -> None:
        await self.redis.aclose()

    @reachable
    async def ping(self) -> None:
        """Raises MidstreamError("unavailable") if Redis does not answer, or refuses writes."""
        await self.redis.set(redis_availability.PROBE_KEY, 1, ex=60)

    @reachable
    async def check_durable(self) -> None:
        """Raise MidstreamError("unavailable") if Redis does not answer, or may lose writes that it
        confirms: submissions are refused then.
        """
        redis_durability.refuse_lossy(await self.redis.info(), self.settings.redis_allow_lossy)

    @reachable
    async def written(self) -> None:
        """Wait until all writes that Redis has confirmed so far would survive a kill of Redis.

        Call this before confirming such writes to a client.
        """
        await self._written()

    @reachable
    async def check_room(self, size: int) -> None:
        """Raise MidstreamError("overloaded") if `size` more bytes would exceed `redis_fill_limit`:
        the rest of Redis is reserved for accepted jobs.
        """
        used = (await self._pressure.usage(size)).percent
        allowed = limits_of(self.settings)["redis_fill"]
        if used >= allowed:
            raise refusal("", "redis_fill", int(used), allowed, size, None)

    def took_room(self, size: int) -> None:
        """Count `size` bytes stored since the last sample."""
        self._pressure.accepted(size)

    @reachable
    async def put_blob(self, name: str, data: bytes) -> None:
        """Store `data` under its content hash, without expiry: for tokenizer bundles.

        A job's vectors are stored by `submit`.
        """
        await self.redis.set(f"ms:blob:{name}", data)

    @reachable
    async def get_blob(self, name: str) -> bytes | None:
        blob: bytes | None = await self.redis.get(f"ms:blob:{name}")
        return blob

    async def get_tensor(self, name: str) -> Tensor:
        """Return a steering vector by its content hash.

        Raises MidstreamError("intervention_failed") if it is gone.
        """
        if (raw := await self.get_blob(name)) is None:
            raise MidstreamError("intervention_failed", f"the vector {name} is no longer stored")
        return from_msgpack(raw, Tensor)
