"""The engine's host inside a Celery worker, and recovery when the engine dies.

One thread runs one event loop for the process's whole life. The engine, the ledger's connections,
the attempts and the heartbeat run on that loop, and all other code reaches them through
`EngineHost`. The thread must not end before the process: the engine's children are killed when the
thread that started them ends.
"""

import asyncio
import contextlib
import logging
import os
import socket
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from ...broker.ledger.jobs.inputs import LedgerInputs
from ...broker.ledger.jobs.ledger import Ledger
from ...broker.ledger.named.steering import LedgerSteering
from ...broker.ledger.recovery.reaper import Reaper
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import now
from ...schemas.base.version import __version__
from ...schemas.jobs.models import WorkerInfo, encode_bundle
from ...schemas.jobs.queues import GRADIENTS
from ...schemas.settings.settings import Settings
from ...storage.disk import probe
from ...storage.store import open_store
from ..engine import start_times
from ..engine.identity import BOOT
from ..engine.protocol import Engine, PublishingEngine
from ..engines import make_engine
from .attempt import AttemptOutcome
from .attempts import Attempts
from .heartbeat import Heartbeat
from .metrics import WorkerMetrics, versions
from .rank_watch import RankWatch
from .redis_retry import end_tasks, patiently

logger = logging.getLogger(__name__)

#: How often a blocking start checks whether it should give up.
INTERRUPT_CHECK_S = 0.2
#: Interval of the checks whether captures and receipts can be written.
DISK_LOOK_S = 2.0
#: Seconds, after the engine has died, to release its jobs and to stop what is left of it.
DEATH_GRACE_S = 4.0


@dataclass(frozen=True)
class _Parts:
    """What serves jobs once the engine has started."""

    engine: Engine
    attempts: Attempts
    watch: RankWatch
    metrics: WorkerMetrics
    heartbeat: Heartbeat


class EngineHost:
    """Owns the event-loop thread.

    `on_death(reason)` is called once, on that thread, if the engine dies unexpectedly.
    """

    def __init__(
        self,
        settings: Settings,
        on_death: Callable[[str], None],
    ):
        self.settings = settings
        self.started_at = now()
        self.death = ""  # why the engine died; empty while it has not
        self._died = asyncio.Event()
        self._disk_trouble = ""  # why captures or receipts cannot be written
        self._store_trouble = ""  # why captures cannot be written
        self._on_death = on_death
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine", daemon=True)
        self._background: list[asyncio.Task[None]] = []
        self.ready = False  # the engine has started
        self._parts: _Parts | None = None
        self._ledger = Ledger.connect(settings)

    # Called from any thread

    def start(self, check_interrupt: Callable[[], None]) -> None:
        """Block until the engine is ready.

        `check_interrupt` is called every `INTERRUPT_CHECK_S` and may raise to give up. Raises
        MidstreamError when the engine does not start; started parts are stopped again.
        """
        self._thread.start()
        starting = self._schedule(self._start())
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    starting.result(INTERRUPT_CHECK_S)
                    self.ready = True
                    return
                if starting.done():  # the TimeoutError was raised by `_start`
                    starting.result()
                check_interrupt()
        except BaseException:
            starting.cancel()
            self.stop()
            raise

    @property
    def dtype(self) -> str:
        """Return what the model computes in, and why, once the engine is ready."""
        info = self._started.engine.info
        return f"{info.dtype} ({info.dtype_reason})" if info.dtype_reason else info.dtype

    @property
    def caveats(self) -> list[str]:
        """Return the model's caveats, once the engine is ready."""
        return self._started.engine.info.caveats

    def run(self, job_id: str, kind: str) -> AttemptOutcome:
        """Run a job of this kind on the engine's loop and wait for the end of its attempt.

        Raises JobFailed when it ended with a problem.
        """
        outcome: AttemptOutcome = self._schedule(self._started.attempts.run(job_id, kind)).result()
        return outcome

    def cancel(self, job_id: str) -> None:
        """Stop a job if it runs here; returns immediately."""
        if self._parts is not None:
            self._loop.call_soon_threadsafe(
                self._parts.attempts.stop, [job_id], AttemptOutcome.CANCELLED
            )

    def give_back(self) -> None:
        """Give the jobs back that do not end within `tuning.stop_grace_s`; returns immediately."""
        if self._parts is not None:
            self._schedule(self._parts.attempts.give_back(self.settings.tuning.stop_grace_s))

    def describe(self) -> dict[str, Any]:
        """Return what `inspect midstream_engine` shows."""
        parts = self._started
        info = parts.engine.info
        return {
            "model": info.name,
            "architecture": info.architecture,
            "dtype": info.dtype,
            "tp": info.tp,
            "pp": info.pp,
            "runner": info.runner,
            "worker": self.settings.worker_id,
            "boot": BOOT,
            "healthy": not self._trouble,
            "detail": self._trouble,
            "started": self.started_at,
            "running": parts.attempts.held,
            "stats": msgspec.to_builtins(parts.metrics.stats()),
            "versions": versions(),
        }

    def stop(self) -> None:
        """Stop engine and loop; called when no attempt runs, or attempts no longer matter."""
        if not self._thread.is_alive():
            return
        stopping = self._schedule(self._stop())
        try:
            # while the engine starts, its code may hold the loop
            stopping.result(None if self.ready and not self.death else DEATH_GRACE_S)
        except TimeoutError:
            logger.error(
                "the engine did not stop within %s s; it ends with the process", DEATH_GRACE_S
            )
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(DEATH_GRACE_S)

    def _schedule(self, coroutine: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    # On the loop

    async def _start(self) -> None:
        settings = self.settings
        await patiently(self._ledger.ping)
        await patiently(self._release_former_boots)
        await self._await_disks()
        await self._sign_store()
        # a thread: reading the model's configuration may wait for a download
        engine = await asyncio.to_thread(make_engine, settings)
        logger.info("engine starting: %s", settings.model)
        await engine.start()
        logger.info("engine started in %s", start_times.told())
        watch = RankWatch(
            LedgerSteering(self._ledger), engine, settings, BOOT, lambda: heartbeat.beat()
        )
        attempts = Attempts(
            ledger=self._ledger,
            engine=engine,
            watch=watch,
            worker=settings.worker_id,
            boot=BOOT,
            engine_died=self._died,
            unreachable=lambda: self._store_trouble,
        )
        metrics = WorkerMetrics(engine.info.name, attempts, watch, lambda: engine.waiting)
        heartbeat = Heartbeat(settings, attempts, self._info, self._publish, self._published)
        self._parts = _Parts(engine, attempts, watch, metrics, heartbeat)
        metrics.register()
        await patiently(self._publish, starting=True)
        await watch.start()  # before the first job
        await patiently(heartbeat.beat)
        watched = {
            "engine watch": engine.failed(),
            "heartbeat": heartbeat.run(),
            "ranks": watch.run(),
            "disks": self._watch_disks(),
        }
        self._background = [
            self._loop.create_task(self._watch(work), name=name) for name, work in watched.items()
        ]

    @property
    def _started(self) -> _Parts:
        assert self._parts is not None, "start() first"
        return self._parts

    async def _publish(self, starting: bool = False) -> None:
        """Publish the engine's model and its tokenizer.

        Raises MidstreamError("model_changed"), see `Ledger.publish_model`.
        """
        engine = self._started.engine
        worker = self._info()
        if starting:
            worker = msgspec.structs.replace(worker, healthy=False, detail="starting")
        if self.settings.queue == GRADIENTS:
            await self._ledger.publish_model(cast(PublishingEngine, engine).gradients, worker)
            return
        name, raw = encode_bundle(engine.tokenizer)
        await self._ledger.put_blob(name, raw)
        await self._ledger.publish_model(
            msgspec.structs.replace(engine.info, tokenizer=name), worker
        )

    async def _published(self) -> bool:
        """Return whether Redis has what `_publish` stores."""
        engine = self._started.engine
        info = engine.info
        if self.settings.queue == GRADIENTS:
            published = await self._ledger.gradients(info.name)
            return published == cast(PublishingEngine, engine).gradients
        return await self._ledger.serves(info.name, info.identity)

    def _info(self) -> WorkerInfo:
        parts = self._started
        info = parts.engine.info
        return WorkerInfo(
            worker=self.settings.worker_id,
            boot=BOOT,
            model=info.name,
            version=__version__,
            host=socket.gethostname(),
            pid=os.getpid(),
            started=self.started_at,
            tp=info.tp,
            pp=info.pp,
            healthy=not self._trouble,
            detail=self._trouble,
            stats=parts.metrics.stats(),
            identity=info.identity,
            queue=self.settings.queue,
        )

    @property
    def _trouble(self) -> str:
        """Return why no job begins here; empty when jobs may begin."""
        parts = self._started
        trouble = self.death or self._disk_trouble or parts.engine.trouble
        if trouble or parts.watch.state == "serving":
            return trouble
        return f"{parts.watch.state}: {parts.watch.detail}"

    async def _look_at_disks(self) -> None:
        """Check whether captures and receipts can be written; log each change."""
        data = Path(self.settings.data_dir)
        self._store_trouble = await asyncio.to_thread(open_store(self.settings.artifacts).trouble)
        troubles = [self._store_trouble]
        troubles += [await asyncio.to_thread(probe, folder) for folder in (data / "outbox", data)]
        trouble = next(filter(None, troubles), "")
        if trouble and not self._disk_trouble:
            logger.error("%s: captures and receipts are on hold", trouble)
        elif self._disk_trouble and not trouble:
            logger.warning("captures and receipts are writable again")
        self._disk_trouble = trouble

    async def _await_disks(self) -> None:
        """Wait until captures and receipts can be written: loading the engine takes minutes."""
        await self._look_at_disks()
        while self._disk_trouble:
            await asyncio.sleep(DISK_LOOK_S)
            await self._look_at_disks()

    async def _sign_store(self) -> None:
        """If the store cannot be signed, the ledger keeps what large jobs bring."""
        inputs = LedgerInputs(self._ledger)
        try:
            await inputs.sign(self.settings.worker_id, BOOT)
        except OSError as error:
            logger.warning("cannot sign %s: %s", inputs.store.uri, error)

    async def _watch_disks(self) -> str:
        """Check until cancelled.

        The result is sent with the heartbeat, and immediately when it changes.
        """
        while True:
            await asyncio.sleep(DISK_LOOK_S)
            before = self._disk_trouble
            await self._look_at_disks()
            if bool(before) != bool(self._disk_trouble):
                with contextlib.suppress(MidstreamError):  # the next heartbeat is due soon
                    await self._started.heartbeat.beat()

    async def _watch(self, watched: Coroutine[Any, Any, str]) -> None:
        """Ends the worker when `watched` returns or raises: the worker can do no more work then.
        The running jobs are released to other attempts before that.
        """
        try:
            reason = await watched
        except Exception as error:
            logger.exception("a worker task failed")
            reason = f"{type(error).__name__}: {error}"
        if self.death:
            return
        logger.critical("engine died: %s", reason)
        self.death = reason
        self._died.set()
        parts = self._started
        parts.watch.close()
        try:
            async with asyncio.timeout(DEATH_GRACE_S / 2):
                parts.attempts.stop(list(parts.attempts.held), AttemptOutcome.RELEASED)
                await parts.attempts.drain()
        except TimeoutError:
            logger.error("could not release the running jobs in time; their leases will expire")
        finally:
            self._on_death(reason)

    async def _release_former_boots(self) -> None:
        """Requeue immediately the jobs that this worker held when it was last killed."""
        released = await Reaper(self._ledger).release_boots(self.settings.worker_id, BOOT)
        if released:
            logger.warning("requeued %s, held by an earlier start of this worker", released)

    async def _stop(self) -> None:
        await end_tasks(self._background)
        if (parts := self._parts) is not None:
            parts.metrics.unregister()
            await parts.engine.shutdown()
            await parts.heartbeat.close()
        await self._ledger.close()
