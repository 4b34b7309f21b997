"""The process that writes a rank's files, as one that kills itself at a boundary, and what has a
process do so.
"""

import itertools
import os
import signal
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any, NamedTuple

from midstream.broker.receipts import outbox, outbox_store, sender
from midstream.storage import file_store
from midstream.workers.runner.files import __main__ as rowd, desk, streams, writer
from midstream.workers.runner.files.desk import Freed

#: Environment variable with the boundary at which a rank or its process dies, `<name>:<passage>`.
ARMED = "MIDSTREAM_TEST_KILLED_AT"


class Point(NamedTuple):
    """A function before or after which the process may die."""

    owner: Any
    name: str
    follows: bool = True
    #: The largest number of a passage that a test chooses: a few requests bring it about.
    most: int = 4
    #: Which calls count, by their arguments.
    counts: Callable[..., bool] = lambda *_: True


def arm(points: Mapping[str, Point], armed: str) -> None:
    """Have this process die at a passage of one of its points, if it is one of `points`."""
    name, _, passage = armed.partition(":")
    if name not in points:
        return
    owner, function, follows, _, counts = points[name]
    original = getattr(owner, function)
    left = itertools.count(int(passage) - 1, -1)

    def die(*args: Any) -> None:
        if counts(*args) and next(left) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    @wraps(original)
    def passing(*args: Any, **options: Any) -> Any:
        if not follows:
            die(*args)
        result = original(*args, **options)
        if follows:
            die(*args)
        return result

    setattr(owner, function, passing)


def crash(owner: Any, name: str) -> Point:
    """Return one of the product's own crash points, see `schemas.settings.faults`."""
    return Point(owner, "crash_point", counts=lambda reached: reached == name)


POINTS = {
    "set up, not begun": Point(rowd, "_begun", follows=False, most=1),
    "outbox opened": Point(outbox_store.JobLog, "rewrite", most=1),
    "begun": Point(rowd, "_begun", most=1),
    "message read": Point(desk.Desk, "receive", follows=False, most=24),
    "message queued": Point(desk.Desk, "receive", most=24),
    "group taken": Point(writer.CaptureWriter, "_write", follows=False),
    "group written, no receipt": Point(writer.CaptureWriter, "_write"),
    "file created": Point(file_store, "_write_at", follows=False, most=16),
    "file written": Point(file_store, "_write_at", most=16),
    "files synced": Point(file_store, "_sync", most=8),
    "capture.written": crash(file_store, "capture.written"),
    "one file renamed": Point(file_store.os, "rename", most=6),
    "capture.renamed": crash(file_store, "capture.renamed"),
    "files published": Point(file_store.FileWriter, "commit"),
    "segment created": Point(file_store.FileSegment, "__init__", most=2),
    "segment.written": crash(file_store, "segment.written"),
    "segment.indexed": crash(file_store, "segment.indexed"),
    "stream begun": Point(desk, "begin_file", most=2),
    "part not written": Point(streams.RecordingFile, "_put", follows=False, most=16),
    "part written": Point(streams.RecordingFile, "_put", most=16),
    "stream sealed": Point(streams.RecordingFile, "seal", most=2),
    "stream named": Point(file_store.FileDraft, "link", most=1),
    "receipt queued": Point(outbox.Outbox, "append"),
    "receipt's job logged": Point(outbox_store.JobLog, "append"),
    "receipt.stored": crash(outbox, "receipt.stored"),
    "receipt.sent": crash(sender, "receipt.sent"),
    "receipt acknowledged": Point(sender.ReceiptSender, "_on_ack", follows=False),
    "receipts removed": Point(
        outbox_store.Store, "commit", most=1, counts=lambda _, rows, acked, prune: prune > 0
    ),
    "memory not given back": Point(
        rowd, "_answer", follows=False, most=16, counts=lambda *told: isinstance(told[-1], Freed)
    ),
    "memory given back": Point(
        rowd, "_answer", most=16, counts=lambda *told: isinstance(told[-1], Freed)
    ),
}

if __name__ == "__main__":
    outbox.KEEP_ACKED_S = 0.2  # receipts leave the outbox while their rank lives
    arm(POINTS, os.environ[ARMED])
    rowd.main()
