"""Connects a rank with what writes its files."""

import logging
import os
from collections.abc import Callable
from typing import cast

from ....broker.receipts.outbox import Outbox
from ..base.backlog import NEAR, Backlog
from ..base.config import PlaneConfig
from ..files.desk import EXIT_NO_RECEIPTS, Desk
from ..files.finished_rows import Consumer
from .arena import Arena
from .delivery import ForwardedReceipts, Near, RowDelivery
from .link import Link

logger = logging.getLogger(__name__)


#: (arena, configuration, rank, …) → its delivery; see `connected`.
RowConnection = Callable[..., RowDelivery]


def connected(
    arena: Arena,
    config: PlaneConfig,
    rank: int,
    *,
    gives_way: bool,
    begin: Callable[[], None],
    readings: Consumer,
) -> RowDelivery:
    """Start the process that writes a rank's files, and the threads of its readings.

    `gives_way`: see `begin_helper`. `begin`: called first in each thread. `readings`: what computes
    them. Raises RuntimeError if the process cannot serve.
    """
    backlog = Backlog.begin(config, rank)
    far = Link(arena, config, rank, backlog, _give_up, gives_way=gives_way)
    receipts = cast(Outbox, ForwardedReceipts(config.worker, rank, far))
    desk = Desk(
        arena.memory,
        config,
        receipts,
        Backlog(backlog.shared, NEAR),
        begin=begin,
        readings=readings,
        works=("reading",),
    )
    far.begun()
    return RowDelivery(far, Near(arena, desk, far.held), backlog)


def _give_up(error: Exception) -> None:
    """End the process, because receipts cannot be kept or delivered, and without them no request
    may succeed.
    """
    logger.critical("this rank cannot deliver receipts: %s", error)
    os._exit(EXIT_NO_RECEIPTS)
