"""Finds the blobs of a source in a store, and opens them so that they stay intact while read.

An opened blob stays readable, even after its key is deleted. In a segment, the blobs of deleted
jobs are overwritten with zeros, but not while a reader holds the segment open. A deletion first
writes a mark. If there is no mark *after* all blobs were opened, none was deleted before.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from zlib_ng import zlib_ng

from ...schemas.base.dtypes import DTYPE_OF_FILE, DTYPES, widened
from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.jobs.captures import SEGMENT_SUFFIX, index_of
from ...storage.blobs import indices, read_entries
from ...storage.formats.capture_blobs import DamagedBlob, DeletedBlob, Header, read_header
from ...storage.store import ArtifactStore, open_store


@dataclass(frozen=True)
class BlobLocation:
    """Location of a blob: an object of a store, or part of it; without a store, bytes in memory."""

    store: ArtifactStore | None
    key: str
    offset: int = 0
    bytes: int | None = None  # None: up to the file's end
    crc32: int | None = None  # as recorded at writing; None: read it from the file next to the blob
    skip_if_deleted: bool = False  # true where the owner of the blob is unknown

    @property
    def path(self) -> Path:
        """Path of the object in a local store; its key in a bucket."""
        link = self.store and self.store.link(self.key)
        return Path(link if link and "://" not in link else self.key)

    @property
    def in_segment(self) -> bool:
        return self.key.endswith(SEGMENT_SUFFIX)


def at(file: Path | str | BlobLocation) -> BlobLocation:
    """Return the place of a local file as an object of the capture root:
    `<root>/<tag>/<job>/<file>` or `<root>/<tag>/segments/<file>`; a place as it is.
    """
    return file if isinstance(file, BlobLocation) else BlobLocation(*_within(Path(file), 3))


def _within(path: Path, depth: int) -> tuple[ArtifactStore, str]:
    """Return the store that is `depth` levels above `path`, and the key of `path` in it."""
    parts = (path.resolve() if ".." in path.parts else path.absolute()).parts
    cut = max(len(parts) - depth, 1)
    return open_store(Path(*parts[:cut])), "/".join(parts[cut:])


class _Recorded(msgspec.Struct):
    """Size and checksum of a blob, as the file next to it records them."""

    bytes: int
    crc32: int


class BlobReader:
    """An open blob.

    Raises MidstreamError: `gone` if it was deleted, `capture_damaged` if its bytes are not those
    written.
    """

    def __init__(self, place: BlobLocation, data: memoryview):
        """`data`: the bytes of the blob; read-only."""
        self.place = place
        self._data = data
        self._checked = False
        try:
            self.header: Header = read_header(
                lambda start, count: bytes(data[start : start + count]), len(data)
            )
        except DeletedBlob as error:
            if place.in_segment:
                raise gone(place.path) from error
            raise _damaged(place.path, "it begins with zeros") from error
        except DamagedBlob as error:
            raise _damaged(place.path, str(error)) from error
        if self.header.end != len(data):
            more = f"{len(data)} bytes, but the first blob has {self.header.end}"
            raise _damaged(place.path, f"it is not a complete blob: it has {more}")

    def raw(self, name: str) -> np.ndarray:
        """Return the tensor as stored in the file, read-only and not copied; bfloat16 as uint16.

        The first call compares the whole blob with its CRC32, if that is known. Raises
        MidstreamError("capture_damaged").
        """
        if not self._checked:
            recorded = self.recorded()
            if recorded is not None and recorded != (self.size, self.crc32()):
                raise _damaged(
                    self.place.path,
                    f"{self.size} bytes with CRC32 {self.crc32():08x} are not the data written",
                )
            self._checked = True
        return self.unchecked(name)

    def unchecked(self, name: str) -> np.ndarray:
        """Return the tensor as `raw` does, without comparing the CRC32."""
        tensor = self.header.tensors[name]
        dtype = np.dtype(DTYPES[DTYPE_OF_FILE[tensor.dtype]].raw)
        return np.frombuffer(
            self._data, dtype, count=tensor.length // dtype.itemsize, offset=tensor.start
        ).reshape(tensor.shape)

    def array(self, name: str) -> np.ndarray:
        """Return a float32 copy of the tensor, bfloat16 widened exactly."""
        raw = self.raw(name)
        return np.array(
            widened(raw, DTYPE_OF_FILE[self.header.tensors[name].dtype]), dtype=np.float32
        )

    @property
    def size(self) -> int:
        return len(self._data)

    def crc32(self) -> int:
        return zlib_ng.crc32(self._data)

    def recorded(self) -> tuple[int, int] | None:
        """Return (bytes, CRC32) as recorded when the blob was written; None if unknown."""
        place = self.place
        if place.bytes is not None and place.crc32 is not None:
            return place.bytes, place.crc32
        if place.store is None:
            return None
        try:
            with place.store.open(index_of(place.key)) as handle:
                report = msgspec.json.decode(handle.read(0, handle.size), type=_Recorded)
        except FileNotFoundError:
            return None
        except msgspec.DecodeError as error:
            raise MidstreamError(
                "capture_damaged", f"the manifest next to {place.path} cannot be read: {error}"
            ) from error
        return report.bytes, report.crc32


def gone(what: Path | str) -> MidstreamError:
    return MidstreamError("gone", f"{what} was deleted")


def _damaged(path: Path, why: str) -> MidstreamError:
    return MidstreamError("capture_damaged", f"{path} is damaged: {why}")


def find(source: ArtifactStore | Path, job: str | None, tag: str | None) -> list[BlobLocation]:
    """Find the blobs below `source`, including those in segments.

    `source`: a job's folder; if `job` is given, also a tag's folder, the capture root, or a store.

    Raises MidstreamError for a manifest that cannot be read.
    """
    if isinstance(source, Path) and source.is_file():
        return expand([at(source)], job)
    if isinstance(source, Path) and job is None:
        # the folder does not exist if all blobs are in segments; it may also hold downloads
        store, folder = _within(source, 2)
        above, _, name = folder.rpartition("/")
        return _loose(store, folder) + list(_in_segments(store, above, name))
    if job is None:
        raise invalid("job", "a store holds captures of many jobs: name one")
    places: list[BlobLocation] = []
    if isinstance(source, Path):
        store, name = _within(source, 1)
        if name and tag in (None, name):
            places += _of_tag(store, name, job)
        source = open_store(source.absolute())
    for folder in source.children():
        if folder.endswith("/") and tag in (None, folder[:-1]):
            places += _of_tag(source, folder[:-1], job)
    return places


def expand(places: Iterable[BlobLocation], job: str | None) -> list[BlobLocation]:
    """Return `places`, with each whole segment replaced by the places of its blobs: those of `job`,
    or all of them.

    Raises MidstreamError for a segment whose manifest is missing or cannot be read.
    """
    result: list[BlobLocation] = []
    for place in places:
        if place.store is None or not place.in_segment or place.bytes is not None:
            result.append(place)
            continue
        try:
            result += _of_segment(place.store, index_of(place.key), job)
        except FileNotFoundError as error:
            try:
                place.store.stat(place.key)
            except FileNotFoundError:
                raise gone(place.path) from error
            index = place.path.with_suffix(".jsonl")
            segment = place.path
            raise MidstreamError(
                "capture_failed",
                (
                    f"{index} is missing: without it, the owners of the blobs in {segment} are "
                    "unknown"
                ),
            ) from error
    return list(dict.fromkeys(result))


def _of_tag(store: ArtifactStore, tag: str, job: str) -> list[BlobLocation]:
    return [*_loose(store, f"{tag}/{job}"), *_in_segments(store, tag, job)]


def _loose(store: ArtifactStore, folder: str) -> list[BlobLocation]:
    return [
        BlobLocation(store, key)
        for key in store.children(f"{folder}/")
        if key.endswith(".safetensors")
    ]


def _in_segments(store: ArtifactStore, tag: str, job: str) -> Iterator[BlobLocation]:
    for index in indices(store, tag, job):
        try:
            yield from _of_segment(store, index, job)
        except FileNotFoundError:
            # removed since it was listed, so it holds no more blobs of this job
            continue


def _of_segment(store: ArtifactStore, index: str, job: str | None) -> list[BlobLocation]:
    folder = index.rpartition("/")[0]
    with Translated(
        DamagedBlob, lambda error: _damaged(BlobLocation(store, index).path, str(error))
    ):
        entries = list(read_entries(store, index, None if job is None else {job}))
    return [
        BlobLocation(
            store,
            f"{folder}/{entry.file}",
            entry.offset,
            entry.bytes,
            entry.crc32,
            skip_if_deleted=job is None,
        )
        for entry in entries
    ]


def open_blobs(places: Iterable[BlobLocation]) -> list[BlobReader]:
    """Open all blobs.

    Raises MidstreamError: `gone` if one was deleted before it could be opened, `capture_damaged` if
    one is damaged.
    """
    views: dict[tuple[ArtifactStore | None, str], memoryview] = {}
    blobs: list[BlobReader] = []
    deleted: BlobLocation | None = None
    try:
        for place in places:
            if (spot := (place.store, place.key)) not in views:
                views[spot] = _viewed(place)
            end = len(views[spot]) if place.bytes is None else place.offset + place.bytes
            if end > len(views[spot]):
                raise _damaged(place.path, f"it is cut short: {len(views[spot])} bytes of {end}")
            try:
                blobs.append(BlobReader(place, views[spot][place.offset : end]))
            except MidstreamError as error:
                if error.kind != "gone" or not place.skip_if_deleted:
                    raise
                deleted = place
        if deleted is not None and not blobs:
            raise gone(deleted.path)
        for job, store in {(blob.header.manifest.job, blob.place.store) for blob in blobs}:
            if store is not None and store.marked(job):
                raise gone(f"the capture of job {job}")
    except BaseException:
        # a caller that keeps the exception must not keep the blobs and their mappings alive
        blobs.clear()
        views.clear()
        raise
    return blobs


def _viewed(place: BlobLocation) -> memoryview:
    assert place.store is not None, "bytes in memory are not opened"
    with (
        Translated(FileNotFoundError, lambda error: gone(place.path)),
        place.store.open(place.key) as handle,
    ):
        return handle.view()
