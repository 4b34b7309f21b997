"""Runs the ranks of a further machine of an engine, as `vllm serve --headless` does."""

import contextlib
import logging
import socket
import threading
from typing import Any

import msgspec
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from ...broker.queue.celery_app import KEEPALIVE
from ...schemas.settings.settings import Settings
from ..runner.support.denylist import check
from .model_identity import identity_of
from .options.engine_arguments import (
    for_platform,
    prepare_environment,
    scheduler_class,
    use_all_cores,
)
from .vllm import configured, plane_of

logger = logging.getLogger(__name__)


def run(settings: Settings) -> None:
    """Run the ranks until one of them, or rank 0 on the first machine, ends.

    Raises SettingsError, and MidstreamError if it is unknown what would be loaded.
    """
    settings = for_platform(settings)
    prepare_environment(settings)
    use_all_cores(settings.vllm.ranks)
    config, _ = configured(settings)
    config.scheduler_config.scheduler_cls = scheduler_class(config)
    check(config)
    identity = identity_of(settings, config.model_config)
    msgspec.structs.replace(plane_of(settings), identity=identity).export()
    executor: Any = MultiprocExecutor(config, monitor_workers=False)
    print(f"ranks ready worker={settings.worker_id}", flush=True)
    first = config.parallel_config.master_addr, config.parallel_config.master_port
    threading.Thread(target=end_with, args=(first, executor), daemon=True).start()
    executor.start_worker_monitor(inline=True)


def end_with(first: tuple[str, int], executor: Any) -> None:
    """End this machine's ranks when rank 0, which listens on `first`, has ended or cannot be
    reached: vLLM's ranks would wait for it forever.
    """
    with contextlib.suppress(OSError), socket.create_connection(first) as link:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        link.recv(1)
    logger.error("rank 0 on %s:%d has ended, or cannot be reached", *first)
    executor.shutdown()
