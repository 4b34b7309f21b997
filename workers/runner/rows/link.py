"""Link of a rank to the process that writes its files, `workers.runner.files`, and which has its
messages and its memory of rows.
"""

import fcntl
import itertools
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import cast

from ....schemas.base.records import from_msgpack, to_msgpack
from ..base.backlog import Backlog
from ..base.config import PlaneConfig
from ..files.desk import (
    COMMAND,
    LENGTH,
    Begun,
    Closed,
    DeskAnswer,
    DeskCommand,
    DeskStatus,
    Freed,
    Setup,
    Spilled,
    StatusAsked,
)
from .arena import Arena

#: The module that the process runs.
PROGRAM = f"{__package__.rpartition('.')[0]}.files"
#: Seconds in which the process must answer, which it does between two messages. Then it hangs.
_PATIENCE_S = 300.0
_PIPE_BYTES = 1 << 20


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
        self._arena, self._backlog, self._give_up = arena, backlog, give_up
        self._numbers = itertools.count(1)
        # message → what it refers to, until the process has read it
        self.held: dict[int, object] = {}
        self._spills = self._closing = False
        self._received = bytearray()
        self._last, self._asked = (
            DeskStatus(),
            0.0,
        )  # when it was asked for its status; 0: it answered
        theirs, self._commands = os.pipe()
        self._answers, answers = os.pipe()
        os.set_blocking(self._answers, False)
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
        ready = select.poll()  # of descriptors above 1023, too
        ready.register(self._answers, select.POLLIN)
        while ready.poll(_PATIENCE_S * 1000):
            for begun in [each for each in self._hear() if isinstance(each, Begun)]:
                if begun.error:
                    raise RuntimeError(begun.error)
                # it sleeps until the process ends
                threading.Thread(target=self._watch, name="midstream-rowd", daemon=True).start()
                return
        raise RuntimeError("the process that writes files has not begun")

    def send(self, message: DeskCommand, held: Sequence[object] = (), nbytes: int = 0) -> None:
        """Send a message. `held`: what has the rows that it names, which are `nbytes`."""
        if not self._spills and self._arena.descriptors[1:]:
            self._put(Spilled(self._arena.descriptors[1], self._arena.end))
            self._spills = True  # another thread may have sent this, too
        if nbytes:  # only the model's thread may add
            self._backlog.send(nbytes)
        self._put(message, held)

    def _put(self, message: DeskCommand, held: Sequence[object] = ()) -> None:
        raw, number = to_msgpack(message), next(self._numbers)
        start, memory = self._arena.take(len(raw), 1)
        memory[:] = memoryview(raw)
        self.held[number] = memory, held
        os.write(self._commands, COMMAND.pack(number, start, len(raw)))

    def turn(self) -> None:
        """Hear what the process has done."""
        for answer in self._hear():
            if isinstance(answer, DeskStatus):
                self._last, self._asked = answer, 0.0

    def status(self) -> DeskStatus:
        """Return what the process said when it was last asked, and ask it again: the model's thread
        does not wait for it. If it does not answer for long, give up.
        """
        self.turn()
        if not self._asked:
            self._asked = time.monotonic()
            self.send(StatusAsked())
        elif time.monotonic() > self._asked + _PATIENCE_S:
            self._give_up(RuntimeError("the process that writes files does not answer"))
        return self._last

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
