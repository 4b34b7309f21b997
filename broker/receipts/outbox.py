"""Outbox of a rank: accepts receipts without loss and without waiting for disk or network.

`append` queues; one writer thread commits what is queued in one SQLite transaction (group commit);
one sender thread sends what is committed until the relay has acknowledged it. Receipts that a
process leaves behind are sent by the next process on the same file.

Runs inside vLLM's rank processes: imports nothing heavy, installs no signal handler, and its
threads sleep when idle.
"""

import functools
import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ...schemas.base.records import to_msgpack
from ...schemas.jobs.receipts import Receipt
from ...schemas.settings.faults import crash_point
from ...schemas.settings.settings import relay_addresses
from ...storage.disk import FULL, disk_trouble
from .curve import ClientKeys
from .outbox_store import LOCK_WAIT_S, OutboxError, Store
from .sender import ReceiptSender

__all__ = ["Outbox", "OutboxError"]

log = logging.getLogger(__name__)

#: Maximum number of receipts in one transaction.
GROUP = 4096
#: Acknowledged receipts stay this long: Redis with `appendfsync everysec` may lose its last second
#: when the machine dies, and the relay then requests them again.
KEEP_ACKED_S = 5.0
#: How long writes to a failing disk are retried before the worker stops; writes to a full disk are
#: retried for as long as it is full.
GIVE_UP_S = 30.0
RETRY_S = 0.05
MAX_RETRY_S = 2.0


class _Aging(NamedTuple):
    """Acknowledged rows that are kept for a while."""

    since: float  # by `time.monotonic`
    acked: int  # number of the last one


class Outbox:
    """The receipts of one rank on their way to the relay."""

    def __init__(
        self,
        directory: Path,
        worker: str,
        rank: int,
        relay_url: str,
        on_fatal: Callable[[Exception], None] | None = None,
        lock_wait_s: float = LOCK_WAIT_S,
        curve: ClientKeys | None = None,
    ):
        """Open, or continue, the outbox of `(worker, rank)` in `directory`.

        `on_fatal(error)` is called from one of its threads, at most once, when receipts cannot be
        kept or delivered without help: the disk failed, or the relay refuses this sender. Committed
        receipts stay on disk all the same. `curve`: the keys, if the relay requires encryption.
        Raises OutboxError: another process holds the outbox, or it cannot be read; SettingsError:
        `relay_url` is not an address or a list of addresses.
        """
        relays = relay_addresses(relay_url)
        self.store = Store(Path(directory), worker, rank, lock_wait_s)
        self.worker = worker
        self.rank = rank
        self._on_fatal = on_fatal
        self._fatal_reported = False
        lock = threading.Lock()
        self._work = threading.Condition(lock)  # for the writer
        self._changed = threading.Condition(lock)  # for callers of `flush`
        # The lock guards all attributes below.
        self._queue: list[tuple[str, bytes]] = []  # job and payload
        self._forgotten: list[str] = []  # past epochs whose losses are reported
        self._renumber = False
        self._closing = False
        self._broken: Exception | None = None
        self._acked = self.store.acked
        self._shift = 0  # number in the current epoch + shift = place in the order of appending
        self._appended = self.store.last
        self._rearm = False  # the writer must recompute how long it may sleep
        # (since when, up to which number) acknowledged rows are kept
        self._aging: _Aging | None = None
        self._sender = ReceiptSender(
            self.store,
            relays,
            acked=self._note_acked,
            forget=self._note_forgotten,
            renumber=self._note_renumber,
            fatal=self._fatal,
            curve=curve,
        )
        if self.store.last > self.store.acked:
            log.info(
                "outbox %s: receipts of an earlier process waiting: %d",
                self.store.path,
                self.store.last - self.store.acked,
            )
        self._writer = threading.Thread(
            target=self._write_loop, name=f"receipt-writer-{worker}-{rank}", daemon=True
        )
        self._writer.start()
        self._sender.start()

    # --- what callers use

    def append(self, receipt: Receipt) -> None:
        """Queue `receipt`, from any thread, without waiting for the disk.

        Raises ValueError for another rank's receipt, OutboxError when the outbox is closed or its
        disk has failed.
        """
        if (receipt.worker, receipt.rank) != (self.worker, self.rank):
            raise ValueError(
                f"receipt of {receipt.worker}/{receipt.rank} in the outbox of "
                f"{self.worker}/{self.rank}"
            )
        row = (receipt.attempt_id, to_msgpack(receipt))
        with self._changed:
            if self._broken is not None:
                raise OutboxError(
                    "internal", f"outbox {self.store.path} has failed: {self._broken}"
                ) from self._broken
            if self._closing:
                raise OutboxError("internal", f"outbox {self.store.path} is closed")
            self._queue.append(row)
            self._appended += 1
            self._work.notify()

    def flush(self, timeout: float) -> bool:
        """Wait until the relay has acknowledged everything appended before this call, and the
        losses of earlier processes.

        Returns False if that takes longer than `timeout` seconds, or cannot happen because the disk
        has failed.
        """
        with self._changed:
            goal = self._appended
            return (
                self._changed.wait_for(
                    lambda: self._broken is not None or self._settled(goal), timeout
                )
                and self._broken is None
            )

    def depth(self) -> int:
        """Return how many receipts the relay has not acknowledged yet, including those of earlier
        processes.
        """
        with self._changed:
            return self._appended - (self._acked + self._shift)

    def close(self) -> None:
        """Make appended receipts durable, then stop. Idempotent.

        The next process sends those that are not acknowledged.
        """
        with self._changed:
            if self._closing:
                return
            self._closing = True
            self._work.notify()
        self._writer.join()
        self._sender.stop()
        self.store.close()

    def __enter__(self) -> "Outbox":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settled(self, goal: int) -> bool:
        return self._acked + self._shift >= goal and not self._sender.past_epochs

    # --- called by the sender

    def _note_acked(self, acked: int) -> None:
        with self._changed:
            if acked < self._acked:
                # Redis lost its tail: nothing may be dropped before it is acknowledged again
                self._aging = None
            self._acked = acked
            if self._aging is None and acked > 0:
                self._aging = _Aging(time.monotonic(), acked)
                self._rearm = True
                self._work.notify()
            self._changed.notify_all()

    def _note_forgotten(self, epoch: str) -> None:
        with self._changed:
            self._forgotten.append(epoch)
            self._work.notify()
            self._changed.notify_all()

    def _note_renumber(self) -> None:
        with self._changed:
            self._renumber = True
            self._work.notify()

    def _fatal(self, error: Exception) -> None:
        with self._changed:
            if self._fatal_reported:
                return
            self._fatal_reported = True
        log.error("outbox %s: %s", self.store.path, error)
        if self._on_fatal is not None:
            self._on_fatal(error)

    # --- the writer thread

    def _write_loop(self) -> None:
        try:
            while self._write_once():
                pass
        except Exception as error:
            with self._changed:
                self._broken = error
                self._changed.notify_all()
            log.exception("outbox %s: receipts can no longer be stored", self.store.path)
            self._fatal(error)

    def _write_once(self) -> bool:
        """Wait for work and do it; return False when closing and nothing is left."""
        with self._changed:
            self._work.wait_for(self._has_work, self._prune_in())
            group = self._queue[:GROUP]
            self._queue = self._queue[GROUP:]
            forgotten = self._forgotten
            self._forgotten = []
            renumber = self._renumber
            self._renumber = False
            acked = self._acked
            prune = self._to_prune()
            self._rearm = False
            closing = self._closing
        for epoch in forgotten:
            self._persist(functools.partial(self.store.forget, epoch))
        if renumber:
            self._start_new_epoch()
            acked = prune = 0
        if group or prune or (closing and acked > self.store.acked):
            last = self._persist(functools.partial(self.store.commit, group, acked, prune))
            if group:
                crash_point("receipt.stored")
            self._sender.committed(last)
        return bool(group or not closing)

    def _has_work(self) -> bool:
        return bool(
            self._queue or self._forgotten or self._renumber or self._rearm or self._closing
        )

    def _prune_in(self) -> float | None:
        """Return seconds until acknowledged rows are old enough to be deleted; None: no rows."""
        if self._aging is None:
            return None
        return max(0.0, self._aging.since + KEEP_ACKED_S - time.monotonic())

    def _to_prune(self) -> int:
        if self._aging is None or self._prune_in():
            return 0
        prune = min(self._aging.acked, self._acked)
        self._aging = _Aging(time.monotonic(), self._acked) if self._acked > prune else None
        return prune

    def _start_new_epoch(self) -> None:
        dropped = self.store.opened_at
        last = self._persist(self.store.restart_epoch)
        with self._changed:
            self._acked = 0
            self._shift = self._shift + dropped
            self._aging = None
            self._changed.notify_all()
        self._sender.renumbered(last)

    def _persist(self, write: Callable[[], int | None]) -> int:
        """Call `write`, again while the disk refuses; raise if the database is damaged, when
        closing, and after `GIVE_UP_S` unless the disk is full.
        """
        started = time.monotonic()
        pause = RETRY_S
        while True:
            try:
                last = write() or 0
            except (sqlite3.OperationalError, OSError) as error:
                trouble = disk_trouble(error)
                if self._closing or (trouble != FULL and time.monotonic() - started > GIVE_UP_S):
                    raise
                if pause == RETRY_S:  # once, not with every try
                    log.error(
                        "outbox %s: %s: receipts wait until the outbox is writable",
                        self.store.path,
                        trouble or error,
                    )
                time.sleep(pause)
                pause = min(2 * pause, MAX_RETRY_S)
            else:
                if pause > RETRY_S:
                    log.warning("outbox %s is writable again", self.store.path)
                return last
