"""Desk: takes a rank's messages about its captured rows, and has their files and receipts written.

A rank has one in a process of its own, see `__main__`, and one among its threads for what needs a
loaded model. The process reads the rank's memory of rows, which both share.

A message of the rank is MessagePack in that memory, and its place goes through a pipe, `COMMAND`,
which has room for 43,000 of them where a pipe of 1 MiB is allowed. Answers are MessagePack through
another pipe, each after its `LENGTH`.
"""

import logging
import struct
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from ....schemas.base.records import Wire
from ....schemas.base.store_calls import StoreCalls
from ....schemas.jobs.receipts import Receipt
from ....schemas.requests.specs import RankSpec, WriterWork
from ....storage.file_store import scratch
from ....storage.store import open_store
from ..base.actions import sealed
from ..base.attribution import precedes_edits
from ..base.backlog import Backlog
from ..base.config import PlaneConfig
from ..base.shared_memory import SharedMemory
from .edit_sizes import RecordedSizes
from .finished_rows import FinishedCapture, Origin
from .receipt_outbox import ReceiptOutbox
from .recorded import BlockPlace, EndedCapture, MemoryRows, Recorded, RowBlock
from .streams import RecordingFile, StreamOpened, begin_file
from .writer import InterventionError, WriteJob, make_writer

logger = logging.getLogger(__name__)

#: Seconds that a closing rank waits for the relay to take its receipts; the rest is sent after the
#: next start.
FLUSH_S = 5.0
#: Number of a message, where it begins in the memory, and its bytes.
COMMAND = struct.Struct("<QQQ")
LENGTH = struct.Struct("<I")
#: Exit code of both if receipts cannot be delivered. The engine ends too, and other workers run its
#: jobs.
EXIT_NO_RECEIPTS = 70


class EndedRequest(Wire, tag="ended", kw_only=True):
    """A request that is over on its rank."""

    receipt: Receipt  # complete except for the captures and the sizes
    spec: RankSpec
    captures: list[EndedCapture] = []
    token_ids: list[int] = []  # all its tokens
    rows: int = 0  # how many of them, from the first on, have rows
    unsound: bool = False  # the model computed non-finite rows that no edit could have reached
    sizes: list[RecordedSizes] = []  # of its edits
    shown: bool = False  # the receipt has the sizes; else its checksum alone
    # the CRC32 of its scores and decisions, and the ledger's state: of both the checksum is made
    results: int = 0
    state: int = 0
    nbytes: int = 0  # of the rows

    @property
    def work(self) -> WriterWork:
        """Return which threads consume its rows."""
        return self.spec.work

    def job(
        self,
        memory: np.ndarray,
        wait: Callable[[int], None],
        origin: Origin,
        streams: Mapping[int, RecordingFile | None],
        prepared: Mapping[int, Any],
    ) -> WriteJob:
        """Return what a writer does for the request. `memory`: the shared memory, uint8. `wait`:
        that of `SharedMemory`. `streams`: by number; None for one that was dropped. `prepared`:
        what readers prepared, by the capture's number.
        """
        builds = [
            partial(
                self._built,
                ended=capture,
                memory=memory,
                wait=wait,
                origin=origin,
                stream=streams.get(capture.stream),
                prepared=prepared.get(capture.shape.number),
            )
            for capture in self.captures
        ]
        return WriteJob(
            self.receipt,
            builds,
            self.nbytes,
            partial(self._with_sizes, memory) if self.sizes else None,
            self.work,
            self.spec.tenant,
        )

    def _with_sizes(self, memory: np.ndarray, receipt: Receipt) -> Receipt:
        """Add the sizes of the edits to the receipt, and to the checksum of the results."""
        counted = [sizes.counted(memory, self.rows) for sizes in self.sizes]
        results = self.results
        for sizes in counted:
            results = sizes.checksum(results)
        shown = counted if self.shown else []
        return msgspec.structs.replace(
            receipt,
            # Not in the ledger's running checksum: a request that fails on one rank alone would put
            # all later receipts out of step.
            checksum=sealed(self.state, results),
            sizes=[size for sizes in shown for size in sizes.report(receipt.request)],
        )

    def _built(
        self,
        ended: EndedCapture,
        memory: np.ndarray,
        wait: Callable[[int], None],
        origin: Origin,
        stream: RecordingFile | None,
        prepared: Any,
    ) -> FinishedCapture:
        """Build a capture, in a writer thread.

        Raises InterventionError for a row that is not finite, unless the unedited model made it so.
        """
        wait(ended.landing)
        capture = self.finish(ended, memory, origin, stream, prepared)
        if capture.unsound is not None and not self.unsound:
            hook, layer, position = capture.unsound
            after = capture.capture.at == "after"
            if not precedes_edits(self.spec, position, (hook, layer), after=after):
                where = f"{hook} of layer {layer}, position {position}"
                raise InterventionError(
                    f"the captured row at {where} is not finite, after edits of this request (rank "
                    f"{origin.rank})"
                )
        return capture

    def finish(
        self,
        ended: EndedCapture,
        memory: np.ndarray,
        origin: Origin,
        stream: RecordingFile | None = None,
        prepared: Any = None,
    ) -> FinishedCapture:
        """Return a capture of the request, whose rows have landed, as it is to be stored.

        Raises RuntimeError when an expected row is missing, or could not be recorded.
        """
        if ended.error:
            raise RuntimeError(ended.error)
        if ended.stream and stream is None:
            raise RuntimeError("rows that left before the request ended could not be written")
        spec = self.spec
        token_ids = self.token_ids
        stop = self.rows
        shape = ended.shape
        capture = spec.captures[shape.number]
        expected = set[int]()
        if stop >= spec.prompt_tokens:
            chosen = capture.select(0, stop, spec.prompt_tokens)
            window = capture.window
            expected = (
                window.keep(chosen, token_ids, ended.high) if window is not None else set(chosen)
            )
        stored_as = shape.stored_as(capture)
        rows = Recorded(memory, ended, expected, windowed=capture.window is not None)
        result: Any  # `MemoryRows`, or those of the stream
        if stream is not None:
            positions, reused, result = stream.seal(rows, stop)
        else:
            positions, reused, runs = rows.below(stop)
            result = MemoryRows(shape.ports, runs, stored_as, shape.chosen(capture))
        unsound = {dtype: [*result.unsound(dtype)] for dtype in {stored_as, shape.dtype}}
        if missing := expected.difference(positions) - rows.dropped:
            raise RuntimeError(
                f"positions {sorted(missing)[:8]} were not recorded ({len(missing)} of "
                f"{len(expected)})"
            )
        return shape.finished(
            spec,
            origin,
            positions=positions,
            token_ids=[token_ids[position] for position in positions],
            rows=result,
            non_finite=dict(Counter(place[:2] for place in unsound[stored_as])),
            unsound=min(unsound[shape.dtype], key=lambda place: place[2], default=None),
            reused=len(shape.ports) * reused,
            dropped=tuple(sorted((rows.dropped & expected).difference(positions))),
            whole=result.blob,
            prepared=prepared,
        )


class StreamedRows(Wire, tag="rows"):
    """Rows that leave before their request ends; a stream's first message has `opened`."""

    stream: int
    blocks: list[BlockPlace]
    nbytes: int
    landing: int  # of the rows, see `SharedMemory.wait`
    opened: StreamOpened | None = None
    work: WriterWork = "writer"  # of the request


class StreamDropped(Wire, tag="dropped"):
    """The capture of a stream has failed."""

    stream: int


class Delivered(Wire, tag="delivered"):
    """A receipt that is complete."""

    receipt: Receipt


class OriginSet(Wire, tag="origin"):
    """Every later capture has this origin."""

    origin: Origin


DeskMessage = EndedRequest | StreamedRows | StreamDropped | Delivered | OriginSet


class Desk:
    """The files and receipts of one rank. Messages are received one at a time."""

    def __init__(
        self,
        memory: SharedMemory,
        config: PlaneConfig,
        outbox: ReceiptOutbox,
        backlog: Backlog,
        **options: Any,
    ) -> None:
        """`backlog`, `options`: see `CaptureWriter`."""
        store = open_store(config.capture_root)
        self._memory = memory
        self.outbox = outbox
        self._origin: Origin | None = None
        self.writer = make_writer(
            sizes=config,
            quota_mib=config.capture_quota_mib,
            captures=store,
            boot=config.boot,
            outbox=outbox,
            threads=config.writer_threads,
            backlog=backlog,
            **options,
        )
        self._begin_file = partial(
            begin_file, store, partial(scratch, Path(config.spill_dir)), self._of_rank
        )
        self._streams: dict[int, RecordingFile] = {}

    def _of_rank(self) -> Origin:
        assert self._origin is not None, "a rank says first where its rows are from"
        return self._origin

    def close(self) -> None:
        """Write and send everything that is pending, then stop."""
        self.writer.close()
        self.outbox.flush(FLUSH_S)
        self.outbox.close()

    def receive(
        self, message: DeskMessage, memory: np.ndarray, prepared: Mapping[int, Any] | None = None
    ) -> None:
        """Do what a message wants, in time. `memory`: the shared memory, uint8, of which views last
        until the message's rows are not needed. `prepared`: what readers prepared for the request.
        """
        match message:
            case EndedRequest() as request:
                streams = {each.stream for each in request.captures if each.stream}
                job = request.job(
                    memory,
                    self._memory.wait,
                    self._of_rank(),
                    {number: self._streams.pop(number, None) for number in streams},
                    prepared or {},
                )
                self.writer.submit(job)
            case StreamedRows():
                write = self._flush_of(message, memory)
                self.writer.stream(write, message.nbytes, message.work)
            case StreamDropped(number):
                if (stream := self._streams.pop(number, None)) is not None:
                    stream.drop()
            case Delivered(receipt):
                self.outbox.append(receipt)
            case OriginSet(origin):
                self._origin = origin

    def _flush_of(self, rows: StreamedRows, memory: np.ndarray) -> Callable[[], None]:
        """Give a stream rows; return what writes them. If it cannot take them it is dropped, and
        its capture fails when the request ends: the rank may not end because of one request.
        """
        try:
            if rows.opened is not None:
                stream = RecordingFile(rows.opened, self._begin_file, self._memory.wait)
                self._streams[rows.stream] = stream
            stream = self._streams[rows.stream]
            stream.push([RowBlock(memory, place) for place in rows.blocks], rows.landing)
        except Exception:
            logger.exception("a stream of captured rows cannot go on")
            self._streams.pop(rows.stream, None)
            return lambda: None
        return stream.flush


class Setup(Wire, tag="setup"):
    """The first message."""

    config: PlaneConfig
    rank: int
    gives_way: bool  # see `begin_helper`


class Spilled(Wire, tag="spilled"):
    """Rows are in a file from now on, too."""

    descriptor: int  # of the rank's process
    start: int  # of the part of the memory where the file is mapped


class StatusAsked(Wire, tag="status"):
    """The rank asks for a `DeskStatus`."""


class Closed(Wire, tag="closed"):
    """The last message: write what is queued, and end."""


DeskCommand = DeskMessage | Setup | Spilled | StatusAsked | Closed


class Begun(Wire, tag="begun"):
    """The process serves the rank; with an `error` it does not, and ends."""

    error: str = ""


class Freed(Wire, tag="freed"):
    """The memory of this message, and of what it names, is not read any more."""

    number: int


class DeskStatus(Wire, tag="state"):
    """The counts of a rank."""

    outbox: int = 0  # receipts that the relay has not acknowledged
    totals: dict[str, int] = {}
    store: dict[str, StoreCalls] = {}


DeskAnswer = Begun | Freed | DeskStatus
