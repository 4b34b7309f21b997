"""Memory pressure of Redis, sampled once a second per process: submissions stop before workers' writes fail."""

import time
from typing import Any

#: Seconds between two samples. What this process has accepted since the last one is added to it.
LOOK_S = 1.0


class MemoryPressure:
    """Samples a redis.asyncio client. Belongs to its event loop."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._look_at = 0.0
        self._used = self._most = 0  # bytes; 0: no limit

    async def percent(self, more: int) -> float:
        """Percentage of `maxmemory` that Redis uses once `more` bytes are accepted; 0 if it has no limit."""
        at = time.monotonic()
        if at >= self._look_at:
            self._look_at = at + LOOK_S
            memory = await self._redis.info("memory")
            self._used, self._most = int(memory["used_memory"]), int(memory["maxmemory"])
        return 100 * (self._used + more) / self._most if self._most else 0.0

    def accepted(self, more: int) -> None:
        """Count `more` bytes as stored."""
        self._used += more
