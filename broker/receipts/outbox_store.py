"""Outbox storage on disk, and recovery from a damaged database.

Three files per rank: `<name>.sqlite` holds the receipts, `<name>.jobs` repeats which receipt
belongs to which attempt at a job (plain lines, so that it survives when the database does not),
`<name>.lock` is locked while a process uses the other two. In both, "job" means an attempt, with
the id in `Receipt.attempt_id`.

A database that cannot be read is moved aside, never repaired: a new epoch starts, and the previous
one is remembered with its last number and its jobs, so that its losses can be reported to the
relay. Only one thread writes; another one may read.
"""

import logging
import os
import socket
import sqlite3
import time
import zlib
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from ...schemas.base.errors import MidstreamError
from ...schemas.base.file_names import file_stem
from ..processes.private_files import locked_file, private_folder
from .frames import new_epoch

log = logging.getLogger(__name__)

#: Layout of the database, in SQLite's `user_version`.
LAYOUT = 1
#: Seconds that a previous process of the same rank may need to die.
LOCK_WAIT_S = 5.0
#: The job log is rewritten when it exceeds both this and twice its size after the last rewrite.
JOB_LOG_BYTES = 1 << 20

_header_decoder = msgspec.json.Decoder(tuple[str, int])
_line_decoder = msgspec.json.Decoder(tuple[int, str])

#: The sequence numbers of receipts, and their jobs.
NumberedJobs = list[tuple[int, str]]

_TABLES = """
CREATE TABLE outbox (
  worker TEXT NOT NULL, rank INTEGER NOT NULL, epoch TEXT NOT NULL, acked INTEGER NOT NULL);
CREATE TABLE receipts (
  seq INTEGER PRIMARY KEY, job TEXT NOT NULL, crc INTEGER NOT NULL, payload BLOB NOT NULL);
CREATE TABLE former (epoch TEXT PRIMARY KEY, last INTEGER NOT NULL, jobs BLOB NOT NULL);
"""


class OutboxError(MidstreamError):
    """The outbox cannot be used: another process holds it (`conflict`), or its disk failed
    (`internal`).
    """


class Row(NamedTuple):
    seq: int
    job: str
    payload: bytes | None  # None: the bytes on disk are not what was written


class PastEpoch(NamedTuple):
    """An epoch whose database is gone."""

    epoch: str
    last: int  # the highest number that it is known to have used
    jobs: NumberedJobs  # as far as known


def lock(path: Path, wait_s: float) -> IO[str]:
    """Return a file that gives the right to use an outbox; one process at a time has it, until it
    closes the file or dies.

    Raises OutboxError("conflict") naming the holder if the lock is held after `wait_s`.
    """
    owner = f"process {os.getpid()} on {socket.gethostname()}, since "
    return locked_file(
        path,
        f"{owner}{time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n",
        wait_s,
        lambda holder: OutboxError(
            "conflict",
            f"outbox {path.with_suffix('')} is in use by {holder or 'an unknown process'}: "
            "one process per rank",
        ),
    )


class JobLog:
    """The file `seq → job` next to the database: one JSON line for each receipt, written before the
    receipt is committed.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd = -1
        self._limit = JOB_LOG_BYTES
        self._size = 0

    def read(self) -> PastEpoch | None:
        """Return the contents of the file; None if there is no valid file.

        Lines after a torn or invalid one are not trusted.
        """
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return None
        try:
            epoch, last = _header_decoder.decode(lines[0])
            bytes.fromhex(epoch)
        except ValueError:  # includes msgspec's errors
            return None
        jobs = []
        for line in lines[1:]:
            try:
                jobs.append(_line_decoder.decode(line))
            except ValueError:
                break
        return PastEpoch(epoch, max([last, *(seq for seq, _ in jobs)]), jobs)

    def rewrite(self, epoch: str, last: int, rows: NumberedJobs) -> None:
        """Replace the file by a header and `rows`, atomically."""
        fresh = self.path.with_suffix(".jobs.new")
        content = _line([epoch, last]) + b"".join(map(_line, rows))
        fd = os.open(
            fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o600
        )
        _write_all(fd, content)
        os.fsync(fd)
        os.replace(fresh, self.path)
        self.close()
        self._fd = fd
        self._size = len(content)
        self._limit = max(JOB_LOG_BYTES, 2 * len(content))

    def append(self, rows: NumberedJobs) -> None:
        content = b"".join(map(_line, rows))
        try:
            _write_all(self._fd, content)
        except OSError:
            os.ftruncate(self._fd, self._size)  # a torn line would hide the lines that follow
            raise
        self._size += len(content)

    @property
    def outgrown(self) -> bool:
        return self._size > self._limit

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class Store:
    """The durable part of one rank's outbox.

    One thread calls `commit`, `forget` and `restart_epoch`; one thread reads.
    """

    def __init__(self, directory: Path, worker: str, rank: int, lock_wait_s: float = LOCK_WAIT_S):
        """Raises OutboxError: in use, owned by another worker, written by a newer version, or not
        writable.
        """
        private_folder(directory)
        base = directory / f"{file_stem(worker)}.rank{rank}"
        self.path = base.with_name(base.name + ".sqlite")
        self.worker = worker
        self.rank = rank
        self.transactions = 0  # number committed; under load, far below the receipts
        self._jobs = JobLog(base.with_name(base.name + ".jobs"))
        self._lock = lock(base.with_name(base.name + ".lock"), lock_wait_s)
        try:
            self._db = self._open()
            row = self._db.execute(
                "SELECT epoch, acked, (SELECT max(seq) FROM receipts) FROM outbox"
            ).fetchone()
            self.epoch: str = row[0]
            self.acked: int = row[1]  # as last written; the relay may have acknowledged more
            self.last: int = max(row[1], row[2] or 0)
            self.opened_at = self.last  # the last number when this process opened it
            self._pruned = 0
            self._rewrite_jobs()
            self._reader = sqlite3.connect(self.path, isolation_level=None, check_same_thread=False)
        except BaseException:
            self._lock.close()
            raise

    # --- writing: one thread

    def commit(self, rows: list[tuple[str, bytes]], acked: int = 0, prune: int = 0) -> int:
        """Append `(job, payload)` rows, store `acked`, delete rows up to `prune` ≤ `acked`: one
        transaction, durable when this returns.

        Returns the last number assigned. Raises sqlite3.Error or OSError with nothing changed.
        """
        numbered = [
            (seq, job, zlib.crc32(payload), payload)
            for seq, (job, payload) in enumerate(rows, self.last + 1)
        ]
        if numbered:
            self._jobs.append([(seq, job) for seq, job, _, _ in numbered])
        with self._db:
            self._db.executemany("INSERT INTO receipts VALUES (?, ?, ?, ?)", numbered)
            if acked > self.acked:
                self._db.execute("UPDATE outbox SET acked = ?", (acked,))
            if prune > self._pruned:
                self._db.execute("DELETE FROM receipts WHERE seq <= ?", (prune,))
        self.transactions += 1
        self.last += len(numbered)
        self.acked = max(acked, self.acked)
        self._pruned = max(prune, self._pruned)
        if self._jobs.outgrown:
            self._rewrite_jobs()
        return self.last

    def forget(self, epoch: str) -> None:
        """Forget a previous epoch: the relay has settled its losses."""
        with self._db:
            self._db.execute("DELETE FROM former WHERE epoch = ?", (epoch,))

    def restart_epoch(self) -> int:
        """Number the rows of this process from 1 under a new epoch, and drop the rows of earlier
        processes; returns the new last number.

        For a database that was restored to an older state: its next numbers were already used for
        other receipts.
        """
        epoch = new_epoch()
        with self._db:
            self._db.execute("DELETE FROM receipts WHERE seq <= ?", (self.opened_at,))
            # By way of negative numbers: a new number must not collide with an old one.
            self._db.execute("UPDATE receipts SET seq = ? - seq", (self.opened_at,))
            self._db.execute("UPDATE receipts SET seq = -seq")
            self._db.execute("UPDATE outbox SET epoch = ?, acked = 0", (epoch,))
        self.epoch = epoch
        self.acked = 0
        self._pruned = 0
        self.last = self.last - self.opened_at
        self.opened_at = 0
        self._rewrite_jobs()
        return self.last

    # --- reading: another thread

    def read(self, after: int, limit: int) -> list[Row]:
        """Return up to `limit` committed rows with `seq > after`, ascending; numbers may be
        missing.
        """
        result = self._reader.execute(
            "SELECT seq, job, crc, payload FROM receipts WHERE seq > ? ORDER BY seq LIMIT ?",
            (after, limit),
        )
        return [
            Row(seq, job, payload if zlib.crc32(payload) == crc else None)
            for seq, job, crc, payload in result
        ]

    def jobs_of(self, first: int, last: int) -> list[str]:
        """Return the jobs of receipts `first..last` of this epoch, as far as known, each once."""
        known = self._jobs.read()
        logged = (
            [(seq, job) for seq, job in known.jobs if seq >= first]
            if known and known.epoch == self.epoch
            else []
        )
        rows = self._reader.execute(
            "SELECT seq, job FROM receipts WHERE seq BETWEEN ? AND ?", (first, last)
        ).fetchall()
        return unique_jobs([*logged, *rows], first, last)

    def past_epochs(self) -> list[PastEpoch]:
        """Return the epochs whose losses must still be reported to the relay."""
        result = self._reader.execute("SELECT epoch, last, jobs FROM former ORDER BY rowid")
        return [
            PastEpoch(epoch, last, msgspec.msgpack.decode(jobs, type=list[tuple[int, str]]))
            for epoch, last, jobs in result
        ]

    def close(self) -> None:
        self._reader.close()
        self._db.close()
        self._jobs.close()
        self._lock.close()

    # --- opening

    def _open(self) -> sqlite3.Connection:
        damage = ""
        if self.path.exists():
            try:
                if db := self._connect():
                    return db
                damage = "it is empty" if self._jobs.path.exists() else ""
            except sqlite3.DatabaseError as error:
                # Subclasses such as OperationalError (a full disk, no permission) are not damage.
                if type(error) is not sqlite3.DatabaseError:
                    raise OutboxError("internal", f"outbox {self.path}: {error}") from error
                damage = str(error)
        known = self._jobs.read()
        if known and not damage:
            damage = "it is missing, though its job log exists"
        if damage:
            self._set_aside(damage, known)
        return self._create(known)

    def _connect(self) -> sqlite3.Connection | None:
        """Open the existing database; return None if it was never initialised. Raises
        sqlite3.DatabaseError (no subclass of it) if it is damaged.
        """
        db = _configured(self.path)
        try:
            layout = db.execute("PRAGMA user_version").fetchone()[0]
            if layout > LAYOUT:
                raise OutboxError(
                    "conflict",
                    (
                        f"outbox {self.path} has layout {layout}; this version of "
                        "Midstream supports up "
                        f"to {LAYOUT}"
                    ),
                )
            problems = [text for (text,) in db.execute("PRAGMA quick_check(3)") if text != "ok"]
            tables = {
                name
                for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")
            }
            if layout == 0 and not tables and not problems:
                db.close()
                return None
            if problems or not {"outbox", "receipts", "former"} <= tables:
                raise sqlite3.DatabaseError("; ".join(problems) or "tables are missing")
            if (owner := db.execute("SELECT worker, rank FROM outbox").fetchone()) is None:
                raise sqlite3.DatabaseError("it names no owner")
            if owner != (self.worker, self.rank):
                raise OutboxError(
                    "conflict",
                    f"outbox {self.path} belongs to worker {owner[0]!r}, rank {owner[1]}",
                )
        except BaseException:
            db.close()
            raise
        return db

    def _create(self, past: PastEpoch | None) -> sqlite3.Connection:
        db = _configured(self.path)
        with db:
            db.execute("BEGIN IMMEDIATE")  # tables begin no transaction by themselves
            for statement in _TABLES.split(";"):
                db.execute(statement)
            db.execute(
                "INSERT INTO outbox VALUES (?, ?, ?, 0)", (self.worker, self.rank, new_epoch())
            )
            if past:
                db.execute(
                    "INSERT INTO former VALUES (?, ?, ?)",
                    (past.epoch, past.last, msgspec.msgpack.encode(past.jobs)),
                )
            db.execute(f"PRAGMA user_version = {LAYOUT}")
        return db

    def _set_aside(self, damage: str, known: PastEpoch | None) -> None:
        suffix = time.strftime(".damaged-%Y%m%dT%H%M%S")
        for tail in ("", "-wal", "-shm"):
            part = self.path.with_name(self.path.name + tail)
            if part.exists():
                part.rename(part.with_name(part.name + suffix))
        report = (
            f"epoch {known.epoch} ended at {known.last}"
            if known
            else "its contents are unknown: its jobs will time out"
        )
        log.error(
            "outbox %s is damaged (%s): moved aside as *%s, and a new epoch starts; %s",
            self.path,
            damage,
            suffix,
            report,
        )

    def _rewrite_jobs(self) -> None:
        self._jobs.rewrite(self.epoch, self.last, self._held())

    def _held(self) -> NumberedJobs:
        """Return those of the receipts that are not acknowledged or still stored, including
        those that only the job log has.
        """
        known = self._jobs.read()
        logged = known.jobs if known and known.epoch == self.epoch else []
        held = {seq: job for seq, job in logged if self.acked < seq <= self.last}
        held.update(self._db.execute("SELECT seq, job FROM receipts"))
        return sorted(held.items())


def unique_jobs(numbered: NumberedJobs, first: int, last: int) -> list[str]:
    """Return the jobs with `first ≤ seq ≤ last`, each once, in order."""
    return list(dict.fromkeys(job for seq, job in sorted(numbered) if first <= seq <= last))


def _configured(path: Path) -> sqlite3.Connection:
    """Return a connection whose `with` block is one transaction, from its first change."""
    db = sqlite3.connect(path, isolation_level="IMMEDIATE", check_same_thread=False)
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
    except BaseException:
        db.close()
        raise
    return db


def _line(values: list[object] | tuple[object, ...]) -> bytes:
    return msgspec.json.encode(values) + b"\n"


def _write_all(fd: int, content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
