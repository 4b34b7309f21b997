"""Wakes held responses when their jobs change: thousands of waiters on one connection, and no
change is missed.

One pub/sub connection per process receives every change. A message is only a hint: it may be lost
with the connection, so each waiter also polls from time to time, and all waiters poll when the
connection is restored.
"""

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Hashable
from typing import Any, Generic, TypeVar

import redis.asyncio
import redis.exceptions

from ....schemas.base.errors import MidstreamError
from ....schemas.base.recent import Recent
from ....schemas.jobs.jobs import Event
from ...redis_service import opening as redis_open
from .ledger import Ledger, not_found

log = logging.getLogger(__name__)

T = TypeVar("T")

#: Seconds between polls of one waiter while messages arrive.
POLL_S = 5.0
#: The same while the connection is down.
POLL_DEAF_S = 0.25
#: Number of jobs whose latest message is remembered, for callers that start to wait just after
#: the message arrived.
REMEMBERED = 4096
#: The message for an event that changes only the job's event stream.
EVENT_ADDED = b"e"
#: Seconds of silence after which the pub/sub connection is pinged.
HEALTH_CHECK_S = 5
RECONNECT_S = 0.2
#: Events of a job that are read at a time.
BATCH = 256
PATTERN = "ms:changed:*"
PREFIX = len("ms:changed:")


class SharedReads(Generic[T]):
    """Merges concurrent reads of one key into one read. Belongs to one event loop.

    `fresh_s`: seconds for which an answer is reused.
    """

    def __init__(self, fresh_s: float = 0.0) -> None:
        self._fresh_s = fresh_s
        self._current: dict[Hashable, asyncio.Future[T]] = {}
        self._next: dict[Hashable, asyncio.Future[T]] = {}

    async def of(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """Return the answer of `read`, or of another caller's read of the same key.

        A caller that is cancelled does not cancel the read.
        """
        if (current := self._current.get(key)) is None:
            current = self._current[key] = asyncio.ensure_future(read())
            current.add_done_callback(lambda done: self._done(key, done))
        return await asyncio.shield(current)

    async def of_next(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        """Read like `of`, but by a read that begins after this call.

        Callers that arrive during one read share the next, so one runs at a time.
        """
        if (following := self._next.get(key)) is None:
            following = self._next[key] = asyncio.ensure_future(self._after(key, read))
            # retrieves the exception, also if no caller is left
            following.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(following)

    async def _after(self, key: Hashable, read: Callable[[], Awaitable[T]]) -> T:
        if key in self._current:
            await asyncio.wait({self._current[key]})
        del self._next[key]
        return await self.of(key, read)

    def _done(self, key: Hashable, done: asyncio.Future[T]) -> None:
        if self._fresh_s and not done.cancelled() and done.exception() is None:
            done.get_loop().call_later(self._fresh_s, self._current.pop, key, None)
        else:
            del self._current[key]


class EventBatch(list[Event]):
    """The events after one id of a job's stream, shared by their readers.

    `sent`: the rendering by the first reader.
    """

    sent: bytes | None = None


class Waiter:
    """One call that waits for changes of a job."""

    def __init__(self, quiet: Collection[str], on_events: bool) -> None:
        self.woken = asyncio.Event()
        self.quiet = quiet  # states that do not wake it
        self.on_events = on_events  # whether events of the job's stream wake it


class JobWatcher:
    """Waits for changes of jobs on one pub/sub connection. Belongs to one event loop.

    Use as `async with JobWatcher(ledger)`.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._waiting: dict[str, set[Waiter]] = {}
        # job id → version and state, heard on the current connection
        self._heard = Recent[str, tuple[int, str]](REMEMBERED)
        self._reads: SharedReads[EventBatch] = SharedReads()
        self._messages = 0  # number heard so far
        self._hearing = asyncio.Event()
        #: Called with the id of each job of which a change is heard; and when changes may have been
        #: missed.
        self.on_change: Callable[[str], None] | None = None
        self.on_gap: Callable[[], None] | None = None

    async def __aenter__(self) -> "JobWatcher":
        """Start listening."""
        self._task = asyncio.create_task(self._listen(), name="midstream-watcher")
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening and wake all waiters, which reach their deadline or continue by
        polling.
        """
        # redis-py may swallow a cancellation (asyncio.wait_for of Python 3.11)
        while not self._task.done():
            self._task.cancel()
            await asyncio.wait({self._task}, timeout=0.5)
        self._hearing.clear()
        self._wake_all()

    @property
    def waiting(self) -> int:
        """Number of waiting calls."""
        return sum(map(len, self._waiting.values()))

    async def changed(
        self, job_id: str, version: int, timeout: float, quiet: Collection[str] = ()
    ) -> int:
        """Return the job's version: immediately if it differs from `version`, else when it grows,
        or after `timeout` seconds.

        `quiet`: states that need not wake the caller: states of jobs, and `generated` (only
        receipts are awaited). While Redis is unreachable the call keeps waiting; at the timeout it
        returns `version`. Raises not_found.
        """

        async def look(polled: bool) -> int | None:
            if (
                not polled
                and self._hearing.is_set()
                and (notice := self._heard.get(job_id)) is not None
            ):
                current, state = notice
                return current if current > version and state not in quiet else None
            if (result := await self._ledger.version(job_id)) is None:
                raise not_found(job_id)
            # also a lower version: Redis may have lost its last second, and the job's last change
            return result if result != version else None

        result = await self._until(job_id, Waiter(quiet, on_events=False), look, timeout)
        return version if result is None else result

    async def has_events(self, job_id: str, after: str, timeout: float) -> bool:
        """Return whether the job's event stream has an entry after the event id `after`; waits up
        to `timeout` seconds for one.

        Raises not_found.
        """

        async def look(_: bool) -> bool | None:
            return bool(await self.events(job_id, after)) or None

        return await self._until(job_id, Waiter((), on_events=True), look, timeout) is not None

    async def events(self, job_id: str, after: str) -> EventBatch:
        """Return the next events after the event id `after`, read once for concurrent callers.

        Raises as `Ledger.events` does.
        """

        async def read() -> EventBatch:
            return EventBatch(await self._ledger.events(job_id, after, BATCH))

        # The key excludes reads that began before the latest message: they may lack its event.
        return await self._reads.of((job_id, after, self._messages), read)

    async def _until(
        self,
        job_id: str,
        waiter: Waiter,
        look: Callable[[bool], Awaitable[T | None]],
        timeout: float,
    ) -> T | None:
        """Return the result of `look`, called until it is not None; None after `timeout`.

        The waiter is registered before `look` is called, so that no change is missed. The argument
        of `look`: whether it is called only because some time has passed.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        polled = False
        self._waiting.setdefault(job_id, set()).add(waiter)
        try:
            while True:
                waiter.woken.clear()
                try:
                    async with asyncio.timeout_at(deadline):
                        result = await look(polled)
                    if result is not None:
                        return result
                except TimeoutError:
                    return None
                except MidstreamError as error:
                    if error.kind != "unavailable":
                        raise
                patience = min(
                    deadline - loop.time(), POLL_S if self._hearing.is_set() else POLL_DEAF_S
                )
                if patience <= 0:
                    return None
                polled = True
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(patience):
                        await waiter.woken.wait()
                        polled = False
        finally:
            waiters = self._waiting[job_id]
            waiters.discard(waiter)
            if not waiters:
                del self._waiting[job_id]

    async def _listen(self) -> None:
        """Receive messages forever; after any failure wake all waiters, reconnect, and wake them
        again.
        """
        while True:
            try:
                await self._hear()
            except (redis.exceptions.RedisError, OSError) as error:
                log.warning(
                    "no notifications of job changes; polling instead (waiters: %d): %s",
                    self.waiting,
                    error,
                )
            finally:
                self._hearing.clear()
                self._heard.clear()
                self._wake_all()
            await asyncio.sleep(RECONNECT_S)

    async def _hear(self) -> None:
        settings = self._ledger.settings
        # A separate connection that reports failures immediately instead of reconnecting silently;
        # read directly, because redis-py's PubSub takes several times as long over each message
        # (and more still with RESP3).
        pool: Any = redis_open.async_pool(  # without types
            settings.redis_url,
            retry=None,
            socket_connect_timeout=5,
            socket_timeout=None,
            socket_keepalive=True,
            protocol=2,
        )
        connection = await pool.get_connection()
        try:
            await connection.send_command("PSUBSCRIBE", PATTERN)
            while True:
                message = await connection.read_response(timeout=HEALTH_CHECK_S)
                if message is None:
                    # the answer is a message; a dead peer makes the next read or write fail
                    await connection.send_command("PING")
                elif message[0] == b"psubscribe":
                    self._hearing.set()
                    self._wake_all()  # changes may have been missed while disconnected
                elif message[0] == b"pmessage":
                    self._wake(message[2][PREFIX:].decode(), message[3])
        finally:
            await connection.disconnect()

    def _wake(self, job_id: str, message: bytes) -> None:
        self._messages += 1
        if self.on_change is not None:
            self.on_change(job_id)
        waiters = self._waiting.get(job_id, ())
        if message == EVENT_ADDED:
            for waiter in waiters:
                if waiter.on_events:
                    waiter.woken.set()
            return
        version, _, state = message.decode().partition(" ")
        self._heard[job_id] = int(version), state
        for waiter in waiters:
            if state not in waiter.quiet:
                waiter.woken.set()

    def _wake_all(self) -> None:
        if self.on_gap is not None:
            self.on_gap()
        for waiters in self._waiting.values():
            for waiter in waiters:
                waiter.woken.set()
