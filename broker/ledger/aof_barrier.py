"""The durability barrier: waits until Redis has written to its log all that it has answered, so that a killed Redis keeps it.

With `appendfsync everysec` Redis writes to the kernel before it answers, with one exception: while a background fsync runs, which
takes long on a busy disk, it holds writes back for up to 2 s and answers all the same. An answer is passed on as a promise only after
`INFO persistence` shows that nothing from before is held back. (`redis_appendfsync = "always"` also covers a machine that dies.)
Why this and neither `appendfsync always` nor `WAITAOF`: docs/decisions/0014-durability-barrier.md.
"""

import asyncio
import time
from typing import Any

import redis.exceptions

#: Seconds between two questions while a sync is running.
PAUSE_S = 0.01
#: A Redis that cannot write for this long counts as unavailable.
PATIENCE_S = 10.0
#: A killed Redis takes longer than this to return, so an answer within this time comes from the Redis that was asked before. (A
#: connection cut by an earlier restart costs half of it.)
BACK_S = 0.2
#: A Redis whose uptime exceeds the wait by more than this was not restarted. (It counts whole seconds.)
MARGIN_S = 2.0


class Barrier:
    """What one wait asks, and whether the answer is enough.

    Both users, the asynchronous ledger and the synchronous relay, queue `ask` on a pipeline and give what it returned to `passed`. This is
    where replicas would be waited for as well: a write and `WAIT` on the same connection behind INFO, and their count in `passed`.
    """

    def __init__(self) -> None:
        self._base = self._size = -1

    def ask(self, pipe: Any) -> None:
        """Queue the question on a pipeline, synchronous or not. It has one answer."""
        pipe.info("persistence")

    def passed(self, persistence: dict[str, Any]) -> bool:
        """Whether all is written that was answered before the first of the answers given here.

        Redis writes before it answers in each round of its loop. So if no sync was running when it was asked, everything held back was
        written before this answer left. Where one sync follows the other and there is always something new to hold back, the size of
        the log decides.
        """
        if not persistence.get("aof_enabled") or not persistence["aof_buffer_length"]:
            return True
        if not persistence["aof_pending_bio_fsync"] and persistence["aof_last_write_status"] == "ok":
            return True
        if persistence["aof_base_size"] != self._base:  # the first answer, or the log was rewritten
            self._base = persistence["aof_base_size"]
            self._size = persistence["aof_current_size"] + persistence["aof_buffer_length"]
        return bool(persistence["aof_current_size"] >= self._size)


class AofBarrier:
    """The barrier over a redis.asyncio client: `await barrier()`. Belongs to the client's event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client
        self._run = ""  # id of the Redis process that answered last
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Wait until all is written that was answered before. Concurrent callers share one question.

        Raises redis.RedisError: a TimeoutError if Redis cannot write, a ConnectionError if it was restarted meanwhile, because then
        nothing shows whether it had written what it had answered.
        """
        if self._next is None:
            self._next = asyncio.create_task(self._wait(time.monotonic(), self._run), name="midstream-aof-barrier")
        await asyncio.shield(self._next)

    async def _wait(self, since: float, run: str) -> None:
        """`run`: the Redis process that was known at `since` (monotonic)."""
        async with self._asking:
            self._next = None  # the question is sent now: later callers need another
            deadline = time.monotonic() + PATIENCE_S
            barrier = Barrier()
            while not barrier.passed(await self._answer(barrier, since, run)):
                if time.monotonic() >= deadline:
                    raise redis.exceptions.TimeoutError("Redis cannot write its log")
                await asyncio.sleep(PAUSE_S)

    async def _answer(self, barrier: Barrier, since: float, run: str) -> dict[str, Any]:
        """The answer of the Redis process that was there before `since`."""
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.info("server")
            barrier.ask(pipe)
            server, answer = await pipe.execute()
        self._run = server["run_id"]
        waited = time.monotonic() - since
        if run not in ("", self._run) and waited > BACK_S and server["uptime_in_seconds"] < waited + MARGIN_S:
            raise redis.exceptions.ConnectionError("Redis was restarted, perhaps without what it had answered before")
        return dict(answer)
