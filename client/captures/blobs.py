"""Which blobs does a source hold, and how are they opened so that they stay whole while they are read?

A file stays readable once it is mapped, whatever becomes of its name. Blobs of deleted jobs in a segment are overwritten by
zeros: who reads a segment locks it, and whoever deletes waits for that. Deleting begins with `.deleted/<job>`; looking there *after*
everything was opened tells whether everything was.
"""

import ctypes
import os
import sys
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from ...schemas.blobs import DamagedBlob, DeletedBlob, Header, read_entries, read_header
from ...schemas.captures import DELETED, SEGMENTS, BlobEntry
from ...schemas.dtypes import DTYPE_OF_FILE, DTYPES, widened
from ...schemas.errors import MidstreamError

_PROT_READ = _MAP_SHARED = 1  # mmap(2)


@dataclass(frozen=True)
class Place:
    """Where a blob lies: a file, or a part of one."""

    path: Path
    offset: int = 0
    bytes: int | None = None  # null: up to the file's end
    crc32: int | None = None  # as somebody promised; null: the file beside says it
    if_there: bool = False  # leave it out when it was deleted: nobody said whose blob it is


class _Promise(msgspec.Struct):
    """What is needed of the file beside."""

    bytes: int
    crc32: int


class Blob:
    """One blob, opened. Raises MidstreamError: `gone` when it was deleted, `capture_damaged` when it is not what was written."""

    def __init__(self, place: Place, data: memoryview, checked: bool = False):
        """`data`: the bytes of the blob; read-only. `checked`: no CRC32 of it is known, or it was compared already."""
        self.place = place
        self._data = data
        self._checked = checked
        try:
            self.header: Header = read_header(lambda start, count: bytes(data[start : start + count]), len(data))
        except DeletedBlob as error:
            if place.path.suffix == ".seg":
                raise gone(place.path) from error
            raise _damaged(place.path, "it begins with zeros") from error
        except DamagedBlob as error:
            raise _damaged(place.path, str(error)) from error
        if self.header.end != len(data):
            more = f"{len(data)} bytes, of which its first blob has {self.header.end}"
            raise _damaged(place.path, f"it is not a whole blob: it has {more}")

    def raw(self, name: str) -> np.ndarray:
        """The tensor as it lies in the file, read-only and not copied; bfloat16 as uint16.

        With the first tensor that is read the whole blob is compared with its CRC32, where that is known. Raises
        MidstreamError("capture_damaged").
        """
        if not self._checked:
            promised = self.promised()
            if promised not in (None, (self.size, self.crc32())):
                raise _damaged(self.place.path, f"{self.size} bytes with CRC32 {self.crc32():08x} are not what was written")
            self._checked = True
        return self.unchecked(name)

    def unchecked(self, name: str) -> np.ndarray:
        """As `raw`, without the check of the CRC32."""
        tensor = self.header.tensors[name]
        dtype = np.dtype(DTYPES[DTYPE_OF_FILE[tensor.dtype]].raw)
        return np.frombuffer(self._data, dtype, count=tensor.length // dtype.itemsize, offset=tensor.start).reshape(tensor.shape)

    def array(self, name: str) -> np.ndarray:
        """The tensor as a float32 copy of its own, bfloat16 widened exactly."""
        raw = self.raw(name)
        return np.array(widened(raw, DTYPE_OF_FILE[self.header.tensors[name].dtype]), dtype=np.float32)

    @property
    def size(self) -> int:
        return len(self._data)

    def crc32(self) -> int:
        return zlib.crc32(self._data)

    def promised(self) -> tuple[int, int] | None:
        """(bytes, CRC32) as they were when the blob was written; None when nobody says."""
        place = self.place
        if place.bytes is not None and place.crc32 is not None:
            return place.bytes, place.crc32
        try:
            told = msgspec.json.decode(place.path.with_suffix(".json").read_bytes(), type=_Promise)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise MidstreamError("capture_damaged", f"the manifest beside {place.path} cannot be read: {error}") from error
        return told.bytes, told.crc32


def gone(what: Path | str) -> MidstreamError:
    return MidstreamError("gone", f"{what} was deleted")


def _damaged(path: Path, why: str) -> MidstreamError:
    return MidstreamError("capture_damaged", f"{path} is damaged: {why}")


def find(source: Path, job: str | None, tag: str | None) -> list[Place]:
    """The blobs in a folder, those of segments included: a job's folder, or with `job` a tag's folder or the capture root.

    Raises MidstreamError for a manifest that cannot be read.
    """
    if source.is_file():
        return expand([Place(source)], job)
    if job is None:  # a job's folder, which there is not if everything is in segments; or one with downloaded files
        return _loose(source) + list(_in_segments(source.parent, source.name))
    folders = [source, *(path for path in _listed(source) if path.is_dir() and path.name != DELETED)]
    if tag is not None:
        folders = [source / tag, *(folder for folder in folders if folder.name == tag)]
    return [place for folder in dict.fromkeys(folders) for place in (*_loose(folder / job), *_in_segments(folder, job))]


def expand(places: Iterable[Place], job: str | None) -> list[Place]:
    """`places`, and instead of whole segments the blobs in them: those of `job`, or those that were not deleted.

    Raises MidstreamError for a segment whose manifest is missing or cannot be read.
    """
    found: list[Place] = []
    for place in places:
        if place.path.suffix != ".seg" or place.bytes is not None:
            found.append(place)
            continue
        index = place.path.with_suffix(".jsonl")
        try:
            found += _of_segment(index, job)
        except FileNotFoundError as error:
            if not place.path.exists():
                raise gone(place.path) from error
            raise MidstreamError("capture_failed", f"{index} is missing: without it nobody knows whose blobs {place.path} holds") from error
    return list(dict.fromkeys(found))


def _listed(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _loose(folder: Path) -> list[Place]:
    return [Place(path) for path in _listed(folder) if path.suffix == ".safetensors" and not path.name.startswith(".")]


def _in_segments(tag: Path, job: str) -> Iterator[Place]:
    for index in _listed(tag / SEGMENTS):
        if index.suffix != ".jsonl":
            continue
        try:
            yield from _of_segment(index, job)
        except FileNotFoundError:  # removed since it was listed, so nothing of this job is left in it
            continue


def _of_segment(index: Path, job: str | None) -> list[Place]:
    try:
        entries: list[BlobEntry] = list(read_entries(index, None if job is None else {job}))
    except DamagedBlob as error:
        raise _damaged(index, str(error)) from error
    return [Place(index.with_name(entry.file), entry.offset, entry.bytes, entry.crc32, if_there=job is None) for entry in entries]


def open_blobs(places: Iterable[Place]) -> list[Blob]:
    """All of them, or MidstreamError("gone") when one was deleted before it could be opened, ("capture_damaged") for a damaged one."""
    maps: dict[Path, memoryview] = {}
    blobs: list[Blob] = []
    deleted: Path | None = None
    try:
        for place in places:
            if place.path not in maps:
                maps[place.path] = _mapped(place.path)
            end = len(maps[place.path]) if place.bytes is None else place.offset + place.bytes
            if end > len(maps[place.path]):
                raise _damaged(place.path, f"it is cut short: {len(maps[place.path])} bytes of {end}")
            try:
                blobs.append(Blob(place, maps[place.path][place.offset : end]))
            except MidstreamError as error:
                if error.kind != "gone" or not place.if_there:
                    raise
                deleted = place.path
        if deleted is not None and not blobs:
            raise gone(deleted)
        for job, root in {(blob.header.manifest.job, root) for blob in blobs if (root := _root_of(blob.place.path))}:
            if (root / DELETED / job).exists():
                raise gone(f"what job {job} captured")
    except BaseException:
        blobs.clear()  # not kept, with their locks, by whoever keeps the exception
        maps.clear()
        raise
    return blobs


def _root_of(path: Path) -> Path | None:
    """The capture root of `<root>/<tag>/<job>/<file>` or `<root>/<tag>/segments/<file>`."""
    parents = path.absolute().parents
    return parents[2] if len(parents) > 2 else None


def _mapped(path: Path) -> memoryview:
    """The file's bytes, read-only: mapped, without keeping a descriptor. A segment is locked for as long as it is mapped."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    except FileNotFoundError as error:
        raise gone(path) from error
    try:
        if path.suffix == ".seg":
            import fcntl

            fcntl.flock(descriptor, fcntl.LOCK_SH)  # released with the last mapping of this open file
        size = os.fstat(descriptor).st_size
        if size == 0:
            return memoryview(b"")
        if sys.platform == "win32":
            return memoryview(path.read_bytes())
        return _map(descriptor, size, path)
    finally:
        os.close(descriptor)


def _map(descriptor: int, size: int, path: Path) -> memoryview:
    """mmap(2) itself: Python's `mmap` keeps a descriptor for each mapping, and there may be thousands."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    address = libc.mmap(None, size, _PROT_READ, _MAP_SHARED, descriptor, 0)
    if address == ctypes.c_void_p(-1).value:
        code = ctypes.get_errno()
        raise MidstreamError("capture_failed", f"{path} cannot be mapped ({os.strerror(code)}): read fewer requests at once")
    buffer = (ctypes.c_ubyte * size).from_address(address)
    release = weakref.finalize(buffer, libc.munmap, address, size)  # views refer to the buffer
    release.atexit = False  # the end of the program is not the end of the views: the system unmaps when nothing runs any more
    return memoryview(buffer).cast("B").toreadonly()
