"""The heartbeat renews a worker's record and its jobs' leases, and detects jobs that it lost."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ...broker.ledger.core.reachable import Unreachable
from ...broker.ledger.jobs.ledger import Ledger
from ...broker.ledger.named.source_runs import LedgerRuns
from ...schemas.jobs.models import WorkerInfo
from ...schemas.settings.settings import Settings
from .attempt import AttemptOutcome
from .attempts import Attempts
from .redis_retry import LONGEST_PAUSE_S

logger = logging.getLogger(__name__)

#: Leases are renewed this many times within their length, so that one missed renewal costs nothing.
RENEWALS_PER_LEASE = 3

#: A renewal without an answer is tried over a new connection, this many times within a lease. When
#: packets are lost TCP doubles its wait after each retransmission, so that after a short network
#: outage a connection can stay silent for longer than the lease.
TRIES_PER_LEASE = 16

#: Each try gets at least this many seconds.
SHORTEST_TRY_S = 0.5


class Heartbeat:
    """Renews leases and the worker's record, on its own connections to Redis; close with `close()`.

    `publish` is called again after Redis was unreachable, and whenever Redis does not have what was
    `published`: it may have lost the record, or the record has changed. If another worker has taken
    the model's name meanwhile, `publish` raises and the worker ends.
    """

    def __init__(
        self,
        settings: Settings,
        attempts: Attempts,
        info: Callable[[], WorkerInfo],
        publish: Callable[[], Awaitable[None]],
        published: Callable[[], Awaitable[bool]],
    ):
        self._ledger = Ledger.connect(
            settings, answer_s=max(SHORTEST_TRY_S, settings.lease_s / TRIES_PER_LEASE)
        )
        self._sources = LedgerRuns(self._ledger)
        self._attempts = attempts
        self._period_s = settings.lease_s / RENEWALS_PER_LEASE
        self._info = info
        self._publish = publish
        self._published = published

    async def run(self) -> str:
        """Beat until cancelled; never returns. Raises all errors except transient ones of Redis."""
        unreachable = False
        while True:
            await asyncio.sleep(
                min(self._period_s, LONGEST_PAUSE_S) if unreachable else self._period_s
            )
            try:
                await self.beat()
                if unreachable or not await self._published():
                    logger.warning("Redis was unreachable, or lacks the model: publishing it again")
                    await self._publish()
                unreachable = False
            except Unreachable as error:
                if not unreachable:
                    logger.warning("heartbeat failed, Redis unreachable: %s", error)
                unreachable = True

    async def beat(self) -> None:
        """Renew every lease, also on source runs, stop attempts that lost theirs or are being
        cancelled, and renew the worker's record.
        """
        info = self._info()
        if held := self._attempts.held:
            renewal = await self._ledger.renew(info.worker, info.boot, held)
            # A lost job may have been claimed again before the answer arrived: `held` protects it.
            self._attempts.stop(renewal.lost, AttemptOutcome.LOST, held)
            self._attempts.stop(renewal.cancelling, AttemptOutcome.CANCELLED)
        for renew in self._attempts.renewals:
            await renew(self._sources)
        await self._ledger.heartbeat(info)

    async def close(self) -> None:
        await self._ledger.close()
