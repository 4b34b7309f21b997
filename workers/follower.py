"""Runs one machine's ranks of an engine that spans several machines.

`python -m midstream.workers.follower` takes the worker's settings, but its own `node_rank`. It
joins the worker's next start, and exits with 0 when that engine has ended, so that a supervisor
starts it again: the worker and its followers may be started in any order.
"""

import logging
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import redis

from ..broker.processes import leftovers
from ..broker.receipts.curve import client_keys
from ..broker.telemetry import start as observability
from ..schemas.base import MidstreamError
from ..schemas.settings.settings import Settings, SettingsError, load_settings, relay_addresses
from .engine.nodes import POLL_S, Worker, check_identity
from .runner.base.compile_key import layout

log = logging.getLogger(__name__)

EXIT_BAD_SETTINGS = 2
EXIT_UNREACHABLE = 70


def run(settings: Settings) -> None:
    """Joins the worker's start and returns when its engine has ended.

    Raises SettingsError, and MidstreamError if the worker has a different model.
    """
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from .engine.model_identity import identity_of
    from .engine.options.engine_arguments import (
        for_platform,
        prepare_environment,
        scheduler_class,
        use_all_cores,
    )
    from .engine.vllm import configured
    from .runner.support.denylist import check

    settings = for_platform(settings)
    prepare_environment(settings)
    use_all_cores(settings.vllm.ranks)
    config, _ = configured(settings)
    config.scheduler_config.scheduler_cls = scheduler_class(config)
    check(config)
    identity = identity_of(settings, config.model_config)
    worker = Worker(settings)
    print(f"follower waits for worker {settings.worker_id} node={settings.node_rank}", flush=True)
    plane = worker.await_start(after="")
    check_identity(plane, identity)
    config.additional_config = layout(plane)
    plane.export()
    leftovers.remove_left(Path(plane.outbox_dir).parent)
    threading.Thread(
        target=_leave_with, args=(worker, plane.boot), name="follower", daemon=True
    ).start()
    try:
        executor: Any = MultiprocExecutor(config, monitor_workers=False)
        print(f"follower ready worker={settings.worker_id} node={settings.node_rank}", flush=True)
        executor.start_worker_monitor(inline=True)
    finally:
        worker.leave()


def _leave_with(worker: Worker, boot: str) -> None:
    """Reports this machine as present; ends this process, and with it its ranks, when the worker's
    start is over or unreachable.

    Otherwise the ranks would wait for the worker's next step for ever.
    """
    while True:
        time.sleep(POLL_S)
        try:
            if worker.is_over(boot):
                log.warning("the worker's engine has ended")
                os._exit(0)
            if not worker.renew(boot):
                log.warning("the worker's machine cannot be reached")
                worker.leave()
                os._exit(EXIT_UNREACHABLE)
        except redis.RedisError as error:
            log.info("cannot check on the worker, Redis unreachable: %s", error)


def main() -> int:
    """Runs until the engine ends; returns the exit code."""
    try:
        settings = load_settings()
        for name in ("redis_url", "relay_url", "model", "worker_id", "node_master"):
            if not getattr(settings, name):
                raise SettingsError(f"MIDSTREAM_{name.upper()}: is required by a follower")
        relay_addresses(settings.relay_url)
        if not 0 < settings.node_rank < settings.nodes:
            raise SettingsError(
                f"node_rank={settings.node_rank}: a follower has 1 to {settings.nodes - 1} "
                "(nodes - 1)"
            )
        client_keys(settings.curve_secret_file, settings.curve_server_key)
        observability.start(settings, "follower", worker=settings.worker_id)
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        run(settings)
    except (SettingsError, MidstreamError, redis.RedisError) as error:
        print(f"follower failed: {error}", file=sys.stderr, flush=True)
        return EXIT_BAD_SETTINGS
    return 0


if __name__ == "__main__":
    sys.exit(main())
