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
#: A Redis that was killed is not back sooner: who is told by then is told by the one that answered before. (A connection that a restart of
#: long ago has cut costs half of it.)
BACK_S = 0.2
#: Nor is it another that is up for so much longer than somebody waits. (It counts whole seconds.)
MARGIN_S = 2.0


class Goal:
    """How far the log has to be written: to where it was when `reached` was first asked."""

    def __init__(self) -> None:
        self._base = self._size = -1

    def reached(self, persistence: dict[str, Any]) -> bool:
        """Whether all is written that was answered before the first of these answers to `INFO persistence`.

        Writing comes before answering in each round of Redis' loop. So when no sync was running when it was asked, what had been held back
        was written before its answer left. Where one sync follows the other, and there is always something new to hold back, the log's
        size tells it.
        """
        if not persistence.get("aof_enabled") or not persistence["aof_buffer_length"]:
            return True
        if not persistence["aof_pending_bio_fsync"] and persistence["aof_last_write_status"] == "ok":
            return True
        if persistence["aof_base_size"] != self._base:  # the first answer, or the log was written anew
            self._base = persistence["aof_base_size"]
            self._size = persistence["aof_current_size"] + persistence["aof_buffer_length"]
        return bool(persistence["aof_current_size"] >= self._size)


class Written:
    """Over a redis.asyncio client. Belongs to its event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._run = ""  # of Redis, when it was asked last
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Wait until all is written that was answered before. Those who wait at the same time ask once.

        Raises redis.RedisError: a TimeoutError where Redis cannot write, a ConnectionError where it was restarted meanwhile, so that
        nobody knows whether it still had written what it had answered.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._ask(time.monotonic(), self._run), name="midstream-written")
        await asyncio.shield(self._next)

    async def _ask(self, since: float, run: str) -> None:
        """`run`: of the Redis that was known at `since` (monotonic)."""
        async with self._asking:
            self._next = None  # this question is on its way: it tells nothing of what is answered from here on
            deadline = time.monotonic() + PATIENCE_S
            goal = Goal()
            while not goal.reached(await self._same_redis(since, run)):
                if time.monotonic() >= deadline:
                    raise redis.exceptions.TimeoutError("Redis cannot write its log")
                await asyncio.sleep(PAUSE_S)

    async def _same_redis(self, since: float, run: str) -> dict[str, Any]:
        """What Redis says of its log, if it is the one that was there before `since`."""
        async with self._client.pipeline(transaction=False) as pipe:
            server, persistence = await pipe.info("server").info("persistence").execute()
        self._run = server["run_id"]
        waited = time.monotonic() - since
        if run not in ("", self._run) and waited > BACK_S and server["uptime_in_seconds"] < waited + MARGIN_S:
            raise redis.exceptions.ConnectionError("Redis was restarted just now, perhaps without what it had answered before")
        return dict(persistence)
