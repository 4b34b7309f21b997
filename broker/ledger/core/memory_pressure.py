"""Samples Redis memory usage once a second per process, with what accepted jobs may still take, so
that submissions are refused before workers' writes fail.
"""

import time
from typing import Any, NamedTuple

from ...redis_service.durability import refuse_lossy
from .tenants import ROOM, USAGE

#: Seconds between two samples. Bytes that this process accepts in between are added to the last.
SAMPLE_S = 1.0


class MemoryUsage(NamedTuple):
    """Bytes that Redis uses, and its `maxmemory`; 0: it has none."""

    used: int
    limit: int

    @property
    def percent(self) -> float:
        """The percentage of `maxmemory` that is used; 0 without a limit."""
        return 100 * self.used / self.limit if self.limit else 0.0


# The submitting script checks the sample, not this process: it answers a repeated submission of an
# accepted job before it checks any limit.
class MemoryPressure:
    """Samples a redis.asyncio client. Belongs to its event loop."""

    def __init__(self, redis: Any, lossy: bool = False) -> None:
        """`lossy`: whether a Redis that evicts keys is accepted."""
        self._redis = redis
        self._lossy = lossy
        self._sample_at = 0.0
        self._used = self._limit = 0  # bytes; 0: no limit

    async def usage(self, more: int) -> MemoryUsage:
        """Return what Redis uses once `more` bytes are accepted and all jobs have ended.

        Raises LossyRedis for a Redis that evicts keys.
        """
        at = time.monotonic()
        if at >= self._sample_at:
            # at one moment: the memory of a job that ends moves from the one to the other
            async with self._redis.pipeline() as pipe:
                pipe.info("memory").hget(USAGE, ROOM)
                memory, room = await pipe.execute()
            refuse_lossy(memory, self._lossy)
            self._sample_at = at + SAMPLE_S
            self._used = int(memory["used_memory"]) + int(room or 0)
            self._limit = int(memory["maxmemory"])
        return MemoryUsage(self._used + more, self._limit)

    def accepted(self, more: int) -> None:
        """Count `more` bytes as stored, or as kept for a job."""
        self._used += more
