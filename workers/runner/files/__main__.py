"""The process that writes the files and receipts of a rank, and shares its memory of rows.

If one of the two dies, so does the other: receipts that are durable by then are delivered after the
next start, and requests without one run again.
"""

import os
import queue
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from ....broker.processes.orphans import die_with_parent
from ....broker.receipts.curve import client_keys
from ....broker.receipts.outbox import Outbox
from ....broker.telemetry import logs
from ....schemas.base.records import from_msgpack, learn_records, to_msgpack
from ....schemas.settings.faults import arm
from ....storage.calls import CALLS
from ..base.backlog import Backlog
from ..base.shared_memory import SharedMemory
from .desk import (
    COMMAND,
    EXIT_NO_RECEIPTS,
    LENGTH,
    Begun,
    Closed,
    Desk,
    DeskAnswer,
    DeskCommand,
    DeskMessage,
    DeskStatus,
    Freed,
    Setup,
    Spilled,
    StatusAsked,
)

#: Added to the niceness of a process that gives way: it gets an eighth of the time of one of the
#: model's threads that it competes with.
_NICE = 10


# The process needs no model and imports no torch, so it begins in 0.3 s.
def main() -> None:
    """Serve the rank that started this process. Arguments: its pid, descriptors of the commands, of
    the answers and of the memory, the memory's bytes, and how many of them there are with those of
    spilled rows.
    """
    parent, commands, answers, descriptor, end, size = map(int, sys.argv[1:])
    for number in (signal.SIGINT, signal.SIGTERM):  # they go to whole groups; the rank decides
        signal.signal(number, signal.SIG_IGN)
    die_with_parent(parent)
    with suppress(OSError):  # /proc may be read-only
        Path("/proc/self/comm").write_text("midstream-rowd")  # its name among processes
    memory = SharedMemory(size)
    memory.map(0, end, descriptor)
    # Any thread may answer, also while it collects garbage, and none waits for the rank to listen:
    # the rank may just be waiting for room for its next message.
    waiting = queue.SimpleQueue[DeskAnswer]()
    answer = partial(_answer, answers)
    with open(commands, "rb", buffering=0) as source:
        received = _commands(source, memory, waiting.put)
        desk = _begun(cast(Setup, next(received)[0]), memory, answer)
        threading.Thread(target=_answer_all, args=(waiting, answer), daemon=True).start()
        _serve(received, desk, memory, parent, waiting.put)
    os._exit(0)  # the rank has closed the desk, or is dead


def _commands(
    source: Any, memory: SharedMemory, answer: Callable[[DeskAnswer], None]
) -> Iterator[tuple[DeskCommand, np.ndarray]]:
    """Iterate over the rank's messages, each with a lease of the memory; the rank is told when
    nothing refers to that any more.
    """
    while True:
        command = source.read(COMMAND.size)
        if len(command) != COMMAND.size:
            return
        number, start, length = COMMAND.unpack(command)
        lease = memory.lease()
        weakref.finalize(lease, answer, Freed(number)).atexit = False
        raw = cast(bytes, lease[start : start + length])
        yield from_msgpack(raw, cast(type[DeskCommand], DeskCommand)), lease
        del raw, lease


def _serve(
    commands: Iterator[tuple[DeskCommand, np.ndarray]],
    desk: Desk,
    memory: SharedMemory,
    parent: int,
    answer: Callable[[DeskAnswer], None],
) -> None:
    for message, lease in commands:
        match message:
            case Spilled(held, begin):
                with open(f"/proc/{parent}/fd/{held}", "r+b") as file:
                    memory.map(begin, len(memory.bytes), file.fileno())
            case StatusAsked():
                answer(DeskStatus(desk.outbox.depth(), desk.writer.totals, CALLS.read()))
            case Closed():
                desk.close()
                return
            case _:
                desk.receive(cast(DeskMessage, message), lease)
        del message, lease


def _begun(setup: Setup, memory: SharedMemory, answer: Callable[[DeskAnswer], None]) -> Desk:
    config = setup.config
    rank = setup.rank
    logs.configure(config.log_format, config.log_level, "rowd", worker=config.worker, rank=rank)
    arm(config.fault, Path(config.outbox_dir).parent)
    learn_records()
    if setup.gives_way:
        os.nice(_NICE)
    try:
        outbox = Outbox(
            Path(config.outbox_dir),
            config.worker,
            rank,
            config.relay_url,
            on_fatal=_give_up,
            curve=client_keys(config.curve_secret_file, config.curve_server_key),
        )
    except Exception as error:
        answer(Begun(f"{type(error).__name__}: {error}"))
        raise SystemExit(EXIT_NO_RECEIPTS) from error
    desk = Desk(memory, config, outbox, Backlog.of(config, rank, frees=True))
    answer(Begun())
    return desk


def _answer_all(
    waiting: queue.SimpleQueue[DeskAnswer], answer: Callable[[DeskAnswer], None]
) -> None:
    while True:
        answer(waiting.get())


def _answer(descriptor: int, answer: DeskAnswer) -> None:
    """Tell the rank something, in one thread at a time."""
    raw = to_msgpack(answer)
    os.write(descriptor, LENGTH.pack(len(raw)) + raw)


def _give_up(error: Exception) -> None:
    """End the process, because receipts cannot be kept or delivered, and without them no request
    may succeed.
    """
    sys.stderr.write(f"the receipts of a rank cannot be delivered: {error}\n")
    os._exit(EXIT_NO_RECEIPTS)


if __name__ == "__main__":
    main()
