"""Desk: takes a rank's messages about its captured rows, and has their files and receipts written.

A rank has one in a process of its own, see `__main__`, and one among its threads for what needs the
loaded model.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ....broker.receipts.outbox import Outbox
from ....schemas.base.records import Wire
from ....schemas.jobs.receipts import Receipt
from ....schemas.requests.specs import WriterWork
from ....storage.file_store import scratch
from ....storage.store import open_store
from ..base.backlog import Backlog
from ..base.config import PlaneConfig
from ..base.shared_memory import SharedMemory
from .ended import EndedRequest
from .extents import BlockPlace, RowBlock
from .finished_rows import Consumer, Origin
from .streams import RecordingFile, StreamFiles, StreamOpened
from .writer import make_writer

logger = logging.getLogger(__name__)

#: Seconds that a closing rank waits for the relay to take its receipts; the rest is sent after the
#: next start.
FLUSH_S = 5.0


class StreamedRows(Wire, tag="rows"):
    """Rows that leave before their request ends; a stream's first message has `opened`."""

    stream: int
    blocks: list[BlockPlace]
    nbytes: int
    landing: int  # of the rows, see `SharedMemory.wait`
    opened: StreamOpened | None = None


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
        outbox: Outbox,
        backlog: Backlog,
        *,
        begin: Callable[[], None] = lambda: None,
        readings: Consumer | None = None,
        works: tuple[WriterWork, ...] = ("writer", "harvest", "reading"),
    ) -> None:
        """`backlog`, `begin`, `readings`, `works`: see `Writer`."""
        store = open_store(config.capture_root)
        self._memory, self.outbox = memory, outbox
        self._origin: Origin | None = None
        self.writer = make_writer(
            config,
            config.capture_quota_mib,
            store,
            config.boot,
            outbox,
            config.writer_threads,
            begin,
            readings,
            backlog,
            works,
        )
        self._files = StreamFiles(store, partial(scratch, Path(config.spill_dir)), self._of_rank)
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
                self.writer.stream(self._flush_of(message, memory), message.nbytes)
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
                stream = RecordingFile(rows.opened, self._files.begin, self._memory.wait)
                self._streams[rows.stream] = stream
            stream = self._streams[rows.stream]
            stream.push([RowBlock(memory, place) for place in rows.blocks], rows.landing)
        except Exception:
            logger.exception("a stream of captured rows cannot go on")
            self._streams.pop(rows.stream, None)
            return lambda: None
        return stream.flush
