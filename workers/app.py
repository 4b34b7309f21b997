"""The Celery worker that hosts an engine: a bootstep that starts before the pool and stops after it
has drained.

Nothing is consumed before the engine is ready, and the engine outlives the last running task. When
the engine dies, the jobs go back to the queue and the process ends with `EXIT_ENGINE_DIED`, so that
a supervisor starts another.
"""

import argparse
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from celery import Celery, bootsteps, signals
from celery.exceptions import CPendingDeprecationWarning, SecurityWarning
from celery.utils.nodenames import default_nodename, host_format
from celery.worker import state as worker_state
from celery.worker.components import Pool

from ..broker.artifacts import fitness
from ..broker.processes import leftovers
from ..broker.queue.celery_app import make_app, queue_of
from ..broker.queue.transport import TRANSPORT
from ..broker.queue.visibility import LeaseStep
from ..broker.receipts.curve import client_keys, with_kept_keys
from ..broker.redis_service import durability as redis_durability
from ..broker.telemetry import start as observability, traces
from ..schemas.base.errors import MidstreamError
from ..schemas.base.records import learn_records
from ..schemas.jobs.queues import GRADIENTS
from ..schemas.service.global_capture import from_settings
from ..schemas.settings import faults
from ..schemas.settings.settings import (
    Settings,
    SettingsError,
    engine_options,
    load_settings,
    relay_addresses,
)
from ..storage.disk import disk_trouble

# Importing it registers the remote-control commands.
from . import remote_control as _control  # noqa: F401
from .engine import early_core, start_times
from .engine.identity import WorkerLock, with_worker_id
from .engines import VLLM, check_options
from .serving.host import EngineHost
from .serving.tasks import register_tasks

EXIT_BAD_SETTINGS = 2
EXIT_NO_ENGINE = 3  # the engine never started
EXIT_ENGINE_DIED = 70
#: An orderly end after the engine's death takes a second or two; after this the process is killed.
EXIT_DEADLINE_S = 6.0
#: Concurrent jobs of a gradient worker, which takes turns between them, and ends them before it
#: stops. Others wait in the queue, for any worker.
GRADIENT_JOBS = 2
#: The environment variable that names the file which `compose/worker.sh` makes and
#: `broker.health.worker` reads.
NOTE_VARIABLE = "WORKER_STARTING_NOTE"
#: Characters in it. Docker keeps 4 KiB of what a health check prints.
NOTE_CHARS = 2000


class EngineStep(bootsteps.StartStopStep):
    """Starts the host before the pool, and stops it after the pool.

    The order holds because the pool requires this step.
    """

    def create(self, parent: Any) -> "EngineStep":
        return self

    def start(self, parent: Any) -> None:
        # On SIGHUP Celery would start `sys.argv` again, which does not work for a package.
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
        host: EngineHost = parent.app.engine_host
        try:
            host.start(check_interrupt=worker_state.maybe_shutdown)
        except MidstreamError as error:
            _print_failure(str(error))
            raise SystemExit(EXIT_NO_ENGINE) from error

    def close(self, parent: Any) -> None:
        """Is called before the pool waits for its tasks."""
        parent.app.engine_host.give_back()

    def stop(self, parent: Any) -> None:
        parent.app.engine_host.stop()

    terminate = stop

    def info(self, parent: Any) -> dict[str, Any]:
        """Returns the engine's part of `inspect stats`, which Flower shows for a worker."""
        return (
            {"midstream": parent.app.engine_host.describe()} if parent.app.engine_host.ready else {}
        )


def make_worker_app(settings: Settings) -> Celery:
    """Returns the Celery app of a worker, with its host, tasks and bootsteps."""
    app = make_app(settings)
    # not in `make_app`, which Flower also uses: Flower recognises a broker by its URL's scheme, and
    # this setting would override it
    app.conf.broker_transport = TRANSPORT
    app.engine_host = EngineHost(settings, lambda _: _end_process())
    # a dead engine's messages must come back to the queue
    app.may_renew = lambda: not app.engine_host.death
    register_tasks(app, app.engine_host)
    app.steps["worker"].add(EngineStep)
    app.steps["consumer"].add(LeaseStep)
    if EngineStep not in Pool.requires:
        Pool.requires = (*Pool.requires, EngineStep)
    return app


def _end_process() -> None:
    """Make the main thread leave its loop, and end the process even if it does not."""
    worker_state.should_terminate = EXIT_ENGINE_DIED
    deadline = threading.Timer(EXIT_DEADLINE_S, os._exit, (EXIT_ENGINE_DIED,))
    deadline.daemon = True
    deadline.start()


def _arguments(arguments: Sequence[str]) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        prog="python -m midstream.workers", description="Run one worker with one engine."
    )
    parser.add_argument(
        "--engine",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an option of vLLM; repeatable",
    )
    return {"engine_options": engine_options(parser.parse_args(arguments).engine) or None}


def main(arguments: Sequence[str] = ()) -> int:
    """Runs a worker until it is stopped, and ends the process; returns the exit code of one that
    did not begin.
    """
    start_times.begin("imports")
    try:
        settings = with_worker_id(load_settings(**_arguments(arguments)))
        _check(settings)
        redis_durability.require(settings)
        fitness.require(settings)
        settings = with_kept_keys(settings, settings.worker_id)
        faults.arm(settings.fault, settings.data_dir)
        lock = WorkerLock(settings)
        observability.start(settings, "worker", worker=settings.worker_id)
        leftovers.remove_left(Path(settings.data_dir))
        leftovers.own_temporary_folder(Path(settings.data_dir))
        early_core.begin(settings)
    except (SettingsError, MidstreamError) as error:
        _print_failure(str(error))
        return EXIT_BAD_SETTINGS
    except OSError as error:
        _print_failure(
            f"{disk_trouble(error) or error.strerror}: {error.filename or settings.data_dir}"
        )
        return EXIT_NO_ENGINE
    if settings.engine_options.get("node_rank"):
        return _run_ranks(settings)
    signals.setup_logging.connect(_keep_logging)
    # Neither warning applies: tasks are never cancelled on connection loss, and no message is
    # unpickled.
    warnings.simplefilter("ignore", CPendingDeprecationWarning)
    warnings.simplefilter("ignore", SecurityWarning)
    learn_records()
    app = make_worker_app(settings)

    @signals.worker_ready.connect(weak=False)
    def _say_ready(**_: Any) -> None:
        for caveat in app.engine_host.caveats:
            print(f"worker caveat: {caveat}", flush=True)
        print(
            f"worker ready model={settings.served_model} worker={settings.worker_id}",
            f"dtype={app.engine_host.dtype}",
            flush=True,
        )

    worker = app.Worker(
        hostname=host_format(default_nodename(f"{settings.worker_id}@%h")),
        pool="threads",
        concurrency=(
            min(settings.tuning.worker_concurrency, GRADIENT_JOBS)
            if settings.queue == GRADIENTS
            else settings.tuning.worker_concurrency
        ),
        queues=[queue_of(settings.served_model, settings.queue)],
        task_events=True,
        without_gossip=True,
        without_mingle=True,
        quiet=True,
        loglevel=settings.log_level,
        redirect_stdouts=False,
    )
    worker.start()
    lock.release()
    code = int(worker.exitcode or 0)
    if app.engine_host.death:
        _print_failure(app.engine_host.death)
        code = EXIT_ENGINE_DIED
    leftovers.remove_left(Path(settings.data_dir))
    _leave(code)


def _run_ranks(settings: Settings) -> int:
    """Run only the ranks of this machine, for a worker on another one, and end the process; return
    the exit code of ranks that did not begin.
    """
    from .engine.headless import RanksEnded, run

    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    try:
        run(settings, lambda: _leave(EXIT_ENGINE_DIED))
    except (SettingsError, MidstreamError) as error:
        _print_failure(str(error))
        return EXIT_NO_ENGINE
    except RanksEnded as error:
        _print_failure(str(error))
    _leave(EXIT_ENGINE_DIED)


def _print_failure(reason: str) -> None:
    """Print why the worker failed, and store it for the container's health check."""
    print(f"worker failed: {reason}", file=sys.stderr, flush=True)
    note = os.environ.get(NOTE_VARIABLE, "")
    if os.path.exists(note):
        with contextlib.suppress(OSError), open(note, "w") as file:
            file.write(reason[:NOTE_CHARS])


def _leave(code: int) -> NoReturn:
    """End the process without waiting for threads: one may still be building the engine, and
    nothing can interrupt that. The end of an interpreter with torch takes seconds, too.
    """
    for process in multiprocessing.active_children():
        process.kill()
    traces.close()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _check(settings: Settings) -> None:
    for name in ("redis_url", "relay_url"):
        if not getattr(settings, name):
            raise SettingsError(f"MIDSTREAM_{name.upper()}: is required by a worker")
    relay_addresses(settings.relay_url)
    if not settings.served_model:
        raise SettingsError("MIDSTREAM_MODEL: is required by a worker")
    if (
        settings.engine in (VLLM, GRADIENTS)
        and os.path.isabs(settings.model)
        and not os.path.exists(settings.model)
    ):
        raise SettingsError(f"MIDSTREAM_MODEL={settings.model}: no such folder")
    client_keys(settings.curve_secret_file, settings.curve_server_key)
    from_settings(settings)  # global capture: report invalid settings before the model is loaded
    check_options(settings)


def _keep_logging(**_: Any) -> None:
    """Does nothing; a receiver of `setup_logging` keeps Celery from configuring the logging."""
