"""Source runs that jobs of this worker use: loaded before, and leased, so that retention keeps
them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TypeVar

from ...broker.ledger.core.reachable import Unreachable
from ...broker.ledger.jobs.ledger import Ledger
from ...broker.ledger.named.source_runs import LedgerRuns
from ...schemas.base.errors import KindError, MidstreamError
from ...schemas.jobs.receipts import READ_LATER
from ...schemas.requests.source_runs import RunFiles, parse_key
from ...storage.store import TRANSIENT, open_store
from ..engine.protocol import GeneratingEngine, Locate
from ..engine.ranks.collective import Quarantined
from .redis_retry import patiently

T = TypeVar("T")

logger = logging.getLogger(__name__)

#: A lease on captures lasts this many times `lease_s`, so that it outlasts a short outage of Redis.
LEASES = 4


class StoreUnavailable(KindError):
    """Rows could not be read from the artifact store, or written to it, because it is unavailable:
    the job waits for it.
    """

    KIND = "intervention_failed"


class SourceRunLeases:
    """Leases on source runs. Used from the engine's event loop only."""

    def __init__(self, ledger: Ledger, engine: GeneratingEngine, worker: str) -> None:
        self._sources = LedgerRuns(ledger)
        self._engine = engine
        self._worker = worker
        self._lease_s = ledger.settings.lease_s
        self._store = open_store(ledger.settings.artifacts)
        # job → keys of the runs that it holds, or waits for
        self._held: dict[str, Counter[str]] = {}

    @asynccontextmanager
    async def holding(
        self, job: str, keys: Sequence[str], names: Mapping[str, str], locate: Locate | None = None
    ) -> AsyncIterator[None]:
        """Hold the runs `keys` (`run_key`) on every rank inside the block, and keep retention from
        deleting their captures.

        `names`: the job's name for a run → the job whose captures it is. `locate` replaces the
        ledger's. A holder must not open another such block inside, see `RankCache`. Raises
        MidstreamError("intervention_failed") naming the run when it does not exist or a rank cannot
        load it, StoreUnavailable if the artifact store is unavailable, and Quarantined.
        """
        if not keys:
            yield
            return
        self._held.setdefault(job, Counter()).update(keys)
        async with AsyncExitStack() as held:
            held.push_async_callback(self._let_go, job, keys)
            await patiently(self._sources.lease, {job: keys}, self._seconds)
            await self.reading(self._hold(held, keys, names, locate or self._locate))
            yield

    async def renew(self, sources: LedgerRuns) -> None:
        """Renews the leases of all held runs, and reports the runs in this worker's memory; called
        with every heartbeat, which supplies `sources` on its own connections.
        """
        await sources.lease(self._held, self._seconds)
        await sources.record_held(self._worker, self._engine.held_runs(), self._lease_s)

    async def reading(self, work: Awaitable[T]) -> T:
        """Returns the result of `work`, which reads from the artifact store.

        Raises StoreUnavailable if `work` fails because the store is unavailable. Read errors rarely
        name that cause, so after any other failure the store itself is checked.
        """
        try:
            return await work
        except (MidstreamError, OSError) as error:
            if isinstance(error, Quarantined):
                raise
            transient = READ_LATER in str(error) or (
                isinstance(error, OSError) and error.errno in TRANSIENT
            )
            trouble = "" if transient else await asyncio.to_thread(self._store.trouble)
            if transient or trouble:
                raise StoreUnavailable(f"{error}; {trouble}" if trouble else str(error)) from error
            raise

    @property
    def _seconds(self) -> float:
        return LEASES * self._lease_s

    async def _hold(
        self,
        held: AsyncExitStack,
        keys: Sequence[str],
        names: Mapping[str, str],
        locate: Locate,
    ) -> None:
        try:
            await held.enter_async_context(self._engine.holding_runs(keys, locate))
        except MidstreamError as error:
            suggested = sorted(
                name
                for name, job in names.items()
                if name != job and f" {job}." in f" {error.detail}"
            )
            if isinstance(error, Quarantined) or not suggested:
                raise
            raise MidstreamError(
                error.kind, f"run {', '.join(map(repr, suggested))}: {error.detail}"
            ) from error

    async def _locate(self, key: str) -> RunFiles:
        return await patiently(self._sources.files, key)

    async def _let_go(self, job: str, keys: Sequence[str]) -> None:
        held = self._held[job]
        held -= Counter(keys)  # drops what is 0
        ended = [key for key in keys if key not in held]
        if not held:
            del self._held[job]
        still_held = {parse_key(key)[0] for key in self._held.get(job, ())}
        try:
            await self._sources.unlease(
                [key for key in ended if parse_key(key)[0] not in still_held], job
            )
        except Unreachable as error:
            logger.info(
                "could not release the leases of %s on source runs; they will expire: %s",
                job,
                error,
            )
