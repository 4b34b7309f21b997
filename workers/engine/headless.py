"""Runs the ranks of a further machine of an engine, as `vllm serve --headless` does."""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
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


#: Seconds between attempts to reach rank 0 while the ranks start: machines start in any order.
AGAIN_S = 1.0


def run(settings: Settings, leave: Callable[[], None]) -> None:
    """Run the ranks until one of them, or rank 0 on the first machine, ends.

    `leave`: ends the process; called from another thread if rank 0 ends while the ranks start.

    Raises SettingsError, MidstreamError if it is unknown what would be loaded, and RanksEnded if
    the ranks did not start.
    """
    settings = for_platform(settings)
    prepare_environment(settings)
    use_all_cores(settings.vllm.ranks)
    config, _ = configured(settings)
    config.scheduler_config.scheduler_cls = scheduler_class(config)
    check(config)
    identity = identity_of(settings, config.model_config)
    msgspec.structs.replace(plane_of(settings), identity=identity).export()
    first = config.parallel_config.master_addr, config.parallel_config.master_port
    ranks = HeadlessRanks(leave)
    # before the ranks start, which may take minutes, and fails in many ways when rank 0 ends
    threading.Thread(target=ranks.end_with, args=(first,), daemon=True).start()
    try:
        executor: Any = MultiprocExecutor(config, monitor_workers=False)
    except Exception as error:  # vLLM raises plain ones for ranks that end
        raise RanksEnded(f"this machine's ranks did not start: {error}") from error
    ranks.started(executor.shutdown)
    print(f"ranks ready worker={settings.worker_id}", flush=True)
    executor.start_worker_monitor(inline=True)


class RanksEnded(Exception):
    """The ranks of this machine ended before they served."""


@dataclass(eq=False)
class HeadlessRanks:
    """This machine's ranks, which end with rank 0: vLLM's would wait for it forever."""

    _end: Callable[[], None]
    _started: threading.Event = field(default_factory=threading.Event)

    def started(self, end: Callable[[], None]) -> None:
        """Note that the ranks run, and how they are ended from now on."""
        self._end = end
        self._started.set()

    def end_with(self, first: tuple[str, int]) -> None:
        """End the ranks when rank 0, which listens on `first`, has ended, or cannot be reached
        although they have started.
        """
        while not _followed(first) and not self._started.is_set():
            self._started.wait(AGAIN_S)
        logger.error("rank 0 on %s:%d has ended, or cannot be reached", *first)
        self._end()


def _followed(first: tuple[str, int]) -> bool:
    """Return whether rank 0 could be reached, after its end."""
    try:
        link = socket.create_connection(first)
    except OSError:
        return False
    with link, contextlib.suppress(OSError):
        link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE.items():
            link.setsockopt(socket.IPPROTO_TCP, option, value)
        link.recv(1)
    return True
