"""Memory pressure of Redis, sampled once a second per process: submissions stop before workers'
writes fail.
"""

import time
from typing import Any

from ...ops.redis_durability import refuse_lossy

#: Seconds between two samples. What this process has accepted since the last one is added to it.
LOOK_S = 1.0


class MemoryPressure:
    """Samples a redis.asyncio client. Belongs to its event loop."""

    def __init__(self, redis: Any, lossy: bool = False) -> None:
        """`lossy`: whether a Redis that evicts keys will do."""
        self._redis = redis
        self._lossy = lossy
        self._look_at = 0.0
        self._used = self._most = 0  # bytes; 0: no limit

    async def percent(self, more: int) -> float:
        """Percentage of `maxmemory` that Redis uses once `more` bytes are accepted; 0 if it has no
        limit.

        Raises LossyRedis for a Redis that evicts keys.
        """
        at = time.monotonic()
        if at >= self._look_at:
            memory = await self._redis.info("memory")
            refuse_lossy(memory, self._lossy)
            self._look_at = at + LOOK_S
            self._used, self._most = int(memory["used_memory"]), int(memory["maxmemory"])
        return 100 * (self._used + more) / self._most if self._most else 0.0

    def accepted(self, more: int) -> None:
        """Count `more` bytes as stored."""
        self._used += more
