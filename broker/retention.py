"""How much do captures take, and how are they removed so that a reader gets all that a job has or is told that it is gone?

Deleting a job's captures: the ledger is told first (`Ledger.forget_captures`); then `.deleted/<job>` appears in the capture root,
which is the moment that readers of files go by; then the job's folders are moved there and removed, and its blobs in
segments become holes. A reader has locked the segments that it reads; those are emptied in a later sweep.
"""

import ctypes
import errno
import fcntl
import os
import shutil
import threading
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ..schemas.blobs import read_entries
from ..schemas.captures import DELETED, SEGMENTS
from ..schemas.errors import MidstreamError

#: The space taken is measured again after this many seconds, or sooner when it seems used up; and not all the time in a large tree.
MEASURE_S, MEASURE_FULL_S = 30.0, 1.0
MEASURE_SHARE = 20
_BLOCK = 512  # bytes: the unit of st_blocks
_ALIGNMENT = 4096  # of blobs in a segment
_FALLOC_KEEP_SIZE, _FALLOC_PUNCH_HOLE = 1, 2  # fallocate(2)

_libc = ctypes.CDLL(None, use_errno=True)


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
                        total += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
        except FileNotFoundError:
            continue
    return total


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

    def take(self, sizes: Iterable[int]) -> None:
        """These bytes are about to be written. Raises MidstreamError("quota_exceeded") when there is no room for them."""
        if not self._quota:
            return
        with self._lock:
            wanted = sum(sizes)
            self._measure(self._due)
            if self._used + wanted > self._quota:
                self._measure(self._due_if_full)
            if self._used + wanted > self._quota:
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


def unfinished(root: Path) -> list[str]:
    """The jobs whose captures are being deleted, or were when that was interrupted."""
    folder = root / DELETED
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def delete(root: Path, jobs: Collection[str]) -> list[str]:
    """Remove everything that `jobs` captured under `root`; may be repeated. Returns the jobs of which nothing is left.

    Of the others something is being read: call again later. Raises OSError.
    """
    if not jobs or not root.is_dir():
        return list(jobs)
    for job in jobs:
        trash = root / DELETED / job
        trash.mkdir(parents=True, exist_ok=True)
    tags = [path for path in root.iterdir() if path.is_dir() and path.name != DELETED]
    for tag in tags:
        for job in jobs:
            _move_away(tag / job, root / DELETED / job)
    busy: set[str] = set()
    for tag in tags:
        for index in sorted((tag / SEGMENTS).glob("*.jsonl")):
            busy |= _empty(index, frozenset(jobs))
    done = [job for job in jobs if job not in busy]
    for job in done:
        shutil.rmtree(root / DELETED / job)
    return done


def _move_away(folder: Path, trash: Path) -> None:
    number = 0
    while folder.is_dir():
        try:
            os.rename(folder, trash / f"{folder.parent.name}.{number}")
        except FileNotFoundError:  # another process deletes it as well
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
            number += 1  # what an interrupted deletion moved there


def _empty(index: Path, jobs: frozenset[str]) -> set[str]:
    """Make holes of the jobs' blobs in a segment, and remove it when nothing is left in it. Returns the jobs still there."""
    segment = index.with_suffix(".seg")
    try:
        entries = list(read_entries(index, jobs))
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


def _is_dead(index: Path, segment: int) -> bool:
    """Whether a segment had blobs and all of them were deleted."""
    empty = True
    for entry in read_entries(index):
        empty = False
        if os.pread(segment, 8, entry.offset) != bytes(8):
            return False
    return not empty


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
