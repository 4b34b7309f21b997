"""Writer: passes finished captures to consumers and their receipts to the outbox, without blocking
the engine.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from ....schemas.jobs.receipts import STORE_UNAVAILABLE, CapturedFile, Consumed, Receipt
from ....schemas.packages import load
from ....schemas.readings.stored import READER
from ....schemas.requests.specs import WriterWork
from ....storage.capture_usage import CaptureUsage
from ....storage.store import ArtifactStore
from ..base.backlog import WORKS, Backlog
from .consumers import BUILT_IN, PLACING, Logging, MemoryConsumer, installed, placing
from .finished_rows import Consumer, FinishedCapture, Outcome
from .layouts import Filesystem, StoreConfig, each
from .receipt_outbox import ReceiptOutbox

if TYPE_CHECKING:
    from ....schemas.settings.tuning import Tuning
    from ..base.config import PlaneConfig

logger = logging.getLogger(__name__)

#: Limits of a group, which is one durable commit: requests, and approximate bytes. A request with a
#: reading is a group of its own, so that no other receipt waits for its computation.
GROUP_REQUESTS: dict[WriterWork, int] = {"writer": 256, "placed": 256, "reading": 1}
GROUP_BYTES = 64 << 20
#: Consumers whose failure fails the capture, because its rows are lost. Failures of other consumers
#: only make it partial.
ESSENTIAL = frozenset({"filesystem", "memory", READER, *placing()})
#: The most positions that a message names.
_POSITIONS = 16
#: The most characters that it has.
_MESSAGE = 1000
#: Digits of the boot's id in segment names, enough that two starts of a worker share no segment.
BOOT_DIGITS = 12


class InterventionError(Exception):
    """Captured rows show that an intervention of the request went wrong."""


@dataclass
class WriteJob:
    """A finished request: its receipt, complete except for the captures, and the functions that
    build these. `size`: approximate bytes of their rows. `complete` adds to the receipt what takes
    a while to compute. `work`: which threads run it. `tenant`: whose turn a reading takes.

    All of them run in a writer thread; what they refer to stays alive until the receipt is
    delivered.
    """

    receipt: Receipt
    builds: Sequence[Callable[[], FinishedCapture]] = ()
    size: int = 0
    complete: Callable[[Receipt], Receipt] | None = None
    work: WriterWork = "writer"
    tenant: str = ""


@dataclass
class _Part:
    """Rows of a capture whose request still runs. `size`: approximate bytes."""

    write: Callable[[], None]
    size: int


@dataclass
class _Report:
    """Outcome of one request's captures so far."""

    job: WriteJob
    completed: Receipt | None = None
    files: list[CapturedFile] = field(default_factory=list)
    consumed: list[Consumed] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # reasons for the status `error`
    missing: list[str] = field(default_factory=list)  # reasons for the status `partial`
    kind: str = "capture_failed"  # kind of the error
    unavailable: int = 0  # how many of `failed` are due to a store that accepts no writes now

    def receipt(self) -> Receipt:
        """Return the job's receipt with this outcome; a receipt that was an error before keeps its
        own reason.
        """
        receipt = msgspec.structs.replace(
            self.completed or self.job.receipt, files=self.files, consumed=self.consumed
        )
        if receipt.status == "error" or not (self.failed or self.missing):
            return receipt
        if self.failed:
            kind = STORE_UNAVAILABLE if self.unavailable == len(self.failed) else self.kind
            return msgspec.structs.replace(
                receipt, status="error", kind=kind, message=_cut("; ".join(self.failed))
            )
        return msgspec.structs.replace(
            receipt, status="partial", message=_cut("; ".join(self.missing))
        )


class Diversion(Protocol):
    """Takes captures and receipts in place of consumers and outbox, see `certificate.certify`.

    Called from writer threads.
    """

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]: ...

    def receipt(self, receipt: Receipt) -> None: ...


class _Turns(queue.Queue[WriteJob | _Part | None]):
    """A queue in which tenants take turns, and the jobs of each tenant. A job's requests keep their
    order; the end marker comes last.
    """

    def _init(self, maxsize: int) -> None:
        # (tenant, job) → its requests; next turn first
        self.queue: dict[tuple[str, str], list[WriteJob | _Part | None]] = {}

    def _put(self, item: WriteJob | _Part | None) -> None:
        of = (item.tenant, item.receipt.job) if isinstance(item, WriteJob) else ("", "")
        self.queue.setdefault(of, []).append(item)

    def _get(self) -> WriteJob | _Part | None:
        turn, items = next(iter(self.queue.items()))
        item = items.pop(0)
        order = sorted(self.queue, key=lambda of: (not of[1], of[0] == turn[0], of == turn))
        self.queue = {of: self.queue[of] for of in order if self.queue[of]}
        return item


_Jobs = queue.SimpleQueue[WriteJob | _Part | None] | _Turns


class CaptureWriter:
    """Threads that pass captures to their consumers in groups, and then receipts to the outbox.

    Rows with a place have threads of their own: their stores are elsewhere, and other requests
    would lose their receipts while one of those does not answer. So have readings, because they may
    compute for minutes.
    """

    def __init__(
        self,
        store: StoreConfig,
        outbox: ReceiptOutbox,
        threads: int,
        memory_limit: int,
        begin: Callable[[], None] = lambda: None,
        readings: Consumer | None = None,
        backlog: Backlog | None = None,
        works: Sequence[WriterWork] = WORKS,
    ) -> None:
        """`threads`: of each kind of work. `memory_limit`: bytes that the consumer `memory` may put
        into a receipt. `begin`: called first in each thread. `readings`: the consumer that computes
        readings of rows, if any. `works`: which kinds have threads; the first gets the others, too.
        `backlog`: counts what is over of what its owner counts as sent; None: the writer counts
        both.

        Raises ValueError without a thread, since nothing would ever be written.
        """
        if threads < 1:
            raise ValueError(f"a writer has {threads} threads, and needs at least one")
        self._begin = begin
        self._outbox = outbox
        # Rows with a place, and readings, have threads of their own: behind shards that were tried
        # for 20 s each, other jobs lost their receipts.
        self._queues: dict[WriterWork, _Jobs] = {
            work: _Turns() if work == "reading" else queue.SimpleQueue() for work in works
        }
        self._first = works[0]
        self.backlog = backlog or Backlog()
        self._sends = backlog is None
        # counts since the start
        self.totals = {"captured_rows": 0, "captured_bytes": 0, "dropped_positions": 0}
        self._diverted: Diversion | None = None
        self._lock = threading.Lock()
        self._shared: dict[str, Consumer] = {
            "memory": MemoryConsumer(memory_limit),
            "logging": Logging(),
            **{name: load(PLACING, name)() for name in placing()},
            **installed(),
        }
        if readings is not None:
            self._shared[READER] = readings
        usage = CaptureUsage(store.store, store.quota)
        self._filesystems = [
            Filesystem(store, usage, i) for i in range(len(self._queues) * threads)
        ]
        self._threads = [
            threading.Thread(
                target=self._run,
                args=(filesystem, work),
                name=f"midstream-{work}-{i // len(self._queues)}",
                daemon=True,
            )
            for i, (filesystem, work) in enumerate(
                zip(self._filesystems, [*self._queues] * threads, strict=True)
            )
        ]
        for thread in self._threads:
            thread.start()

    def divert(self, to: "Diversion | None") -> None:
        """Pass everything that is submitted from now on to `to` instead of consumers and outbox.

        None: pass it to consumers and outbox again, and restart the totals.
        """
        self._diverted = to
        if to is None:
            self.totals = dict.fromkeys(self.totals, 0)

    def submit(self, job: WriteJob) -> None:
        """Queue a job; return immediately. A receipt without captures is delivered directly."""
        if not job.builds and job.complete is None:
            store_unavailable = job.receipt.kind == "capture_failed" and any(
                filesystem.unavailable for filesystem in self._filesystems
            )
            self._deliver(
                msgspec.structs.replace(job.receipt, kind=STORE_UNAVAILABLE)
                if store_unavailable
                else job.receipt
            )
            return
        self._put(job, job.work)

    def stream(self, write: Callable[[], None], size: int, work: WriterWork = "writer") -> None:
        """Have a writer thread call `write`, which releases `size` bytes of rows of this work."""
        self._put(_Part(write, size), work)

    def done_as(self, work: WriterWork) -> WriterWork:
        """Return the kind of work whose threads do this one."""
        return work if work in self._queues else self._first

    def _put(self, item: WriteJob | _Part, work: WriterWork) -> None:
        of = self.done_as(work)
        if self._sends:  # else another process adds to it, which may lose what it adds
            with self._lock:
                self.backlog.send(item.size, of)
        self._queues[of].put(item)

    def close(self) -> None:
        """Write everything that is queued, and stop."""
        for jobs in self._queues.values():
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, filesystem: Filesystem, work: WriterWork) -> None:
        self._begin()
        consumers: dict[str, Consumer] = {"filesystem": filesystem, **self._shared}
        while group := self._gather(work):
            for receipt in self._write(group, consumers):
                self._deliver(receipt)
            size = sum(job.size for job in group)
            # free the rows' memory before the job is counted as written
            group.clear()
            with self._lock:
                self.backlog.free(size, work)
        filesystem.close()

    def _gather(self, work: WriterWork) -> list[WriteJob]:
        """Wait for a job, and return the group of those that wait then; none at the end. Writes
        parts on the way.
        """
        group = list[WriteJob]()
        size = 0
        jobs = self._queues[work]
        while len(group) < GROUP_REQUESTS[work] and size < GROUP_BYTES:
            try:
                job = jobs.get(block=not group)
            except queue.Empty:
                break
            if job is None:
                jobs.put(None)  # it ends this thread after this group, and the others
                break
            if isinstance(job, _Part):
                self._write_part(job, work)
            else:
                group.append(job)
                size += job.size
            del job  # a thread that waits keeps no rows
        return group

    def _write_part(self, part: _Part, work: WriterWork) -> None:
        try:
            part.write()
        except Exception:  # the build of the request's capture will find the missing rows
            logger.exception("rows of a capture could not be written")
        with self._lock:
            self.backlog.free(part.size, work)

    def _write(self, group: Sequence[WriteJob], consumers: Mapping[str, Consumer]) -> list[Receipt]:
        """Build and consume captures; return the receipts. A failure affects only its request."""
        reports = [_Report(job) for job in group]
        captures: list[tuple[_Report, FinishedCapture]] = []
        for of_request in reports:
            _complete(of_request)
            captures += [
                (of_request, capture)
                for build in of_request.job.builds
                if (capture := _built(of_request, build)) is not None
            ]
        outcomes = self._consume(captures, consumers)
        with self._lock:
            self.totals["captured_rows"] += sum(capture.num_rows for _, capture in captures)
            self.totals["captured_bytes"] += sum(capture.size for _, capture in captures)
            self.totals["dropped_positions"] += sum(len(capture.dropped) for _, capture in captures)
        for (of_request, capture), by_name in zip(captures, outcomes, strict=True):
            _note(of_request, capture, by_name)
        return [of_request.receipt() for of_request in reports]

    def _consume(
        self,
        captures: Sequence[tuple[_Report, FinishedCapture]],
        consumers: Mapping[str, Consumer],
    ) -> list[dict[str, Outcome]]:
        """Return each capture's outcomes by consumer.

        Built-in consumers run first, `filesystem` before the others, as most clients wait for it.
        """
        outcomes: list[dict[str, Outcome]] = [
            dict.fromkeys(capture.capture.consumers, Outcome()) for _, capture in captures
        ]
        names = {name for by_name in outcomes for name in by_name}
        for name in sorted(
            names,
            key=lambda name: (BUILT_IN.index(name) if name in BUILT_IN else len(BUILT_IN), name),
        ):
            numbers = [number for number, by_name in enumerate(outcomes) if name in by_name]
            results = each(
                self._action(name, consumers), [captures[number][1] for number in numbers]
            )
            for number, result in zip(numbers, results, strict=True):
                outcomes[number][name] = (
                    Outcome(error=str(result) or repr(result))
                    if isinstance(result, Exception)
                    else result
                )
        return outcomes

    def _deliver(self, receipt: Receipt) -> None:
        """Deliver a receipt; if that fails, one that says so, which has no rows. Raises nothing,
        because a thread that ends would leave all later requests without receipts.
        """
        deliver = self._outbox.append if self._diverted is None else self._diverted.receipt
        for attempt in (receipt, _undelivered(receipt)):
            try:
                deliver(attempt)
                return
            except Exception:
                logger.exception("receipt of job %s request %d", receipt.job, receipt.request)

    def _action(
        self, name: str, consumers: Mapping[str, Consumer]
    ) -> Callable[[Sequence[FinishedCapture]], Sequence[Outcome]]:
        if self._diverted is not None:
            return self._diverted.consume
        if name not in consumers:
            return lambda captures: (
                [Outcome(error=f"rank {captures[0].rank} has no such consumer")] * len(captures)
            )
        return consumers[name].consume


def _undelivered(receipt: Receipt) -> Receipt:
    why = "its receipt could not be delivered; the log of its worker has the reason"
    return msgspec.structs.replace(
        receipt, status="error", kind="capture_failed", message=why, files=[], consumed=[]
    )


def _complete(report: _Report) -> None:
    """Complete the receipt; if that fails, add the reason to `report.failed`."""
    try:
        if report.job.complete is not None:
            report.completed = report.job.complete(report.job.receipt)
    except Exception as error:
        receipt = report.job.receipt
        logger.exception("receipt of job %s request %d is not whole", receipt.job, receipt.request)
        report.kind = "intervention_failed"
        report.failed.append(f"the sizes of its edits cannot be reported: {error}")


def _built(report: _Report, build: Callable[[], FinishedCapture]) -> FinishedCapture | None:
    """Return the capture; if building it fails, add the reason to `report.failed`."""
    try:
        return build()
    except InterventionError as error:
        report.kind = "intervention_failed"
        report.failed.insert(0, str(error))
        return None
    except Exception as error:
        receipt = report.job.receipt
        logger.exception("capture of job %s request %d failed", receipt.job, receipt.request)
        report.failed.append(f"capture failed: {error}")
        return None


def _note(report: _Report, capture: FinishedCapture, by_name: Mapping[str, Outcome]) -> None:
    errors = {name: outcome.error for name, outcome in by_name.items() if outcome.error}
    for name, outcome in by_name.items():
        report.consumed.append(
            Consumed(
                name=name, ok=not outcome.error, message=_cut(outcome.error), rows=outcome.rows
            )
        )
        report.files += outcome.files
    for name, error in errors.items():
        logger.error("%s: consumer %s failed: %s", capture, name, error)
        fatal = name in ESSENTIAL or (len(errors) == len(by_name) and not ESSENTIAL & errors.keys())
        if name == READER and capture.capture.reading is not None:
            kind = capture.capture.reading.__struct_config__.tag
            report.kind = "reading_failed" if not report.failed else report.kind
            report.failed.append(f"{kind}: {error}")
            continue
        report.unavailable += fatal and by_name[name].unavailable
        (report.failed if fatal else report.missing).append(
            f"{capture.capture.tag}: consumer {name} failed: {error}"
        )
    if capture.dropped:
        some = ", ".join(map(str, capture.dropped[:_POSITIONS])) + (
            ", …" if len(capture.dropped) > _POSITIONS else ""
        )
        report.missing.append(
            f"{capture.capture.tag}: positions dropped under overload: {some} "
            f"({len(capture.dropped)} in total)"
        )


def _cut(message: str) -> str:
    return message if len(message) <= _MESSAGE else message[: _MESSAGE - 1] + "…"


def make_writer(
    sizes: "PlaneConfig | Tuning",
    quota_mib: int,
    captures: ArtifactStore,
    boot: str,
    outbox: ReceiptOutbox,
    threads: int,
    works: Sequence[WriterWork] = WORKS,
    **options: Any,
) -> CaptureWriter:
    """Return the writer of a rank, whose rows go to `captures`. `options`: as `works`, further
    arguments of `CaptureWriter`.
    """
    store = StoreConfig(
        store=captures,
        # a rank may have a second writer, of readings alone
        owner=f"{outbox.worker}.{boot[:BOOT_DIGITS]}.{outbox.rank}{'' if works[1:] else 'r'}",
        segment_limit=sizes.segment_limit_kib << 10,
        segment_bytes=sizes.segment_mib << 20,
        quota=quota_mib << 20,
    )
    return CaptureWriter(
        store=store,
        outbox=outbox,
        threads=threads,
        memory_limit=sizes.memory_limit_kib << 10,
        works=works,
        **options,
    )
