"""The durability barrier: waits until Redis has logged every write that it has confirmed, so that a
kill loses none. With the setting `redis_replicas`, also waits until that many replicas have the
writes, so that a failover to one of them loses none.

With `appendfsync everysec` Redis writes to the kernel before it answers, with one exception: while
a background fsync runs, which takes long on a busy disk, it holds writes back for up to 2 s but
still answers. An answer is passed on as confirmed only after `INFO persistence` shows that no
earlier write is held back. (`redis_appendfsync = "always"` also covers a machine that dies.) Why
this and neither `appendfsync always` nor `WAITAOF`: docs/decisions/0014-durability-barrier.md.
Guarantees with replicas: docs/decisions/0036-failover.md.
"""

import asyncio
import time
from typing import Any

import redis.exceptions

from ...redis_service.availability import PROBE_KEY
from ...redis_service.durability import RedisInfo, refuse_lossy

#: Seconds between two polls while a sync is running.
PAUSE_S = 0.01
#: A Redis that cannot write for this long counts as unavailable.
PATIENCE_S = 10.0
#: A killed Redis takes longer than this to return, so an answer within this time comes from the
#: same Redis process. (A connection cut by an earlier restart costs half of it.)
BACK_S = 0.2
#: A Redis whose uptime exceeds the wait by more than this was not restarted. (It counts whole
#: seconds.)
MARGIN_S = 2.0
#: WAIT blocks its connection for at most this long; the barrier then asks again.
REPLICAS_MS = 500
#: With replicas, nothing is acknowledged for this long after another Redis has answered: the write
#: to be acknowledged may have been confirmed by the previous one.
SETTLED_S = 3.0


class Barrier:
    """One wait: the query to send, and whether its answer is sufficient.

    Both users, the asynchronous ledger and the synchronous relay, queue `ask` on a pipeline and
    pass its answers to `passed`.
    """

    def __init__(self, replicas: int = 0, lossy: bool = False) -> None:
        """`replicas`: how many must have the writes; `lossy`: whether a Redis without a log is
        accepted.
        """
        self._replicas = replicas
        self._lossy = lossy
        self._base = self._size = -1

    def ask(self, pipe: Any) -> None:
        """Queue the query on a pipeline, synchronous or not.

        Its answers are the last of the pipeline.
        """
        if self._replicas:
            # WAIT covers only its own connection's writes: this write follows all that were
            # confirmed on other connections.
            pipe.set(PROBE_KEY, 1, ex=60).wait(self._replicas, REPLICAS_MS)
        pipe.info("persistence")

    def passed(self, *answers: Any) -> bool:
        """Return whether everything confirmed before the first answers passed here is written.

        `answers`: to the commands of `ask`, in order. Raises LossyRedis for a Redis without a log.
        """
        if self._replicas and answers[-2] < self._replicas:
            return False
        return self._logged(answers[-1])

    def _logged(self, persistence: RedisInfo) -> bool:
        """Return whether everything confirmed before the first answer passed here is written to the
        log.

        Redis writes before it answers in each round of its loop. So if no sync was running in this
        round, everything held back was written before this answer left. If syncs follow each other
        without a pause and writes are always held back, the size of the log is the criterion.
        """
        if persistence.get("loading"):  # a restarted Redis: its log counts as off meanwhile
            return False
        refuse_lossy(persistence, self._lossy)
        if not persistence.get("aof_enabled") or not persistence["aof_buffer_length"]:
            return True
        if (
            not persistence["aof_pending_bio_fsync"]
            and persistence["aof_last_write_status"] == "ok"
        ):
            return True
        if persistence["aof_base_size"] != self._base:  # the first answer, or the log was rewritten
            self._base = persistence["aof_base_size"]
            self._size = persistence["aof_current_size"] + persistence["aof_buffer_length"]
        return bool(persistence["aof_current_size"] >= self._size)


def persistence_in(info: bytes) -> RedisInfo:
    """Return what `Barrier.passed` takes, from the text of `INFO persistence` as a script
    returns it.
    """
    pairs = (line.split(":", 1) for line in info.decode().splitlines() if ":" in line)
    return {name: int(value) if value.isdigit() else value for name, value in pairs}


class AofBarrier:
    """The barrier over a redis.asyncio client: `await barrier()`.

    Belongs to the client's event loop.
    """

    def __init__(self, client: Any, replicas: int = 0, lossy: bool = False) -> None:
        self._client = client
        self._lossy = lossy
        self._replicas = replicas
        self._run = ""  # id of the Redis process that answered last
        self._changed = float("-inf")  # when another one did (monotonic)
        self._asking = asyncio.Lock()
        self._next: asyncio.Task[None] | None = None

    async def __call__(self) -> None:
        """Wait until everything confirmed so far is written. Concurrent callers share one query.

        Raises redis.RedisError: a TimeoutError if Redis cannot write or too few replicas confirm, a
        ConnectionError if it was restarted or another took over meanwhile, so that writes it had
        confirmed may be lost; LossyRedis if its log is switched off.
        """
        if self._next is None:
            self._next = asyncio.create_task(
                self._wait(time.monotonic(), self._run), name="midstream-aof-barrier"
            )
        await asyncio.shield(self._next)

    async def _wait(self, since: float, run: str) -> None:
        """`run`: the Redis process that was known at `since` (monotonic)."""
        async with self._asking:
            self._next = None  # the query is sent now: later callers need another
            try:
                await self._confirmed(since, run)
            except redis.exceptions.RedisError:
                # They may lead to a former master, and the address elsewhere.
                await self._client.connection_pool.disconnect(inuse_connections=False)
                raise

    async def _confirmed(self, since: float, run: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        barrier = Barrier(self._replicas, self._lossy)
        while not barrier.passed(*await self._answers(barrier, since, run)):
            if time.monotonic() >= deadline:
                raise redis.exceptions.TimeoutError(
                    "Redis cannot write its log"
                    + (
                        f", or fewer than {self._replicas} replicas have its writes"
                        if self._replicas
                        else ""
                    )
                )
            await asyncio.sleep(PAUSE_S)

    async def _answers(self, barrier: Barrier, since: float, run: str) -> list[Any]:
        """Return the answers to `barrier.ask`. Raises ConnectionError if Redis was restarted, or
        another took over, after `since`.
        """
        async with self._client.pipeline(transaction=False) as pipe:
            pipe.info("server")
            barrier.ask(pipe)
            answers: list[Any]
            server, *answers = await pipe.execute()
        previous = self._run
        self._run = server["run_id"]
        if previous not in ("", self._run):
            self._changed = time.monotonic()
        waited = time.monotonic() - since
        if (
            run not in ("", self._run)
            and waited > BACK_S
            and server["uptime_in_seconds"] < waited + MARGIN_S
        ):
            raise redis.exceptions.ConnectionError(
                "Redis was restarted and may have lost writes that it had already acknowledged"
            )
        if self._replicas and self._changed > since - SETTLED_S:
            raise redis.exceptions.ConnectionError(
                "another Redis answers, which may lack writes that the previous one had confirmed"
            )
        return answers
