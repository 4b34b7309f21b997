"""Waiting for jobs: until one changes, the server stops, or the caller's key ends."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection
from typing import Any, TypeVar

import anyio

from ...broker.ledger.jobs.ledger import JobSnapshot, Ledger
from ...broker.ledger.jobs.watch import JobWatcher
from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import JobView
from ..web.key_watch import ALWAYS, HeldKey

log = logging.getLogger("midstream.api")

T = TypeVar("T")
#: Whether a job is as the caller waits for it to be.
Until = Callable[[JobView], bool]

#: A held response outlives a Redis that restarts within this many seconds.
OUTAGE_S = 20.0
OUTAGE_PAUSE_S = 0.25
#: Seconds after which a cancelled wait that has not ended is cancelled again: its cancellation may
#: have been lost.
CANCEL_AGAIN_S = 0.2


class Waiting:
    """The held responses and streams of a process. Belongs to one event loop.

    `most_s`: seconds that a call may wait.
    """

    def __init__(self, ledger: Ledger, watcher: JobWatcher, most_s: float) -> None:
        self._ledger = ledger
        self._watcher = watcher
        self._most_s = most_s
        self._closing: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def close(self) -> None:
        """Answer held responses with what is known so far: the server is stopping.

        The jobs continue.
        """
        if not self._closing.done():
            self._closing.set_result(None)

    @property
    def closing(self) -> bool:
        return self._closing.done()

    async def outcome(
        self,
        job_id: str,
        until: Until,
        seconds: float,
        *,
        with_result: bool = True,
        quiet: Collection[str] = (),
        known: int = 0,
        held_key: HeldKey = ALWAYS,
    ) -> JobSnapshot:
        """Return the job, with its result unless only its record is asked for, as soon as `until`
        holds, or as it is after `seconds` (or when the server stops).

        `known`: a version up to which `until` cannot hold; nothing is read until there is a later
        one. `quiet`: states that cannot make `until` hold, see `JobWatcher.changed`. Raises
        `not_found`; `unauthorized` when the key of `held_key` is revoked or expires; `unavailable`
        when Redis is unreachable for longer than a restart takes, or, without the result, at the
        first read.
        """

        async def read() -> JobSnapshot:
            if with_result:
                return await self._ledger.outcome(job_id)
            return JobSnapshot(await self._ledger.view(job_id))

        deadline = time.monotonic() + min(seconds, self._most_s)
        if known and seconds > 0 and not self.closing:
            await self.or_closing(
                self._watcher.changed(job_id, known, deadline - time.monotonic(), quiet), held_key
            )
        patient = with_result
        while True:
            held_key.check()
            outcome = await (self.patiently(read) if patient else read())
            patient = True
            remaining = deadline - time.monotonic()
            if until(outcome.view) or remaining <= 0 or self.closing:
                return outcome
            await self.or_closing(
                self._watcher.changed(job_id, outcome.view.version, remaining, quiet), held_key
            )

    async def patiently(self, read: Callable[[], Awaitable[T]]) -> T:
        """Call `read`; repeat the call while Redis restarts."""
        until: float | None = None
        while True:
            try:
                return await read()
            except MidstreamError as error:
                until = until or time.monotonic() + OUTAGE_S
                if error.kind != "unavailable" or self.closing or time.monotonic() > until:
                    raise
            await self.or_closing(asyncio.sleep(OUTAGE_PAUSE_S))

    async def or_closing(self, wait: Any, held_key: HeldKey = ALWAYS) -> None:
        """Await `wait`; return early when the server stops or `held_key` ends."""
        task = asyncio.ensure_future(wait)
        try:
            await asyncio.wait(
                {task, self._closing, *held_key.ends}, return_when=asyncio.FIRST_COMPLETED
            )
            if task.done() and (error := task.exception()) is not None:
                if not (isinstance(error, MidstreamError) and error.kind == "unavailable"):
                    raise error
                # the caller's next read raises it again if it persists
                await asyncio.sleep(OUTAGE_PAUSE_S)
        finally:
            await ended(task)


async def left(receive: Callable[[], Awaitable[Any]]) -> None:
    """Return when the client has closed the connection of a call."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def ended(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks, repeatedly, until all have ended.

    Before Python 3.12 a cancellation is lost if it reaches an `asyncio.wait_for` whose work has
    just finished, and redis-py sends its commands through one: the wait would continue after its
    client has left. A caller that is cancelled meanwhile still waits for the tasks, so that none
    outlives it.
    """
    interrupted: asyncio.CancelledError | None = None
    with anyio.CancelScope(shield=True):
        while remaining := [task for task in tasks if not task.done()]:
            for task in remaining:
                task.cancel()
            try:
                await asyncio.wait(remaining, timeout=CANCEL_AGAIN_S)
            except asyncio.CancelledError as again:
                interrupted = again
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("an abandoned wait failed: %r", error)
    if interrupted is not None:
        raise interrupted
