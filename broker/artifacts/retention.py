"""How much do captures take, and how are they removed so that a reader gets all that a job has or is told that it is gone?

Deleting a job's captures: the ledger is told first (`forget_captures`); then `.deleted/<job>`, the mark, appears in the capture
root, which is the moment that readers of files go by; then the job's folders are moved there and removed, and its blobs in
segments become holes. A reader has locked the segments that it reads; those are emptied in a later sweep. The mark stays, and
all of this is repeated, for as long as somebody may still be writing for the job: see `captures`. Several may delete at once.
"""

import ctypes
import errno
import fcntl
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ...schemas.blobs import DamagedBlob, read_entries
from ...schemas.captures import DELETED, SEGMENTS, BlobEntry
from ...schemas.errors import MidstreamError

log = logging.getLogger(__name__)

#: The space taken is measured again after this many seconds, or sooner when it seems used up; and not all the time in a large tree.
MEASURE_S, MEASURE_FULL_S = 30.0, 1.0
MEASURE_SHARE = 20
_BLOCK = 512  # bytes: the unit of st_blocks
_ALIGNMENT = 4096  # of blobs in a segment
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2  # fallocate(2)

_libc = ctypes.CDLL(None, use_errno=True)
_told: set[Path] = set()  # segments whose damage was logged


def used_bytes(root: Path) -> int:
    """Bytes on disk of everything in `root`; holes count as nothing. What vanishes meanwhile is left out."""
    total, folders = 0, [root]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        total += _blocks(entry) * _BLOCK
        except FileNotFoundError:
            continue
    return total


def _blocks(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks
    except FileNotFoundError:
        return 0


class Usage:
    """The space that captures take, against their quota. May be shared by threads; each process measures for itself."""

    def __init__(self, root: Path, quota: int) -> None:
        """`quota`: bytes; 0: none, and then nothing is ever measured."""
        self._root = root
        self._quota = quota
        self._lock = threading.Lock()
        self._used = 0
        self._due = 0.0
        self._due_if_full = 0.0

    def take(self, sizes: Iterable[int], spare: int = 0) -> None:
        """These bytes are about to be written, and `spare` more are to stay free.

        Raises MidstreamError("quota_exceeded") when there is no room for them.
        """
        if not self._quota:
            return
        with self._lock:
            wanted = sum(sizes)
            self._measure(self._due)
            if self._used + wanted + spare > self._quota:
                self._measure(self._due_if_full)
            if self._used + wanted + spare > self._quota:
                raise MidstreamError(
                    "quota_exceeded",
                    f"captures take {self._used >> 20} MiB of the {self._quota >> 20} MiB that they may (capture_quota_mib)",
                    allowed="delete captures, or raise the quota",
                )
            self._used += wanted

    def _measure(self, due: float) -> None:
        start = time.monotonic()
        if start < due:
            return
        self._used = used_bytes(self._root)
        end = time.monotonic()
        self._due_if_full = end + max(MEASURE_FULL_S, MEASURE_SHARE * (end - start))
        self._due = end + max(MEASURE_S, MEASURE_SHARE * (end - start))


def gone(job: str) -> MidstreamError:
    return MidstreamError("gone", f"the captures of job {job} were deleted")


class RemovalError(OSError):
    """Something could not be removed, everything else was. `done`: the jobs of which nothing is left."""

    def __init__(self, message: str, done: list[str]) -> None:
        super().__init__(message)
        self.done = done


def unfinished(root: Path) -> list[str]:
    """The jobs that are marked: their captures are being deleted, or were when that was interrupted."""
    folder = root / DELETED
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def delete(root: Path, jobs: Collection[str], keep: Collection[str] = ()) -> list[str]:
    """Remove everything that `jobs` captured under `root`; may be repeated. Returns the jobs of which nothing is left.

    Of the others something is being read: call again later. The jobs in `keep` stay marked: what may yet be written for them
    is shown to nobody. Raises RemovalError after it has done what could be done; OSError when that is nothing.
    """
    if not jobs:
        return []
    if not root.is_dir():
        raise RemovalError(f"there is no {root} here, so nothing was removed: that is done where the files are", [])
    failed: dict[str, OSError] = {}
    for job in jobs:
        with _noted(failed, [job]):
            _mark(root / DELETED / job)
    marked = [job for job in jobs if job not in failed]
    tags = [path for path in root.iterdir() if path.is_dir() and path.name != DELETED]
    for job in marked:
        with _noted(failed, [job]):
            for tag in tags:
                _move_away(tag / job, root / DELETED / job)
    busy: set[str] = set()
    for tag in tags:
        for index in sorted((tag / SEGMENTS).glob("*.jsonl")):
            with _noted(failed, marked):
                busy |= _empty(index, frozenset(marked))
    for job in marked:
        with _noted(failed, [job]):
            _clear(root / DELETED / job, unmark=job not in failed and job not in busy and job not in keep)
    done = [job for job in jobs if job not in failed and job not in busy]
    if failed:
        job, first = next(iter(failed.items()))
        raise RemovalError(f"{len(failed)} of {len(jobs)} jobs, {job} the first: {first}", done)
    return done


@contextmanager
def _noted(failed: dict[str, OSError], jobs: Iterable[str]) -> Iterator[None]:
    """An error concerns `jobs` alone: the others are gone on with."""
    try:
        yield
    except OSError as error:
        for job in jobs:
            failed.setdefault(job, error)


def _mark(trash: Path) -> None:
    trash.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError):  # marked before, or by another process just now
        trash.mkdir()


def _move_away(folder: Path, trash: Path) -> None:
    while folder.is_dir():
        try:
            os.rename(folder, trash / f"{folder.parent.name}.{secrets.token_hex(8)}")
        except FileNotFoundError:  # another process has moved it, or it was done with the job and has taken the mark away
            _mark(trash)


def _clear(trash: Path, unmark: bool) -> None:
    """Remove what was moved there; others may be doing that as well, or still be moving something there."""
    while True:
        try:
            for path in trash.iterdir():
                shutil.rmtree(path)
            if unmark:
                trash.rmdir()
            return
        except FileNotFoundError:
            if not trash.is_dir():
                return
        except OSError as error:
            if error.errno != errno.ENOTEMPTY:
                raise


def _empty(index: Path, jobs: frozenset[str]) -> set[str]:
    """Make holes of the jobs' blobs in a segment, and remove it when nothing is left in it. Returns the jobs still there."""
    segment = index.with_suffix(".seg")
    try:
        entries = _entries(index, jobs)
        if entries:
            with _locked(segment) as descriptor:
                if descriptor is None:
                    return {entry.manifest.job for entry in entries}
                for entry in entries:
                    _punch(descriptor, entry.offset, entry.bytes)
                os.fdatasync(descriptor)
        # Locked by the writer for as long as it may append. (One that has lines has been locked since before the first.)
        with _locked(index) as closed, segment.open("rb") as blobs:
            if closed is not None and _is_dead(index, blobs.fileno()):
                segment.unlink()
                index.unlink()
    except FileNotFoundError:  # another process has removed it
        pass
    return set()


def _entries(index: Path, jobs: frozenset[str]) -> list[BlobEntry]:
    """Of the jobs. A line that is damaged hides what follows it from those that it names, and from nobody else."""
    found = []
    try:
        for entry in read_entries(index, jobs):
            found.append(entry)
    except DamagedBlob as error:
        if len(jobs) > 1:
            return [entry for job in jobs for entry in _entries(index, frozenset([job]))]
        _tell_damage(index, error)
    return found


def _is_dead(index: Path, segment: int) -> bool:
    """Whether a segment had blobs and all of them were deleted. One with a damaged line is left alone."""
    empty = True
    try:
        for entry in read_entries(index):
            empty = False
            if os.pread(segment, 8, entry.offset) != bytes(8):
                return False
    except DamagedBlob as error:
        _tell_damage(index, error)
        return False
    return not empty


def _tell_damage(index: Path, error: DamagedBlob) -> None:
    """Once per process: the same segment is looked at in every deletion."""
    if index not in _told:
        _told.add(index)
        log.error("%s is damaged, what it does not name is left on the disk: %s", index, error)


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """A descriptor, or None when somebody else holds the lock."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _punch(descriptor: int, offset: int, length: int) -> None:
    """Give a blob's blocks back: it reads as zeros from now on. Where the file system cannot, zeros are written."""
    whole = length + -length % _ALIGNMENT
    mode = ctypes.c_int(_FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE)
    if _libc.fallocate(descriptor, mode, ctypes.c_int64(offset), ctypes.c_int64(whole)) == 0:
        return
    code = ctypes.get_errno()
    if code != errno.EOPNOTSUPP:
        raise OSError(code, f"fallocate: {os.strerror(code)}")
    os.pwrite(descriptor, bytes(length), offset)
