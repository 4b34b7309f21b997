"""Does a job that is over ever become something else?

Watches every change in Redis, and remembers the ends that Redis has logged: like the API, it
believes nothing else, because a kill takes back what Redis only answered.
"""

import contextlib
import threading
import time
from typing import NamedTuple

import redis

from midstream.broker.ledger.core.aof_barrier import PAUSE_S, Barrier

#: Changes are collected for so long before the jobs are read, in seconds.
TICK_S = 0.1
TERMINAL = {"succeeded", "failed", "cancelled", "aborted"}
FIELDS = ("state", "attempt", "finished", "error", "capture_status")


def wait_until_logged(client: "redis.Redis") -> None:
    """Wait until everything that this Redis has answered is in its log."""
    barrier = Barrier()
    while True:
        with client.pipeline(transaction=False) as pipe:
            barrier.ask(pipe)
            if barrier.passed(*pipe.execute()):
                return
        time.sleep(PAUSE_S)


def read(client: "redis.Redis", jobs: list[str]) -> list[list[bytes | None]]:
    """Return `FIELDS` of each job."""
    with client.pipeline(transaction=False) as pipe:
        for job in jobs:
            pipe.hmget(f"ms:job:{job}", FIELDS)
        return list(pipe.execute())


class End(NamedTuple):
    """What must not change any more."""

    state: str
    attempt: str
    finished: str
    error: str
    capture_status: str


class Monitor(threading.Thread):
    """`ends`: job id → its end as it was first seen.

    `changed`: what was seen to differ from that.
    """

    def __init__(self, redis_url: str):
        super().__init__(name="monitor", daemon=True)
        self._url = redis_url
        self.ends: dict[str, End] = {}
        self.changed: list[str] = []
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                # Redis is being killed as well
                self._watch()
            self._over.wait(TICK_S)

    def stop(self) -> None:
        self._over.set()
        self.join()

    def _watch(self) -> None:
        with (
            redis.Redis.from_url(self._url, retry=None) as client,
            client.pubsub(ignore_subscribe_messages=True) as channel,
        ):
            channel.psubscribe("ms:changed:*")
            while not self._over.is_set():
                stirred = set()
                message = channel.get_message(timeout=TICK_S)
                while message is not None:
                    stirred.add(message["channel"].decode().removeprefix("ms:changed:"))
                    message = channel.get_message(timeout=0)
                self.look(client, sorted(stirred))
                self._over.wait(TICK_S)

    def look(self, client: "redis.Redis", jobs: list[str]) -> None:
        """Read these jobs and compare with how they were seen to end. Read twice, because Redis may
        have been started again meanwhile, without what it had not logged.
        """
        if not jobs:
            return
        before = read(client, jobs)
        wait_until_logged(client)
        for job, values, logged in zip(jobs, before, read(client, jobs), strict=True):
            if values != logged:
                continue
            end = End(*[(value or b"").decode() for value in values])
            if end.state in TERMINAL:
                first = self.ends.setdefault(job, end)
                if first != end:
                    self.changed.append(f"{job} was {first}, became {end}")
            elif job in self.ends:
                self.changed.append(f"{job} was {self.ends[job]}, became {end.state or 'nothing'}")
