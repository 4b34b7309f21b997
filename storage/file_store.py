"""Artifacts in a local folder. Objects are written under temporary names, synced in groups and
renamed, or appended to a segment; readers map them into memory.

A group takes two syncs, however many objects it holds: for separate objects, one of all contents
before the renames and one of all directories after them; for a segment, one of the blobs and one of
their index. Receipts are sent only after the second.

The folder `.deleted/<name>` marks a name as deleted. To delete a folder `…/<name>/`, the store
first moves it there, so that its objects disappear together. The reader of a segment holds a shared
lock on it; the writer holds an exclusive lock on its index. Names that begin with a dot are not
listed.
"""

import ctypes
import errno
import os
import secrets
import shutil
import stat
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

from ..schemas.base.errors import MidstreamError, Translated
from ..schemas.jobs.captures import SEGMENT_SUFFIX, index_of
from ..schemas.settings.faults import crash_point
from .direct_write import LEAST, DirectWriter
from .disk import probe
from .store import Buffer, NotInPlaceError, check_key

#: `<root>/.deleted/<job>` exists from the beginning of the deletion of a job's captures until
#: nothing is left of them.
DELETED = ".deleted"
#: Up to this many files are synced one by one; for more, one `syncfs` is cheaper than a journal
#: commit for each file.
_SYNC_SINGLY = 4
#: `writev` takes at most this many buffers (Linux IOV_MAX).
_IOV_MAX = 1024
#: Bytes of a unit of `st_blocks`, and of a page: erased ranges are rounded up to whole pages if the
#: file system can release blocks.
_BLOCK = 512
_PAGE = 4096
#: Modes of fallocate(2).
_FALLOC_KEEP_SIZE = 1
_FALLOC_PUNCH_HOLE = 2
_PROT_READ = _MAP_SHARED = 1  # mmap(2)


def open_store(uri: str) -> "FileStore":
    """Open the store at `/folder`, `folder` or `file:///folder`."""
    return FileStore(
        Path(unquote(urlsplit(uri).path) if uri.startswith("file://") else uri).absolute()
    )


@dataclass(frozen=True)
class FileStore:
    """The store in the folder `root`."""

    root: Path

    @property
    def uri(self) -> str:
        return str(self.root)

    def prepare(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)

    def trouble(self) -> str:
        return probe(self.root)

    def used(self) -> int:
        """Return the bytes of allocated blocks: holes do not count. Files deleted meanwhile are
        left out.
        """
        total = 0
        folders = [self.root]
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

    def writer(self) -> "FileWriter":
        return FileWriter(self)

    def draft(self, key: str) -> "FileDraft | None":
        """Create a draft; None on file systems without unnamed files (`O_TMPFILE`)."""
        folder = self.path(key).parent
        folder.mkdir(parents=True, exist_ok=True)
        try:
            return FileDraft(os.open(folder, os.O_TMPFILE | os.O_RDWR, 0o644), adoptable=True)
        except OSError as error:
            if error.errno in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL):
                return None
            raise

    def segment(self, key: str) -> "FileSegment":
        return FileSegment(self, key)

    def open(self, key: str, hold: bool = True) -> "FileHandle":
        return FileHandle(self.path(key), lock=hold and key.endswith(SEGMENT_SUFFIX))

    def stat(self, key: str) -> int:
        path = self.path(key)
        status = path.stat()
        _must_be_regular(status, str(path))
        if not os.access(path, os.R_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return status.st_size

    def children(self, folder: str = "") -> list[str]:
        try:
            with os.scandir(self.path(folder) if folder else self.root) as entries:
                return sorted(
                    f"{folder}{entry.name}{'/' if entry.is_dir() else ''}"
                    for entry in entries
                    if not entry.name.startswith(".")
                )
        except (FileNotFoundError, NotADirectoryError):
            return []

    def check(self, key: str) -> None:
        if not self.path(key).resolve().is_relative_to(self.root.resolve()):
            raise ValueError(f"{key!r} is not inside the capture root")

    def link(self, key: str) -> str:
        return str(self.path(key))

    def delete(self, key: str) -> None:
        path = self.path(key)
        if not key.endswith("/"):
            path.unlink(missing_ok=True)
            return
        while path.is_dir():
            try:
                os.rename(
                    path, self._mark(path.name) / f"{path.parent.name}.{secrets.token_hex(8)}"
                )
            except FileNotFoundError:
                # another process moved the folder, or finished the deletion and removed the mark
                self.mark(path.name)
        self._clear(path.name, unmark=False)

    def erase(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        with _locked(self.path(key)) as descriptor:
            if descriptor is None:
                return False
            for offset, length in ranges:
                _punch(descriptor, offset, length)
            os.fdatasync(descriptor)
        return True

    def sealed(self, key: str) -> bool:
        with _locked(self.path(index_of(key))) as descriptor:
            return descriptor is not None

    def mark(self, name: str) -> None:
        if not self.root.is_dir():
            raise FileNotFoundError(f"there is no {self.root} on this machine")
        self._mark(name).parent.mkdir(exist_ok=True)
        with suppress(FileExistsError):  # marked before, or by another process just now
            self._mark(name).mkdir()

    def unmark(self, name: str) -> None:
        self._clear(name, unmark=True)

    def marked(self, name: str) -> bool:
        return self._mark(name).exists()

    def marks(self) -> list[str]:
        folder = self.root / DELETED
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def path(self, key: str) -> Path:
        """Return the path of a key. Raises ValueError if it would be outside the folder."""
        return self.root / check_key(key)

    def _mark(self, name: str) -> Path:
        return self.root / DELETED / name

    def _clear(self, name: str, unmark: bool) -> None:
        """Remove the contents of the mark's folder. Other processes may be doing the same, or still
        be moving something there.
        """
        trash = self._mark(name)
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


class FileHandle:
    """A file opened for reading; a segment is locked against `erase`."""

    def __init__(self, path: Path, lock: bool) -> None:
        self._path = path
        self._file = open(path, "rb", buffering=0, opener=_open_regular)  # noqa: SIM115
        try:
            if lock:
                # the lock is released with the last mapping of this open file
                _lock(self._file.fileno(), shared=True)
            status = os.fstat(self._file.fileno())
            self.size = status.st_size
            self.stamp = str(status.st_mtime_ns)
        except BaseException:
            self._file.close()
            raise

    def read(self, start: int, count: int) -> bytes:
        return _read_all(self._read, start, count)

    def _read(self, start: int, count: int) -> bytes:
        if sys.platform != "win32":
            return os.pread(self._file.fileno(), count, start)
        self._file.seek(start)
        return self._file.read(count)

    def view(self) -> memoryview:
        """Map the file, without keeping a descriptor.

        Raises MidstreamError("capture_failed") when it cannot be mapped.
        """
        if self.size == 0 or sys.platform == "win32":
            return memoryview(self.read(0, self.size))
        return _map(self._file.fileno(), self.size, self._path)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class FileWriter:
    """Files that are written under temporary names and renamed in `commit`."""

    def __init__(self, store: FileStore) -> None:
        self._store = store
        self._written: dict[str, tuple[Path, Path]] = {}  # key → (temporary, final)

    def append(self, key: str, buffers: Sequence[Buffer]) -> None:
        fresh = key not in self._written
        if fresh:
            temporary = self._begin(key)
            if sum(map(len, buffers)) >= LEAST and _direct().write(temporary, buffers):
                return
        descriptor = os.open(
            self._written[key][0], os.O_CREAT | os.O_WRONLY | (os.O_TRUNC if fresh else 0), 0o644
        )
        try:
            _write_at(descriptor, buffers, 0 if fresh else os.fstat(descriptor).st_size)
        finally:
            os.close(descriptor)

    def adopt(self, key: str, draft: "FileDraft") -> None:
        temporary = self._begin(key)
        temporary.unlink(missing_ok=True)
        draft.link(temporary)

    def _begin(self, key: str) -> Path:
        """Return the temporary file of a new object."""
        final = self._store.path(key)
        final.parent.mkdir(parents=True, exist_ok=True)
        temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
        self._written[key] = temporary, final
        return temporary

    def commit(self) -> None:
        written = list(self._written.values())
        root = self._store.root
        _sync(root, [temporary for temporary, _ in written])
        crash_point("capture.written")
        identities = [_identity(os.stat(temporary)) for temporary, _ in written]
        for temporary, final in written:
            os.rename(temporary, final)
        crash_point("capture.renamed")
        _sync(root, _directories(root, [final for _, final in written]))
        for (_, final), identity in zip(written, identities, strict=True):
            _must_be_at(final, identity)
        self._written.clear()

    def abort(self) -> None:
        for temporary, _ in self._written.values():
            temporary.unlink(missing_ok=True)
        self._written.clear()


class FileDraft:
    """A file without a name, which the system removes when it is closed or the process ends."""

    def __init__(self, descriptor: int, *, adoptable: bool) -> None:
        """Take over the descriptor, which is closed when the draft is dropped. `adoptable`: the
        file can be given a name.
        """
        self._descriptor = descriptor
        self.adoptable = adoptable
        weakref.finalize(self, os.close, descriptor)

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        # Through the page cache: parts of streams are small, and not aligned for direct writes.
        _write_at(self._descriptor, buffers, offset)

    def read(self, start: int, count: int) -> bytes:
        data = _read_all(lambda at, rest: os.pread(self._descriptor, rest, at), start, count)
        if missing := count - len(data):
            raise OSError(errno.EIO, f"the file ends at {start + len(data)}, {missing} bytes early")
        return data

    def view(self) -> memoryview:
        size = os.fstat(self._descriptor).st_size
        return _map(self._descriptor, size, Path("rows of a capture")) if size else memoryview(b"")

    def truncate(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)

    def link(self, path: Path) -> None:
        """Give the file a name. Raises OSError."""
        # A file without a name gets one only once: a commit that is tried again reads its bytes.
        self.adoptable = False

        def create(folder: int) -> None:
            # With `dst_dir_fd`, Python calls linkat(2), which follows the link in /proc; link(2)
            # does not.
            os.link(
                f"/proc/self/fd/{self._descriptor}",
                path.name,
                dst_dir_fd=folder,
                follow_symlinks=True,
            )

        _with_descriptor(path.parent, create)


_per_thread = threading.local()


def _direct() -> DirectWriter:
    """Return this thread's direct writer."""
    if not hasattr(_per_thread, "direct"):
        _per_thread.direct = DirectWriter(_write_at)
    writer: DirectWriter = _per_thread.direct
    return writer


def scratch(folder: Path) -> FileDraft:
    """Create a draft that no store can adopt, for spilled rows. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
        return FileDraft(os.dup(file.fileno()), adoptable=False)


class FileSegment:
    """A file of many blobs, appended to, and the index of their places.

    An index line is written after its blob is synced, so a crash leaves at most bytes that no line
    describes, or an incomplete last line. Such a file is never appended to again, because each
    process creates new segments.
    """

    def __init__(self, store: FileStore, key: str) -> None:
        self.key = key
        self.size = 0
        self._lines = 0  # bytes of the index so far
        self._doubtful = False  # the content on the disk is uncertain
        self._paths = store.path(key), store.path(index_of(key))
        self._data = self._index = -1
        target, index = self._paths
        target.parent.mkdir(parents=True, exist_ok=True)
        created = []
        try:
            # Create the index first, and keep it locked while this process may append: deletions
            # remove neither file while the index is locked.
            self._index = os.open(index, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            created.append(index)
            _lock(self._index, shared=False)
            self._data = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            created.append(target)
            _sync(store.root, _directories(store.root, [target]))
        except BaseException:
            self.close()
            for path in created:
                path.unlink(missing_ok=True)
            raise

    @property
    def usable(self) -> bool:
        """Return whether a group can be appended: false if another process has removed or replaced
        the segment's files, or if their content is uncertain.
        """
        if self._doubtful or self._data < 0:
            return False
        try:
            self._must_be_in_place()
        except OSError:
            return False
        return True

    def append(self, data: Sequence[Buffer], index: bytes) -> None:
        end = self.size + sum(map(len, data))
        try:
            _write_at(self._data, data, self.size)
            self._sync(self._data)
            crash_point("segment.written")
            _write_at(self._index, [index], self._lines)
            self._sync(self._index)
            crash_point("segment.indexed")
            self._must_be_in_place()
        except BaseException as error:
            self._doubtful = self._doubtful or isinstance(error, NotInPlaceError)
            self._take_back()
            raise
        self.size = end
        self._lines += len(index)

    def close(self) -> None:
        for descriptor in (self._data, self._index):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._index = -1

    def _must_be_in_place(self) -> None:
        for path, descriptor in zip(self._paths, (self._data, self._index), strict=True):
            _must_be_at(path, _identity(os.fstat(descriptor)))

    def _sync(self, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError:
            # the kernel may have dropped the pages that it could not write, and reports the error
            # only once
            self._doubtful = True
            raise

    def _take_back(self) -> None:
        """Cut off the bytes of a failed group."""
        try:
            os.ftruncate(self._index, self._lines)
            os.ftruncate(self._data, self.size)
        except OSError:
            self._doubtful = True


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [
        ctypes.c_void_p,
        ctypes.c_size_t,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int,
        ctypes.c_int64,
    ]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return libc


def _map(descriptor: int, size: int, path: Path) -> memoryview:
    """Map a file with mmap(2) directly: Python's `mmap` keeps a descriptor for each mapping, of
    which there may be thousands.
    """
    libc = _libc()
    address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise MidstreamError(
            "capture_failed",
            f"{path} cannot be mapped ({os.strerror(code)}): read fewer requests at a time",
        )
    buffer = (ctypes.c_ubyte * size).from_address(address)
    release = weakref.finalize(buffer, libc.munmap, address, size)  # views refer to the buffer
    # do not unmap at exit: views may still be in use, and the system unmaps when the process ends
    release.atexit = False
    return memoryview(buffer).cast("B").toreadonly()


def _lock(descriptor: int, shared: bool, wait: bool = True) -> None:
    """Lock a file. Raises BlockingIOError if it is locked and `wait` is false."""
    import fcntl  # not on Windows, where captures are read but not served

    fcntl.flock(
        descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB)
    )


@contextmanager
def _locked(path: Path) -> Iterator[int | None]:
    """Yield a descriptor of the exclusively locked file, or None if another process holds a
    lock.
    """
    descriptor = os.open(path, os.O_RDWR)
    try:
        try:
            _lock(descriptor, shared=False, wait=False)
        except BlockingIOError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _punch(descriptor: int, offset: int, length: int) -> None:
    """Make a range read as zeros: release its blocks, or write zeros if the file system cannot."""
    if (
        _libc().fallocate(
            descriptor, _FALLOC_KEEP_SIZE | _FALLOC_PUNCH_HOLE, offset, length + -length % _PAGE
        )
        == 0
    ):
        return
    code = ctypes.get_errno()
    if code != errno.EOPNOTSUPP:
        raise OSError(code, f"fallocate: {os.strerror(code)}")
    os.pwrite(descriptor, bytes(length), offset)


def _blocks(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_blocks
    except FileNotFoundError:
        return 0


def _open_regular(path: str, flags: int) -> int:
    """Open a regular file. Rejects other kinds, such as a FIFO, which could block or never end."""
    descriptor = os.open(path, flags | getattr(os, "O_NONBLOCK", 0))
    try:
        _must_be_regular(os.fstat(descriptor), path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _must_be_regular(status: os.stat_result, path: str) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", path)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _must_be_at(path: Path, identity: tuple[int, int]) -> None:
    """Check that the file at `path` has this device and inode. Raises NotInPlaceError."""
    with Translated(
        (FileNotFoundError, NotADirectoryError),
        lambda error: NotInPlaceError(f"{path.name} was deleted while being written"),
    ):
        result = _identity(os.stat(path))
    if result != identity:
        raise NotInPlaceError(f"{path.name} was replaced while being written")


def _read_all(read: Callable[[int, int], bytes], start: int, count: int) -> bytes:
    """Read the bytes `[start, start + count)` with as many calls of `read` as needed; fewer at the
    file's end.
    """
    parts = []
    while count > 0 and (part := read(start, count)):
        parts.append(part)
        start += len(part)
        count -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _write_at(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all of `buffers` contiguously from `offset` on."""
    pending = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first = 0
    while first < len(pending):
        count = os.pwritev(descriptor, pending[first : first + _IOV_MAX], offset)
        offset += count
        while first < len(pending) and count >= len(pending[first]):
            count -= len(pending[first])
            first += 1
        if count:
            pending[first] = pending[first][count:]


def _sync(root: Path, paths: Sequence[Path]) -> None:
    """Make files or directories durable: one by one when few, the whole file system when many."""
    if len(paths) > _SYNC_SINGLY:
        _with_descriptor(root, _syncfs)
    else:
        sync(*paths)


def sync(*paths: Path) -> None:
    """Make contents of files and entries of directories durable, one by one."""
    for path in paths:
        _with_descriptor(path, os.fsync)


def _with_descriptor(path: Path, action: Callable[[int], Any]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        action(descriptor)
    finally:
        os.close(descriptor)


def _syncfs(descriptor: int) -> None:
    if _libc().syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"syncfs: {os.strerror(code)}")


def _directories(root: Path, files: Iterable[Path]) -> list[Path]:
    """Return every directory from the files' parents up to `root`, and root's parent, since each
    may have a new entry to sync.
    """
    directories: dict[Path, None] = {root: None, root.parent: None}
    for file in files:
        for parent in file.parents:
            if parent == root:
                break
            directories[parent] = None
    return list(directories)
