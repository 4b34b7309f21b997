"""Has the kernel all that Redis has answered, so that a Redis that is killed has it when it starts again?

A Redis that syncs its log every second writes before it answers, with one exception: while its last background fsync still runs, which
takes long on a busy disk, it holds writes back for up to 2 s and answers all the same. Before an answer is passed on as a promise it is
therefore asked whether such a sync is running. (What a dying machine takes with it is another question: `redis_appendfsync`.)
"""

import asyncio
import time
from typing import Any

import redis.exceptions

#: Seconds between two questions while a sync is running.
PAUSE_S = 0.01
#: A Redis that cannot write for so long counts as away.
PATIENCE_S = 10.0


def is_written(persistence: dict[str, Any]) -> bool:
    """Whether all is written that was answered before `INFO persistence` was asked for.

    Writing comes before answering in each round of Redis' loop. So when no sync was running when it was asked, what had been held back
    was written before its answer left.
    """
    if not persistence.get("aof_enabled") or not persistence["aof_buffer_length"]:
        return True
    return not persistence["aof_pending_bio_fsync"] and persistence["aof_last_write_status"] == "ok"


class Written:
    """Over a redis.asyncio client. Belongs to its event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Wait until all is written that was answered before. Those who wait at the same time ask once.

        Raises redis.RedisError, a TimeoutError where Redis cannot write.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ask(), name="midstream-written")
        await asyncio.shield(self._next)

    async def _ask(self) -> None:
        async with self._asking:
            self._next = None  # this question is on its way: it tells nothing of what is answered from here on
            deadline = time.monotonic() + PATIENCE_S
            while not is_written(await self._client.info("persistence")):
                if time.monotonic() >= deadline:
                    raise redis.exceptions.TimeoutError("Redis cannot write its log")
                await asyncio.sleep(PAUSE_S)
