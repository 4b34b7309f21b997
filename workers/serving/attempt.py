"""One attempt at one job on this worker: its progress, and why it is being stopped; and what a kind
of job defines to run one.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from typing import Any, Generic, NamedTuple, TypeVar, cast

from ...broker.ledger.core.reachable import Unreachable
from ...broker.ledger.jobs.ledger import EventsLost, Ledger
from ...broker.ledger.named.source_runs import LedgerRuns
from ...schemas.base.errors import MidstreamError
from ...schemas.base.records import Record, from_json, from_msgpack, to_json
from ...schemas.base.tensors import Tensor, content_hash
from ...schemas.jobs.jobs import Event, EventKind, Job, State, StoredOutcome
from ...schemas.jobs.receipts import Receipt
from ..engine.admission import CellSlots
from ..engine.protocol import Engine, GeneratingEngine, NotYet
from ..engine.ranks.collective import Quarantined
from .progress import AttemptProgress
from .receipt_reader import ReceiptReader
from .redis_retry import patiently
from .source_run_leases import SourceRunLeases, StoreUnavailable

E = TypeVar("E", bound=Engine)

#: While other jobs run, the limit of a job's requests in the engine is divided by this.
SHARED_DIVISOR = 16


class AttemptOutcome(StrEnum):
    """The end of an attempt, which the Celery task returns."""

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


#: Failures that are not the job's fault, and how they end its attempt; the first that applies.
_RETRIED = (
    (Quarantined, AttemptOutcome.OUT_OF_STEP),
    (StoreUnavailable, AttemptOutcome.STORE_UNAVAILABLE),
    (NotYet, AttemptOutcome.BUSY),
    (EventsLost, AttemptOutcome.RELEASED),
    (Unreachable, AttemptOutcome.RELEASED),
)


def ending_for_retry(error: BaseException) -> AttemptOutcome | None:
    """Return how an attempt ends whose failure was not the job's fault, so that another attempt
    follows; None if it was.
    """
    leaves = list(leaves_of(error))
    for kind, ending in _RETRIED:
        if any(isinstance(leaf, kind) for leaf in leaves):
            return ending
    return None


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
    # content hash → tensor, packed, or image: what the job brought in the artifact store
    inputs: Mapping[str, bytes] = field(default_factory=dict)
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

    def check_answer(self, answer: str, wanted: str = "kept") -> None:
        """Stop, and raise CancelledError, unless the ledger's answer is `wanted`."""
        if answer != wanted:
            cancelled = answer == State.CANCELLING
            self.stop(AttemptOutcome.CANCELLED if cancelled else AttemptOutcome.LOST)
            self.check()

    async def emit(self, ledger: Ledger, event: Event) -> None:
        """Write an event, after those before it. Its number makes sure that retries write it once.

        Raises EventsLost.
        """
        async with self._emitting:
            self.emitted += 1
            number = self.emitted
            await patiently(ledger.emit, self.job.id, self.number, number, event)

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


@dataclass(eq=False)
class Bench(Generic[E]):
    """Holds what the jobs of a worker share. Only the engine's event loop uses it."""

    ledger: Ledger
    engine: E
    worker: str
    running: dict[str, Attempt] = field(default_factory=dict)  # by the job's id
    side_jobs: int = 0  # that run or are about to run
    #: Called with every heartbeat: they renew what jobs hold in the ledger.
    renewals: list[Callable[[LedgerRuns], Awaitable[None]]] = field(default_factory=list)

    @cached_property
    def sources(self) -> SourceRunLeases:
        """The leases of all jobs on source runs; of a worker whose engine generates."""
        leases = SourceRunLeases(self.ledger, cast(GeneratingEngine, self.engine), self.worker)
        self.renewals.append(leases.renew)
        return leases

    def slots(self, limit: int, *kinds: str) -> CellSlots:
        """Return slots for `limit` requests of all jobs of these kinds: fewer while other jobs run,
        which get most of each step. (A step with an ordinary request in it also computes every cell
        of a sweep from the first layer.)
        """

        def at_once() -> int:
            alone = all(attempt.job.kind in kinds for attempt in self.running.values())
            return limit if alone else max(1, limit // SHARED_DIVISOR)

        return CellSlots(at_once)

    async def blob(self, name: str) -> bytes | None:
        """Return the bytes of a content hash; None if they are not stored."""
        if (raw := self._brought(name)) is not None:
            return raw
        return await patiently(self.ledger.get_blob, name)

    def _brought(self, name: str) -> bytes | None:
        """Return what a job that runs here brought in the artifact store."""
        every = (attempt.inputs for attempt in self.running.values())
        return next((inputs[name] for inputs in every if name in inputs), None)

    async def fetch(self, name: str) -> Tensor:
        """Return the tensor of a content hash. Raises MidstreamError if it is not stored."""
        if (raw := self._brought(name)) is None:
            tensor = await patiently(self.ledger.get_tensor, name)
        else:
            await asyncio.sleep(0)  # a job may have thousands
            tensor = from_msgpack(raw, Tensor)
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
