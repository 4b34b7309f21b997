"""The `callbacks` worker: recovers abandoned jobs, and runs what packages offer, such as the sender
of webhooks.

A Celery worker with the reaper and the packages' work next to its pool. Each runs on its own
thread and not as a task, because it must also run when messages get lost. Run one or more, on any
machines: they share the work. Run as `python -m midstream.broker.callbacks`; settings come from the
environment.
"""

import asyncio
import logging
import math
import sys
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
from celery import Celery, bootsteps, signals
from celery.utils.nodenames import default_nodename, host_format

from ..schemas import packages
from ..schemas.base.errors import MidstreamError
from ..schemas.base.records import now
from ..schemas.settings import faults
from ..schemas.settings.settings import Settings, SettingsError, load_settings
from .artifacts import fitness
from .ledger.jobs.ledger import Ledger
from .ledger.recovery.reaper import Reaper
from .processes.liveness import REAPER_KEY
from .queue.celery_app import CALLBACKS_QUEUE, make_app
from .queue.transport import TRANSPORT
from .redis_service import durability as redis_durability
from .redis_service.availability import is_redis_unavailable
from .telemetry import metrics, start as observability

log = logging.getLogger(__name__)

EXIT_BAD_SETTINGS = 2
CONCURRENCY = 4
#: Seconds that a sweep under way may take to end at shutdown.
STOP_TIMEOUT_S = 10.0
#: After this many missed sweeps, the reaper counts as dead.
SWEEPS_MISSED = 3
#: Entry points of what packages do in this process: name of its thread → a coroutine function of
#: the settings, which runs until it is cancelled and handles its own failures.
ADDED_WORK = "midstream.callbacks"
#: Name of the thread that sends webhooks, and of the extra whose package has it.
SENDER = "webhooks"

AddedWork = Callable[[Settings], Coroutine[Any, Any, None]]


class LoopThread:
    """Runs `work` on an event loop in its own thread until stopped; `work` handles its own
    failures.
    """

    def __init__(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._name = name
        self._work = work
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Cancel `work`, and wait up to `STOP_TIMEOUT_S` for its end; harmless when repeated."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(STOP_TIMEOUT_S)

    terminate = stop

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._task = self._loop.create_task(self._work())
        try:
            self._loop.run_until_complete(self._task)
        except asyncio.CancelledError:
            log.info("%s stopped", self._name)
        finally:
            self._loop.close()


async def keep_sweeping(settings: Settings) -> None:
    """Sweep every `sweep_interval_s` until cancelled; a sweep that fails is logged and the next one
    tries again.
    """
    ledger = Ledger.connect(settings)
    reaper = Reaper(ledger)
    alive_s = math.ceil(SWEEPS_MISSED * settings.tuning.sweep_interval_s + STOP_TIMEOUT_S)
    unreachable = False
    try:
        while True:
            try:
                report = await reaper.sweep()
                await ledger.redis.set(REAPER_KEY, f"{now():.3f}", ex=alive_s)
                if report:
                    log.info("swept: %s", report)
                    for action, value in msgspec.structs.asdict(report).items():
                        metrics.SWEPT.labels(action).inc(
                            value if isinstance(value, int) else len(value)
                        )
                if unreachable:
                    log.warning("the reaper has resumed")
                unreachable = False
            except Exception as error:
                if not is_unavailable(error):
                    # The other jobs still need the next sweep.
                    log.exception(
                        "a pass of the reaper failed; next one in %s s",
                        settings.tuning.sweep_interval_s,
                    )
                elif not unreachable:
                    log.warning("the reaper is suspended, Redis unreachable: %s", error)
                unreachable = unreachable or is_unavailable(error)
            await asyncio.sleep(settings.tuning.sweep_interval_s)
    finally:
        await ledger.close()


def is_unavailable(error: Exception) -> bool:
    """Return whether Redis is unreachable or temporarily refuses."""
    return (
        error.kind == "unavailable"
        if isinstance(error, MidstreamError)
        else is_redis_unavailable(error)
    )


def _step(thread: str, work: AddedWork) -> type[bootsteps.StartStopStep]:
    """Return a worker bootstep that owns a thread for `work`."""

    class ThreadStep(bootsteps.StartStopStep):
        name = f"midstream.{thread}"

        def create(self, parent: Any) -> LoopThread:
            return LoopThread(thread, partial(work, parent.app.midstream_settings))

    return ThreadStep


def make_callbacks_app(settings: Settings) -> Celery:
    """Return the Celery app of the `callbacks` worker."""
    app = make_app(settings)
    app.conf.broker_transport = TRANSPORT
    app.midstream_settings = settings
    app.steps["worker"].add(_step("reaper", keep_sweeping))
    added = packages.offered(ADDED_WORK)
    if SENDER not in added:
        log.warning(
            "this process sends no webhooks: the package midstream-webhooks is not installed here; "
            "to install it: %s",
            packages.installing(SENDER),
        )
    for thread in added:
        app.steps["worker"].add(_step(thread, packages.load(ADDED_WORK, thread)))
    return app


def main() -> int:
    """Run until stopped; returns the exit code."""
    try:
        settings = load_settings()
        if not settings.redis_url:
            raise SettingsError("MIDSTREAM_REDIS_URL: is required by the callbacks worker")
        redis_durability.require(settings)
        fitness.require(settings)
        faults.arm(settings.fault, settings.data_dir)
        observability.start(settings, "callbacks")
    except SettingsError as error:
        print(f"callbacks failed: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTINGS

    @signals.setup_logging.connect(weak=False)
    def _keep_logging(**_: Any) -> None:
        """Do nothing: Celery does not set up logging when this signal has a receiver."""

    @signals.worker_ready.connect(weak=False)
    def _say_ready(**_: Any) -> None:
        print("callbacks ready", flush=True)

    worker = make_callbacks_app(settings).Worker(
        hostname=host_format(default_nodename("callbacks@%h")),
        pool="threads",
        concurrency=CONCURRENCY,
        queues=[CALLBACKS_QUEUE],
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
        loglevel=settings.log_level,
        redirect_stdouts=False,
    )
    worker.start()
    return int(worker.exitcode or 0)


if __name__ == "__main__":
    sys.exit(main())
