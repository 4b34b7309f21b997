"""Delivery of what a rank has recorded: to the process that writes its files, or to a desk among
its own threads, which has the requests with readings, because these need the loaded model, and
those of a certification.
"""

import fcntl
import itertools
import logging
import os
import select
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

from ....schemas.base.records import from_msgpack, to_msgpack
from ....schemas.jobs.receipts import Receipt
from ....schemas.requests.specs import RankSpec
from ....storage.calls import CALLS
from ..base.backlog import Backlog
from ..base.config import PlaneConfig
from ..files.desk import (
    COMMAND,
    EXIT_NO_RECEIPTS,
    LENGTH,
    Begun,
    Closed,
    Delivered,
    Desk,
    DeskAnswer,
    DeskCommand,
    DeskMessage,
    DeskStatus,
    EndedRequest,
    Freed,
    OriginSet,
    Setup,
    Spilled,
    StatusAsked,
    StreamedRows,
)
from ..files.finished_rows import Consumer, Origin
from ..files.streams import StreamOpened
from ..files.writer import Diversion
from .arena import Arena
from .capture import Recording, RowStream
from .edit_sizes import RequestSizes

#: The module that the process runs.
PROGRAM = f"{__package__.rpartition('.')[0]}.files"
#: Seconds in which the process must begin.
_START_S = 300.0
_PIPE_BYTES = 1 << 20
_SILENT = "the process that writes files does not answer"
logger = logging.getLogger(__name__)


# A process, not a thread: beside the model's thread, on one interpreter lock, a helper that makes
# short calls costs that three to five times its own time.
class Link:
    """The process of one rank. Messages are sent from any thread, the rest is of the model's."""

    def __init__(
        self,
        arena: Arena,
        config: PlaneConfig,
        rank: int,
        backlog: Backlog,
        give_up: Callable[[Exception], None],
        *,
        gives_way: bool,
    ) -> None:
        """Start the process. `backlog`: counts what is sent. `give_up(error)` is called if it ends
        before `close`. `gives_way`: see `begin_helper`.
        """
        self._arena = arena
        self._backlog = backlog
        self._give_up = give_up
        self._numbers = itertools.count(1)
        # message → what it refers to, until the process has read it
        self.held: dict[int, object] = {}
        self._spills = self._closing = False
        self._received = bytearray()
        self._last = DeskStatus()
        self._patience_s = config.answer_s
        self._asked = 0.0  # when it was asked for its status; 0: it answered
        theirs, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._answers, False)
        os.set_blocking(self._commands, False)
        for pipe in (self._commands, answers):
            with suppress(OSError):  # a user's pipes may be limited
                fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        descriptors = (theirs, answers, arena.descriptors[0])
        numbers = map(str, (os.getpid(), *descriptors, arena.end, arena.size))
        self._process = subprocess.Popen(
            [sys.executable, "-m", PROGRAM, *numbers],
            pass_fds=descriptors,
            stdin=subprocess.DEVNULL,
        )
        os.close(theirs)
        os.close(answers)
        self.send(Setup(config, rank, gives_way))

    def _watch(self) -> None:
        code = self._process.wait()
        if not self._closing:
            self._give_up(RuntimeError(f"the process that writes files ended with code {code}"))

    def begun(self) -> None:
        """Wait until the process serves. Raises RuntimeError if it cannot."""
        while _ready(self._answers, select.POLLIN, _START_S):
            for begun in [each for each in self._hear() if isinstance(each, Begun)]:
                if begun.error:
                    raise RuntimeError(begun.error)
                # it sleeps until the process ends
                threading.Thread(target=self._watch, name="midstream-rowd", daemon=True).start()
                return
        raise RuntimeError("the process that writes files has not begun")

    def send(self, message: DeskCommand, held: Sequence[object] = ()) -> None:
        """Send a message. `held`: what has the rows that it names."""
        if not self._spills and self._arena.descriptors[1:]:
            self._put(Spilled(self._arena.descriptors[1], self._arena.end))
            self._spills = True  # another thread may have sent this, too
        if isinstance(message, EndedRequest | StreamedRows):  # only the model's thread may add
            self._backlog.send(message.nbytes, message.work)
        self._put(message, held)

    def _put(self, message: DeskCommand, held: Sequence[object] = ()) -> None:
        raw = to_msgpack(message)
        number = next(self._numbers)
        start, memory = self._arena.take(len(raw), 1)
        memory[:] = memoryview(raw)
        self.held[number] = memory, held
        while True:
            try:
                os.write(self._commands, COMMAND.pack(number, start, len(raw)))
                return
            except BlockingIOError:  # the process makes room between two messages
                if not _ready(self._commands, select.POLLOUT, self._patience_s):
                    self._give_up(RuntimeError(_SILENT))

    def turn(self) -> None:
        """Hear what the process has done."""
        for answer in self._hear():
            if isinstance(answer, DeskStatus):
                self._last = answer
                self._asked = 0.0

    def status(self) -> DeskStatus:
        """Return what the process said when it was last asked, and ask it again: the model's thread
        does not wait for it. If it does not answer for long, give up.
        """
        self.turn()
        if not self._asked:
            self._asked = time.monotonic()
            self.send(StatusAsked())
        elif self.silent_s > self._patience_s:
            self._give_up(RuntimeError(_SILENT))
        return self._last

    @property
    def silent_s(self) -> float:
        """Return for how many seconds the process has not answered; 0: it has."""
        return time.monotonic() - self._asked if self._asked else 0.0

    def close(self) -> None:
        """Have everything written and sent, and the process end."""
        self._closing = True
        self.send(Closed())
        self._process.wait()
        self.held.clear()
        for pipe in (self._commands, self._answers):
            os.close(pipe)

    def _hear(self) -> Iterator[DeskAnswer]:
        try:
            received = os.read(self._answers, _PIPE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise RuntimeError("the process that writes files has ended")
        self._received += received
        while len(self._received) >= LENGTH.size:
            stop = LENGTH.size + LENGTH.unpack_from(self._received)[0]
            if len(self._received) < stop:
                return
            answer = from_msgpack(
                bytes(self._received[LENGTH.size : stop]), cast(type[DeskAnswer], DeskAnswer)
            )
            del self._received[:stop]
            if isinstance(answer, Freed):
                del self.held[answer.number]
            yield answer


def _ready(descriptor: int, event: int, patience_s: float) -> bool:
    """Wait until a descriptor, which may be above 1023, can be read or written."""
    ready = select.poll()
    ready.register(descriptor, event)
    return bool(ready.poll(patience_s * 1000))


@dataclass(eq=False)
class Near:
    """The channel to a desk in this process. Its messages are what they are to another process."""

    silent_s = 0.0

    _arena: Arena
    desk: Desk
    # may be that of another channel, whose numbers are positive
    held: dict[int, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._numbers = itertools.count(-1, -1)

    def send(
        self,
        message: DeskMessage,
        held: Sequence[object] = (),
        prepared: Mapping[int, Any] | None = None,
    ) -> None:
        """Send a message as `Link.send` does. `prepared`: what readers prepared for the request."""
        number = next(self._numbers)
        lease = self._arena.memory.lease()
        self.held[number] = held
        weakref.finalize(lease, self.held.pop, number).atexit = False
        if isinstance(message, EndedRequest | StreamedRows):
            writer = self.desk.writer
            writer.backlog.send(message.nbytes, writer.done_as(message.work))
        received = from_msgpack(to_msgpack(message), cast(type[DeskMessage], DeskMessage))
        self.desk.receive(received, lease, prepared)

    def turn(self) -> None:
        """Do nothing: what is written is known here."""

    def status(self) -> DeskStatus:
        return DeskStatus(self.desk.outbox.depth(), self.desk.writer.totals, CALLS.read())

    def close(self) -> None:
        self.desk.close()


RowChannel = Link | Near


@dataclass(eq=False)
class ForwardedReceipts:
    """The outbox of a desk whose receipts another process keeps."""

    worker: str
    rank: int
    _channel: RowChannel

    def append(self, receipt: Receipt) -> None:
        self._channel.send(Delivered(receipt))

    def depth(self) -> int:
        """Return 0: the receipts are that process's."""
        return 0

    def flush(self, timeout: float) -> None:
        """Do nothing, as `close`."""

    def close(self) -> None:
        """Do nothing: the channel is closed later."""


class RowDelivery:
    """The channels of one rank."""

    def __init__(self, far: RowChannel, near: Near, backlog: Backlog) -> None:
        """`far`: of what needs no model; may be `near`. `backlog`: of all."""
        self._far = far
        self._near = near
        self.backlog = backlog
        self._diverted = False
        self._channels: list[RowChannel] = [near] if far is near else [near, far]
        self._streams = itertools.count(1)
        #: Messages that are not read yet, with what they refer to; `turn` hears which are.
        self.held = far.held
        self.turn = far.turn

    def set_origin(self, origin: Origin) -> None:
        """Set what every later capture says about its origin."""
        for channel in self._channels:
            channel.send(OriginSet(origin))

    def submit(
        self,
        request: EndedRequest,
        recordings: Mapping[int, Recording],
        sizes: Sequence[RequestSizes] = (),
    ) -> None:
        """Have an ended request written. `recordings`: by the capture's number."""
        held = [*sizes, *(block for each in recordings.values() for block in each.held)]
        if self._is_near(request.spec):
            prepared = {number: each.prepared for number, each in recordings.items()}
            self._near.send(request, held, prepared)
        else:
            self._far.send(request, held)

    def stream(self, spec: RankSpec, number: int, recording: Recording, part: int) -> RowStream:
        """Return the stream of a capture. `number`: in the request. `part`: see `RowStream`."""
        shape = recording.shape(number)
        stream = next(self._streams)
        opened = StreamOpened(stream, spec, shape, recording.end)
        channel = self._near if self._is_near(spec) else self._far
        return RowStream(channel.send, opened, part)

    def _is_near(self, spec: RankSpec) -> bool:
        return self._diverted or spec.work == "reading"

    def divert(self, to: Diversion | None) -> None:
        """Pass everything that is submitted from now on to `to`, see `Writer.divert`."""
        self._diverted = to is not None
        self._near.desk.writer.divert(to)

    def status(self) -> dict[str, Any]:
        """Return counts for `RankSteering`."""
        found = [channel.status() for channel in self._channels]
        return {
            "outbox": sum(each.outbox for each in found),
            "backlog": self.backlog.size,
            "silent_s": self._far.silent_s,
            "store": found[0].store,
            "files_store": found[1].store if found[1:] else {},
            **{name: sum(each.totals.get(name, 0) for each in found) for name in found[0].totals},
        }

    def close(self) -> None:
        """Write and send everything that is pending, then stop."""
        for channel in self._channels:
            channel.close()


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
    receipts = ForwardedReceipts(config.worker, rank, far)
    desk = Desk(
        arena.memory,
        config,
        receipts,
        backlog,
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
