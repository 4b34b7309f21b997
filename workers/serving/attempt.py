"""One attempt at one job on this worker: its progress, and why it is being stopped; and what a kind
of job defines to run one. Everyone who waits for some of its receipts is served by one poll. Source
runs in use are loaded before, and leased so that retention keeps them.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from ...broker.ledger.jobs.ledger import EventsLost, Ledger
from ...broker.ledger.jobs.status import relay_alive_for
from ...broker.ledger.jobs.sweeps import LedgerSweeps
from ...broker.ledger.named.source_runs import LedgerRuns
from ...schemas.base import MidstreamError, Record, Tensor, content_hash, from_json, to_json
from ...schemas.jobs.jobs import Event, EventKind, Job, StoredOutcome
from ...schemas.jobs.receipts import READ_LATER, Receipt
from ...schemas.jobs.works import Work
from ...schemas.requests.source_runs import RunFiles, parse_key
from ...storage.store import TRANSIENT, open_store
from ..engine.admission import CellSlots
from ..engine.protocol import Engine, GeneratingEngine, Locate, NotYet
from ..engine.ranks.collective import Quarantined
from .progress import AttemptProgress
from .redis_retry import UNAVAILABLE, patiently

#: How often receipts are looked for while some are awaited; a step of the engine takes about as
#: long.
POLL_S = 0.05
#: Requests that are looked for per call.
POLL_REQUESTS = 256
#: If a look took longer, Redis was unreachable, and every wait starts again.
STALL_S = 2.0


class _Wait:
    def __init__(self, requests: Iterable[int], patience_s: float) -> None:
        self.missing = set(requests)
        self.patience_s = patience_s
        self.since = time.monotonic()
        self.arrived: dict[int, list[Receipt]] = {}
        self.over: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class ReceiptReader:
    """Reads receipts of one job from its ticket in the ledger."""

    def __init__(self, ledger: Ledger, job_id: str, world: int) -> None:
        """`world`: number of ranks, each of which reports on every request."""
        self._ledger = ledger
        self._sweeps = LedgerSweeps(ledger)
        self._job_id = job_id
        self._world = world
        self._what = f"receipts of {job_id}"
        self._waits: list[_Wait] = []
        self._reading: asyncio.Task[None] | None = None

    async def of(self, requests: Iterable[int], patience_s: float) -> dict[int, list[Receipt]]:
        """Wait for the receipts of all `requests` from every rank; return those that have arrived
        once that takes longer than `patience_s`, while the relay runs.
        """
        wait = _Wait(requests, patience_s)
        self._waits.append(wait)
        try:
            if self._reading is None or self._reading.done():
                self._reading = asyncio.create_task(self._read())
            await wait.over
        finally:
            self._waits.remove(wait)
        return wait.arrived

    async def partly(self, requests: Iterable[int]) -> list[Receipt]:
        """Return all receipts of `requests` so far, even if some rank has not reported."""
        asked = sorted(requests)
        return await patiently(
            lambda: self._sweeps.reported(self._job_id, asked, self._world), self._what
        )

    async def _read(self) -> None:
        """Look until nobody waits, also while Redis is unreachable."""
        while self._waits:
            try:
                await self._look()
            except Exception as error:
                for wait in self._waits:
                    if not wait.over.done():
                        wait.over.set_exception(error)
                raise
            await asyncio.sleep(POLL_S)

    async def _look(self) -> None:
        began = time.monotonic()
        waits = [wait for wait in self._waits if not wait.over.done()]
        asked = [request for wait in waits for request in sorted(wait.missing)][:POLL_REQUESTS]
        report = await patiently(
            lambda: self._sweeps.receipts(self._job_id, asked, self._world), self._what
        )
        now = time.monotonic()
        for wait in waits:
            arrived = wait.missing & report.keys()
            wait.arrived |= {request: report[request] for request in arrived}
            wait.missing -= arrived
            if now - began > STALL_S:
                wait.since = now
        late = [wait for wait in waits if wait.missing and now - wait.since > wait.patience_s]
        if late and not await patiently(
            lambda: relay_alive_for(self._ledger, max(wait.patience_s for wait in late)), self._what
        ):
            late = []
        for wait in waits:
            if (not wait.missing or wait in late) and not wait.over.done():
                wait.over.set_result(None)


E = TypeVar("E", bound=Engine)

#: While other jobs run, a sweep's or harvest's limit of requests in the engine is divided by this.
SHARED_DIVISOR = 16


class AttemptOutcome(StrEnum):
    """The end of an attempt; the Celery task returns it, so that Flower shows it."""

    SUCCEEDED = "succeeded"  # outputs and receipts are complete
    GENERATED = "generated"  # outputs are stored; receipts may still settle
    NOT_OURS = "not ours"  # another worker has the job, or it has ended
    CANCELLED = "cancelled"
    LOST = "lost"  # the lease went to another attempt
    # the engine died, Redis was away, or it lost the attempt's events; another attempt follows
    RELEASED = "released"
    STOPPED = "stopped"  # the worker was told to stop; another attempt follows
    # the artifact store is unavailable; another attempt follows when it is back
    STORE_UNAVAILABLE = "store unavailable"
    # too many jobs wait for checks of their formats; another attempt follows
    BUSY = "busy"
    # the ranks disagree; another attempt follows, or the job has failed because of it
    OUT_OF_STEP = "out of step"
    HANDED_ON = "handed on"  # workers of another queue continue the job
    PUT_BACK = "put back"  # not begun: the worker does not serve, or has enough harvest parts


class JobFailed(Exception):
    """The job ended with a problem that the ledger has already."""


class StoreUnavailable(MidstreamError):
    """Rows could not be read from the artifact store, or written to it, because it is unavailable:
    the job waits for it.
    """

    def __init__(self, detail: str) -> None:
        super().__init__("intervention_failed", detail)


#: Failures that are not the job's fault, and how they end its attempt; the first that applies.
_RETRIED = (
    (Quarantined, AttemptOutcome.OUT_OF_STEP),
    (StoreUnavailable, AttemptOutcome.STORE_UNAVAILABLE),
    (NotYet, AttemptOutcome.BUSY),
    (EventsLost, AttemptOutcome.RELEASED),
)


def ending_for_retry(error: BaseException) -> AttemptOutcome | None:
    """Return how an attempt ends whose failure was not the job's fault, so that another attempt
    follows; None if it was.
    """
    leaves = list(leaves_of(error))
    for kind, ending in _RETRIED:
        if any(isinstance(leaf, kind) for leaf in leaves):
            return ending
    away = any(isinstance(leaf, MidstreamError) and leaf.kind == UNAVAILABLE for leaf in leaves)
    return AttemptOutcome.RELEASED if away else None


def leaves_of(error: BaseException) -> Iterable[BaseException]:
    """Yield the exceptions of a group, and of the groups in it; any other exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves_of(inner)
    else:
        yield error


@dataclass(eq=False)
class Attempt:
    """One attempt at one job, on this worker, now."""

    job: Job
    number: int  # which of the job's attempts this is, from 1
    task: "asyncio.Task[object]"
    progress: AttemptProgress
    receipts: ReceiptReader
    ending: AttemptOutcome | None = None  # why it is being stopped
    detail: str = ""  # the reason for `ending`, as text
    closed: bool = False  # too late to stop it
    finished: int = 0  # number of finished prompts
    last: Event | None = None  # the last prompt's `output` event, stored with the outputs
    emitted: int = 0  # number of events
    _emitting: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def reported(self) -> bool:
        """Return whether the ranks send receipts for this attempt."""
        return self.job.wants_receipts

    def stop(self, ending: AttemptOutcome, detail: str = "") -> None:
        """Cancel the attempt; the first reason counts."""
        if not self.closed and self.ending is None:
            self.ending = ending
            self.detail = detail
            self.task.cancel()

    def check_unsteered(self) -> None:
        """Raise MidstreamError("conflict") under global steering, which estimates do not have."""
        if self.job.global_steering.entries:
            raise MidstreamError(
                "conflict",
                f"global steering version {self.job.global_steering.version} edits the model, and "
                "gradients are computed without it: clear it, and submit the job again",
            )

    def refused(self, kept: str) -> None:
        """Stop because the ledger has not kept something: its answer is `stale` or `cancelling`."""
        self.stop(AttemptOutcome.CANCELLED if kept == "cancelling" else AttemptOutcome.LOST)

    async def emit(self, ledger: Ledger, event: Event) -> None:
        """Write an event, after those before it. Its number makes sure that retries write it once.

        Raises EventsLost.
        """
        async with self._emitting:
            self.emitted += 1
            number = self.emitted
            await patiently(
                lambda: ledger.emit(self.job.id, self.number, number, event),
                f"event of {self.job.id}",
            )

    async def report(self, ledger: Ledger, kind: EventKind, data: Record) -> None:
        """Write an event with a record's fields, as `emit` does."""
        shown = from_json(to_json(data), dict[str, Any])
        await self.emit(ledger, Event(event=kind, data=shown, attempt=self.number))

    async def receipts_of(
        self, requests: Iterable[int], patience_s: float
    ) -> dict[int, list[Receipt]]:
        """Return the receipts of `requests`, as `ReceiptReader.of` does, unless the attempt is
        being stopped.
        """
        arrived = await self.receipts.of(requests, patience_s)
        self.check()
        return arrived

    def check(self) -> None:
        """Raise CancelledError when the attempt is being stopped: asyncio's own cancellation may be
        swallowed (see `redis_retry`).
        """
        if self.ending is not None:
            raise asyncio.CancelledError


class Bench(Generic[E]):
    """Holds what the jobs of a worker share. Only the engine's event loop uses it."""

    def __init__(self, ledger: Ledger, engine: E, worker: str) -> None:
        self.ledger = ledger
        self.engine = engine
        self.worker = worker
        self.running: dict[str, Attempt] = {}  # by the job's id
        self.surveys = 0  # that run or are about to run
        #: Called with every heartbeat: they renew what jobs hold in the ledger.
        self.renewals: list[Callable[[LedgerRuns], Awaitable[None]]] = []

    def slots(self, limit: int, work: type[Work]) -> CellSlots:
        """Return slots for `limit` requests of all jobs with such work: fewer while other jobs run,
        which get most of each step. (A step with an ordinary request in it also computes every cell
        of a sweep from the first layer.)
        """

        def at_once() -> int:
            alone = all(isinstance(attempt.job.work, work) for attempt in self.running.values())
            return limit if alone else max(1, limit // SHARED_DIVISOR)

        return CellSlots(at_once)

    async def fetch(self, name: str) -> Tensor:
        """Return the tensor of a content hash. Raises MidstreamError if it is not stored."""
        tensor = await patiently(lambda: self.ledger.get_tensor(name), f"vector {name[:12]}")
        if content_hash(tensor) != name:
            raise MidstreamError(
                "intervention_failed", f"vector {name[:12]}: content does not match its hash"
            )
        return tensor


class Run(NamedTuple):
    """Says how a worker runs jobs of a kind."""

    # runs a claimed job to its outcome; None: it was handed on to another queue
    work: Callable[[Attempt], Awaitable[StoredOutcome | None]]
    # holds a place for a job that is about to be claimed, by its id; false: there is none
    room: Callable[[str], AbstractAsyncContextManager[bool]] = lambda _: contextlib.nullcontext(
        True
    )
    ended: Callable[[Job], Awaitable[None]] | None = None  # called after each attempt


T = TypeVar("T")
logger = logging.getLogger(__name__)

#: A lease on captures lasts this many times `lease_s`, so that it outlasts a short outage of Redis.
LEASES = 4


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
        try:
            await patiently(
                lambda: self._sources.lease({job: keys}, self._seconds),
                f"lease of {job} on source runs",
            )
            await self.reading(self._hold(keys, names, locate or self._locate))
            try:
                yield
            finally:
                await self._engine.release_runs(keys)
        finally:
            await self._let_go(job, keys)

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

    async def _hold(self, keys: Sequence[str], names: Mapping[str, str], locate: Locate) -> None:
        try:
            await self._engine.hold_runs(keys, locate)
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
        return await patiently(lambda: self._sources.files(key), f"source run {key}")

    async def _let_go(self, job: str, keys: Sequence[str]) -> None:
        held = self._held[job]
        held.subtract(keys)
        ended = [key for key in keys if held[key] <= 0]
        self._held[job] = +held
        if not self._held[job]:
            del self._held[job]
        still_held = {parse_key(key)[0] for key in self._held.get(job, ())}
        try:
            await self._sources.unlease(
                [key for key in ended if parse_key(key)[0] not in still_held], job
            )
        except MidstreamError as error:
            if error.kind != UNAVAILABLE:
                raise
            logger.info(
                "could not release the leases of %s on source runs; they will expire: %s",
                job,
                error,
            )
