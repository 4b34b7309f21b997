"""How do blobs become durable? As files that are written aside, synced in groups and renamed, or appended to a segment.

A group costs two disk round trips however many blobs it holds: for files one sync of all contents before the renames and
one of all directories after them, for a segment one of the blobs and one of their manifest. Nothing is reported before the
second.
"""

import ctypes
import fcntl
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ...schemas.blobs import DTYPE_NAMES, encode_header
from ...schemas.captures import BlobEntry, Manifest
from ...schemas.faults import crash_point

Buffer = bytes | bytearray | memoryview
Line = bytes  # `Blob` has a field of that name

#: Up to this many files are synced one by one; above it one `syncfs` is cheaper than a journal commit for each file.
_SYNC_SINGLY = 4
#: `writev` takes at most this many buffers (Linux IOV_MAX).
_IOV_MAX = 1024
#: Blobs in a segment begin at multiples of this: each can be mapped alone, and a deleted one leaves no block half used.
SEGMENT_ALIGNMENT = 4096

_libc = ctypes.CDLL(None, use_errno=True)


class NotAtItsPathError(OSError):
    """A file that was written is not the one at its path: it was removed or replaced meanwhile. Written again, it would be."""


@dataclass(frozen=True)
class Blob:
    """The bytes of a whole safetensors file, as buffers in order."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    bytes: int
    crc32: int

    def line(self, file: str, offset: int = 0) -> "Line":
        """The line that describes it in the file beside."""
        return msgspec.json.encode(BlobEntry(file, offset, self.bytes, self.crc32, self.manifest)) + b"\n"


def make_blob(manifest: Manifest, tensors: Sequence[tuple[str, str, Sequence[int], Sequence[Buffer]]]) -> Blob:
    """`tensors`: (name, dtype, shape, C-contiguous little-endian buffers in order). Nothing is copied.

    Raises ValueError when a tensor's buffers do not add up to its shape.
    """
    described, body = [], []
    for name, dtype, shape, buffers in tensors:
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        described.append((name, DTYPE_NAMES[dtype], shape, sum(map(len, views))))
        body += views
    everything = [memoryview(encode_header(described, manifest)), *body]
    crc = 0
    for buffer in everything:
        crc = zlib.crc32(buffer, crc)
    return Blob(manifest, everything, sum(map(len, everything)), crc)


@dataclass(frozen=True)
class PendingFile:
    """A blob to be published as a file, with its `BlobEntry` beside it under the suffix `.json`."""

    path: str  # relative to the capture root
    blob: Blob


def publish(root: Path, files: Sequence[PendingFile]) -> None:
    """Write `files` under `root`; when this returns, contents and names are on disk.

    Raises OSError (disk full, read-only, removed meanwhile, …) or ValueError (a path that leaves `root`); then temporary files are
    removed, and what got its name already is whole but must not be reported.
    """
    written: list[tuple[Path, Path]] = []  # (temporary, final)
    try:
        for file in files:
            target = inside(root, file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            for path, parts in ((target, file.blob.buffers), (target.with_suffix(".json"), [file.blob.line(target.name)])):
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                written.append((temporary, path))
                _write_file(temporary, parts)
        _sync(root, [temporary for temporary, _ in written])
        crash_point("capture.written")
        identities = [_identity(os.stat(temporary)) for temporary, _ in written]
        for temporary, final in written:
            os.rename(temporary, final)
        crash_point("capture.renamed")
        _sync(root, _directories(root, [final for _, final in written]))
        for (_, final), identity in zip(written, identities, strict=True):
            _must_be_at(final, identity)
    except BaseException:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
        raise


@dataclass
class Segment:
    """A file `<path>` of many blobs, appended to by one thread of one process, and `<path with .jsonl>` that says where they lie.

    A line is written after its blob is synced, so a crash leaves at most bytes that no line names, or a torn last line. Such
    a file is never appended to again: every start of a process opens segments of its own.
    """

    root: Path
    path: str  # relative to `root`
    size: int = 0  # bytes so far
    usable: bool = True  # false once it is not certain what the disk holds: append no more
    _lines: int = 0  # bytes of the manifest so far
    _data: int = field(default=-1, repr=False)
    _index: int = field(default=-1, repr=False)

    def __post_init__(self) -> None:
        """Raises OSError; FileExistsError when there is such a segment."""
        target = inside(self.root, self.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        created = []
        try:
            # The manifest first, locked while this process may append: who deletes captures leaves both standing until then.
            self._index = os.open(target.with_suffix(".jsonl"), os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            created.append(target.with_suffix(".jsonl"))
            fcntl.flock(self._index, fcntl.LOCK_EX)
            self._data = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
            created.append(target)
            _sync(self.root, _directories(self.root, [target]))
        except BaseException:
            self.close()
            for path in created:
                path.unlink(missing_ok=True)
            raise

    def in_place(self) -> bool:
        """Whether both files are still those at their paths: other processes with write access can remove or replace them."""
        try:
            self._must_be_in_place()
        except OSError:
            return False
        return True

    def _must_be_in_place(self) -> None:
        target = inside(self.root, self.path)
        for path, descriptor in ((target, self._data), (target.with_suffix(".jsonl"), self._index)):
            _must_be_at(path, _identity(os.fstat(descriptor)))

    def append(self, blobs: Sequence[Blob]) -> list[int]:
        """Durable when this returns, in the files that are at the segment's paths; the offsets of the blobs.

        Raises OSError; then none of the group is in the segment, and `usable` says whether another may follow. NotAtItsPathError:
        a file was removed or replaced, and the group belongs into another segment.
        """
        offsets: list[int] = []
        parts: list[Buffer] = []
        lines, end = [], self.size
        name = PurePosixPath(self.path).name
        for blob in blobs:
            padding = -end % SEGMENT_ALIGNMENT
            parts += [bytes(padding), *blob.buffers]
            offsets.append(end + padding)
            lines.append(blob.line(name, end + padding))
            end += padding + blob.bytes
        index = memoryview(b"".join(lines))
        try:
            _write_at(self._data, parts, self.size)
            self._synced(self._data)
            crash_point("segment.written")
            _write_at(self._index, [index], self._lines)
            self._synced(self._index)
            crash_point("segment.indexed")
            self._must_be_in_place()
        except BaseException as error:
            self.usable = self.usable and not isinstance(error, NotAtItsPathError)
            self._take_back()
            raise
        self.size, self._lines = end, self._lines + len(index)
        return offsets

    def _synced(self, descriptor: int) -> None:
        try:
            os.fdatasync(descriptor)
        except OSError:
            self.usable = False  # the kernel may have dropped what it could not write, and will not say so twice
            raise

    def _take_back(self) -> None:
        """Cut off what a failed group left behind."""
        try:
            os.ftruncate(self._index, self._lines)
            os.ftruncate(self._data, self.size)
        except OSError:
            self.usable = False

    def close(self) -> None:
        for descriptor in (self._data, self._index):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._index = -1
        self.usable = False


def inside(root: Path, relative: str) -> Path:
    """`root / relative`. Raises ValueError for what would escape `root`."""
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"capture path {relative!r} is not inside the capture root")
    return root / pure


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _must_be_at(path: Path, identity: tuple[int, int]) -> None:
    """Raises NotAtItsPathError unless the file with this device and inode is at `path`."""
    try:
        found = _identity(os.stat(path))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotAtItsPathError(f"{path.name} was removed while it was written") from error
    if found != identity:
        raise NotAtItsPathError(f"{path.name} was replaced while it was written")


def _write_file(path: Path, buffers: Sequence[Buffer]) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        _write_at(descriptor, buffers, 0)
    finally:
        os.close(descriptor)


def _write_at(descriptor: int, buffers: Sequence[Buffer], offset: int) -> None:
    """All of `buffers`, one behind the other from `offset` on."""
    pending, first = [memoryview(buffer) for buffer in buffers if len(buffer)], 0
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
        for path in paths:
            _with_descriptor(path, os.fsync)


def _with_descriptor(path: Path, action: Any) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        action(descriptor)
    finally:
        os.close(descriptor)


def _syncfs(descriptor: int) -> None:
    if _libc.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"syncfs: {os.strerror(code)}")


def _directories(root: Path, files: Iterable[Path]) -> list[Path]:
    """Every directory from the files' parents up to `root` and root's own parent: a new entry may sit in each."""
    found: dict[Path, None] = {root: None, root.parent: None}
    for file in files:
        for parent in file.parents:
            if parent == root:
                break
            found[parent] = None
    return list(found)
