"""How do finished captures reach the disk and their receipts the outbox, without the engine waiting for either?"""

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ...broker.outbox import Outbox
from ...schemas.receipts import CapturedFile, Receipt
from ..storage import PendingFile, publish

logger = logging.getLogger(__name__)

#: A group is one durable commit: at most this many files and about this many bytes.
GROUP_FILES = 256
GROUP_BYTES = 64 << 20


@dataclass
class WriteJob:
    """A finished request: its receipt, complete but for the files, and how to make the file if there is one.

    `build` runs in a writer thread; what it refers to stays alive until the file is written.
    """

    receipt: Receipt
    build: Callable[[], PendingFile] | None = None
    size: int = 0


class Writer:
    """Threads that publish files in groups and then hand the receipts to the outbox."""

    def __init__(self, root: Path, outbox: Outbox, threads: int, fail_writes: Callable[[], bool]) -> None:
        self._root = root
        self._outbox = outbox
        self._fail_writes = fail_writes
        self._queue: queue.SimpleQueue[WriteJob | None] = queue.SimpleQueue()
        self._pending = 0
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._run, name=f"midstream-writer-{i}", daemon=True) for i in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: WriteJob) -> None:
        """Returns at once. Without a file the receipt goes straight to the outbox."""
        if job.build is None:
            self._outbox.append(job.receipt)
            return
        with self._lock:
            self._pending += 1
        self._queue.put(job)

    def busy(self) -> bool:
        """Is anything still to be written?"""
        return self._pending > 0

    def close(self) -> None:
        """Write what is queued and stop."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (first := self._queue.get()) is not None:
            group, last = self._gather(first)
            count = len(group)
            self._write(group)
            group.clear()
            del first
            with self._lock:
                self._pending -= count
            if last:
                self._queue.put(None)  # for the next thread; this one ends too
                return

    def _gather(self, first: WriteJob) -> tuple[list[WriteJob], bool]:
        """`first` and what else waits, up to a group; and whether the end was seen."""
        group, size = [first], first.size
        while len(group) < GROUP_FILES and size < GROUP_BYTES:
            try:
                job = self._queue.get_nowait()
            except queue.Empty:
                break
            if job is None:
                return group, True
            group.append(job)
            size += job.size
        return group, False

    def _write(self, group: list[WriteJob]) -> None:
        """Publish the group; if it fails, each file for itself, so that one bad file does not fail the others."""
        try:
            files = self._publish(group)
        except Exception as error:
            if len(group) > 1:
                for job in group:
                    self._write([job])
                return
            receipt = group[0].receipt
            logger.exception("capture of job %s request %d could not be written", receipt.job, receipt.request)
            self._outbox.append(
                msgspec.structs.replace(receipt, status="error", kind="capture_failed", message=f"capture could not be written: {error}")
            )
            return
        for job, file in zip(group, files, strict=True):
            self._outbox.append(msgspec.structs.replace(job.receipt, files=[file]))

    def _publish(self, group: list[WriteJob]) -> list[CapturedFile]:
        if self._fail_writes():
            raise OSError("fault injected: write")
        return publish(self._root, [job.build() for job in group if job.build is not None])
