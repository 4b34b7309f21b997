"""Writer: passes finished captures to consumers and their receipts to the outbox, without blocking
the engine.
"""

import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import msgspec

from ....broker.artifacts.retention import Usage
from ....broker.receipts.outbox import Outbox
from ....schemas.jobs.receipts import STORE_AWAY, CapturedFile, Consumed, Receipt
from ....schemas.readings.stored import READER
from ....schemas.requests.harvest_work import HARVEST
from ....storage.store import open_store
from .consumers import BUILT_IN, Logging, Memory, installed
from .finished_rows import Consumer, FinishedCapture, Outcome
from .harvest_shards import Harvest
from .layouts import Filesystem, StoreConfig, each

if TYPE_CHECKING:  # it imports torch, which an engine without kernels does not need
    from ..base.config import PlaneConfig

logger = logging.getLogger(__name__)

#: A group is one durable commit: at most this many requests and about this many bytes.
GROUP_REQUESTS = 256
GROUP_BYTES = 64 << 20
#: If these fail, the capture has failed: its rows are nowhere. Failures of others only leave it
#: incomplete.
ESSENTIAL = frozenset({"filesystem", "memory", HARVEST, READER})
#: A message names at most this many positions, and is cut at this many characters.
_POSITIONS, _MESSAGE = 16, 1000
#: This much of the boot's id is in the names of segments: enough that two starts of a worker do not
#: share any.
BOOT_DIGITS = 12


class InterventionError(Exception):
    """Captured rows show that an intervention of the request went wrong."""


@dataclass
class WriteJob:
    """A finished request: its receipt, complete but for the captures, and how to make those.

    `size`: bytes of their rows, about.

    The builds run in a writer thread; what they refer to stays alive until the receipt is on its
    way.
    """

    receipt: Receipt
    builds: Sequence[Callable[[], FinishedCapture]] = ()
    size: int = 0


@dataclass
class _Part:
    """Rows of a capture that continues. `size`: bytes, about."""

    write: Callable[[], None]
    size: int


@dataclass
class _Report:
    """Outcome of one request's captures so far."""

    job: WriteJob
    files: list[CapturedFile] = field(default_factory=list)
    consumed: list[Consumed] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # reasons for `error`
    missing: list[str] = field(default_factory=list)  # reasons for `partial`
    kind: str = "capture_failed"  # of the `error`
    away: int = 0  # how many of `failed` are only because the store takes nothing now

    def receipt(self) -> Receipt:
        """The job's receipt with all of this in it; one that was an error before stays one, for its
        own reason.
        """
        receipt = msgspec.structs.replace(
            self.job.receipt, files=self.files, consumed=self.consumed
        )
        if receipt.status == "error" or not (self.failed or self.missing):
            return receipt
        if self.failed:
            kind = STORE_AWAY if self.away == len(self.failed) else self.kind
            return msgspec.structs.replace(
                receipt, status="error", kind=kind, message=_cut("; ".join(self.failed))
            )
        return msgspec.structs.replace(
            receipt, status="partial", message=_cut("; ".join(self.missing))
        )


class Diversion(Protocol):
    """Takes captures and receipts in place of consumers and outbox, see `certify`.

    Called from writer threads.
    """

    def consume(self, captures: Sequence[FinishedCapture]) -> list[Outcome]: ...

    def receipt(self, receipt: Receipt) -> None: ...


class Writer:
    """Threads that hand captures to their consumers in groups, and then the receipts to the
    outbox.
    """

    def __init__(
        self,
        store: StoreConfig,
        outbox: Outbox,
        threads: int,
        memory_limit: int,
        begin: Callable[[], None] = lambda: None,
        readings: Consumer | None = None,
    ) -> None:
        """`memory_limit`: bytes that the consumer `memory` puts into a receipt.

        `begin`: called first in each thread. `readings`: the consumer of captures that are read;
        None: there is none.
        """
        self._begin = begin
        self._outbox = outbox
        self._queue: queue.SimpleQueue[WriteJob | _Part | None] = queue.SimpleQueue()
        self._pending = 0
        self.backlog = 0  # bytes of rows that wait, or are being written
        self.totals = {
            "captured_rows": 0,
            "captured_bytes": 0,
            "dropped_positions": 0,
        }  # since the start
        self._diverted: Diversion | None = None
        self._lock = threading.Lock()
        self._shared: dict[str, Consumer] = {
            "memory": Memory(memory_limit),
            "logging": Logging(),
            HARVEST: Harvest(),
            **installed(),
        }
        if readings is not None:
            self._shared[READER] = readings
        usage = Usage(store.store, store.quota)
        self._filesystems = [Filesystem(store, usage, i) for i in range(threads)]
        self._threads = [
            threading.Thread(
                target=self._run, args=(filesystem,), name=f"midstream-writer-{i}", daemon=True
            )
            for i, filesystem in enumerate(self._filesystems)
        ]
        for thread in self._threads:
            thread.start()

    def divert(self, to: "Diversion | None") -> None:
        """Give all that is submitted from now on to `to`, not to consumers and outbox.

        None: to those again, and count from zero.
        """
        self._diverted = to
        if to is None:
            self.totals = dict.fromkeys(self.totals, 0)

    def submit(self, job: WriteJob) -> None:
        """Returns immediately. Without captures the receipt goes directly to the outbox."""
        if not job.builds:
            given_up = job.receipt.kind == "capture_failed" and any(
                filesystem.away for filesystem in self._filesystems
            )
            self._deliver(
                msgspec.structs.replace(job.receipt, kind=STORE_AWAY) if given_up else job.receipt
            )
            return
        with self._lock:
            self._pending += 1
            self.backlog += job.size
        self._queue.put(job)

    def stream(self, write: Callable[[], None], size: int) -> None:
        """Have `write` called in a writer thread; it raises nothing.

        `size`: bytes that it lets go of.
        """
        with self._lock:
            self._pending += 1
            self.backlog += size
        self._queue.put(_Part(write, size))

    def busy(self) -> bool:
        """Return whether anything remains to be written."""
        return self._pending > 0

    def close(self) -> None:
        """Write what is queued and stop."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, filesystem: Filesystem) -> None:
        self._begin()
        consumers: dict[str, Consumer] = {"filesystem": filesystem, **self._shared}
        while (first := self._queue.get()) is not None:
            if isinstance(first, _Part):
                self._write_part(first)
                del first
                continue
            group, last = self._gather(first)
            for receipt in self._write(group, consumers):
                self._deliver(receipt)
            count, size = len(group), sum(job.size for job in group)
            # the memory of the rows is free before the receipts are counted as written
            group.clear()
            del first
            with self._lock:
                self._pending -= count
                self.backlog -= size
            if last:
                self._queue.put(None)  # for the next thread; this one ends too
                break
        filesystem.close()

    def _gather(self, first: WriteJob) -> tuple[list[WriteJob], bool]:
        """`first` and what else waits, up to a group; and whether the end was seen."""
        group, size = [first], first.size
        while len(group) < GROUP_REQUESTS and size < GROUP_BYTES:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return group, True
            if isinstance(job, _Part):
                self._write_part(job)
                continue
            group.append(job)
            size += job.size
        return group, False

    def _write_part(self, part: _Part) -> None:
        try:
            part.write()
        except Exception:  # the request's own build will find what is missing
            logger.exception("rows of a capture could not be written")
        with self._lock:
            self._pending -= 1
            self.backlog -= part.size

    def _write(self, group: Sequence[WriteJob], consumers: Mapping[str, Consumer]) -> list[Receipt]:
        """Build, consume, and report the outcome: a failure affects only its own request."""
        reports = [_Report(job) for job in group]
        captures: list[tuple[_Report, FinishedCapture]] = []
        for of_request in reports:
            for build in of_request.job.builds:
                if (capture := _built(of_request, build)) is not None:
                    captures.append((of_request, capture))
        outcomes = self._consume(captures, consumers)
        with self._lock:
            self.totals["captured_rows"] += sum(capture.num_rows for _, capture in captures)
            self.totals["captured_bytes"] += sum(capture.size for _, capture in captures)
            self.totals["dropped_positions"] += sum(len(capture.dropped) for _, capture in captures)
        for (of_request, capture), by_name in zip(captures, outcomes, strict=True):
            _note(of_request, capture, by_name)
        return [of_request.receipt() for of_request in reports]

    def _consume(
        self, captures: Sequence[tuple[_Report, FinishedCapture]], consumers: Mapping[str, Consumer]
    ) -> list[dict[str, Outcome]]:
        """For each capture its consumers' outcomes.

        Those built in come first, the files before all: they are what most wait for.
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
        (self._outbox.append if self._diverted is None else self._diverted.receipt)(receipt)

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


def _built(report: _Report, build: Callable[[], FinishedCapture]) -> FinishedCapture | None:
    """The capture, or the reason for its failure in `report.failed`."""
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
        report.away += fatal and by_name[name].away
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
    config: "PlaneConfig",
    rank: int,
    outbox: Outbox,
    begin: Callable[[], None] = lambda: None,
    readings: Consumer | None = None,
) -> Writer:
    """The writer of a rank, from its config."""
    store = StoreConfig(
        store=open_store(config.capture_root),
        owner=f"{config.worker}.{config.boot[:BOOT_DIGITS]}.{rank}",
        segment_limit=config.segment_limit_kib << 10,
        segment_bytes=config.segment_mib << 20,
        quota=config.capture_quota_mib << 20,
    )
    return Writer(
        store,
        outbox,
        config.writer_threads,
        config.memory_limit_kib << 10,
        begin,
        readings,
    )
