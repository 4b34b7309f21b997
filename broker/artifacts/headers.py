"""Reads the headers of a job's capture blobs, at the places that receipts name; lists the blobs
that the store has.
"""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import PurePosixPath

from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.jobs.captures import BlobEntry, path_fault
from ...schemas.jobs.jobs import FileEntry
from ...schemas.jobs.receipts import CapturedFile
from ...storage.blobs import indices, read_entries
from ...storage.formats.capture_blobs import DamagedBlob, Header, read_header
from ...storage.store import ArtifactStore, Distant, Handle
from .retention import gone

#: Kinds of the errors with which reading a job's blobs fails.
UNREADABLE = frozenset({"gone", "capture_failed", "capture_damaged"})


@dataclass(frozen=True)
class BlobPlace:
    """Location of a blob, and the request whose rows it holds."""

    key: str
    offset: int
    bytes: int
    job: str
    request: int
    tag: str

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name


def place_in(
    store: ArtifactStore, job: str, request: int, file: FileEntry | CapturedFile
) -> BlobPlace:
    """Return the place of a blob that a receipt of `job` names.

    Receipts are not trusted: raises MidstreamError("capture_failed") for a path that is not the
    job's or leaves the capture root.
    """
    if (fault := path_fault(file.path, job)) is not None:
        raise MidstreamError("capture_failed", fault)
    with Translated(ValueError, lambda error: MidstreamError("capture_failed", str(error))):
        store.check(file.path)
    return BlobPlace(file.path, file.offset, file.bytes, job, request, file.path.partition("/")[0])


def read_headers(store: ArtifactStore, job: str, places: Sequence[BlobPlace]) -> list[Header]:
    """Return the headers of all of a job's blobs; on a disk one file is open at a time, because
    there may be thousands.

    Raises MidstreamError: `gone` if a blob no longer exists, `capture_damaged` if it is not what
    was written, `capture_failed` if it belongs to another job or cannot be read.
    """

    def read(group: Sequence[BlobPlace]) -> list[Header]:
        result = []
        with explained(job, group[0]), store.open(group[0].key) as handle:
            for place in group:
                with explained(job, place):
                    result.append(header_of(handle, place))
        return result

    groups = [list(group) for _, group in itertools.groupby(places, key=lambda place: place.key)]
    try:
        return list(
            itertools.chain.from_iterable(
                store.together(read, groups) if isinstance(store, Distant) else map(read, groups)
            )
        )
    finally:
        # if the captures were deleted, raises `gone` in place of the error that `read` raised
        must_be_there(store, job)


def find_entries(store: ArtifactStore, job: str, tag: str) -> list[tuple[str, BlobEntry]]:
    """Return (key, entry) of each blob that a job has in the store under a tag, according to the
    indices next to the blobs.

    Raises MidstreamError: `gone` if they were deleted, `capture_damaged` or `capture_failed` for
    a manifest that cannot be read.
    """
    blob_entries: list[tuple[str, BlobEntry]] = []
    with Translated(
        OSError,
        lambda error: MidstreamError(
            "capture_failed", f"the captures of job {job} cannot be listed: {error}"
        ),
    ):
        listed = [
            key for key in store.children(f"{tag}/{job}/") if key.endswith(".json")
        ] + indices(store, tag, job)
    for index in listed:
        folder, _, name = index.rpartition("/")
        try:
            blob_entries += [
                (f"{folder}/{entry.file}", entry) for entry in read_entries(store, index, {job})
            ]
        except FileNotFoundError:
            continue  # removed since it was listed
        except DamagedBlob as error:
            raise MidstreamError(
                "capture_damaged", f"the manifest {name} cannot be read: {error}"
            ) from error
        except OSError as error:
            raise MidstreamError(
                "capture_failed", f"the manifest {name} cannot be read: {error}"
            ) from error
    must_be_there(store, job)
    return blob_entries


def must_be_there(store: ArtifactStore, job: str) -> None:
    """Raise `gone` if deletion of the job's captures has begun; call this after reading them."""
    if store.marked(job):
        raise gone(job)


@contextmanager
def explained(job: str, place: BlobPlace) -> Iterator[None]:
    """Turn errors of the disk and of the blob's content into a MidstreamError that names the file.

    A deleted blob in a segment reads as zeros, and is reported as damaged: the caller checks with
    the ledger or `must_be_there` whether it was deleted.
    """
    try:
        yield
    except FileNotFoundError as error:
        detail = (
            f"{place.name} is not in this process's capture root: it was deleted, or the "
            "worker writes to another folder"
        )
        raise MidstreamError("gone", detail) from error
    except DamagedBlob as error:
        raise MidstreamError(
            "capture_damaged", f"the capture file {place.name} of job {job} is damaged: {error}"
        ) from error
    except OSError as error:
        raise MidstreamError(
            "capture_failed", f"the capture file {place.name} cannot be read: {error}"
        ) from error


def header_of(handle: Handle, place: BlobPlace) -> Header:
    """Return the header of the blob at `place`.

    Raises DamagedBlob if the blob is truncated or not a capture blob,
    MidstreamError("capture_failed") if it belongs to another job, prompt or tag.
    """
    size = min(place.bytes, max(0, handle.size - place.offset))
    header = read_header(lambda start, count: handle.read(place.offset + start, count), size)
    if size < place.bytes:
        raise DamagedBlob(f"it is truncated: {size} of {place.bytes} bytes")
    manifest = header.manifest
    # A receipt is trusted only as far as it can be checked: the blob itself must name the job.
    if (manifest.job, manifest.request, manifest.tag or place.tag) != (
        place.job,
        place.request,
        place.tag,
    ):
        # The owner is not named: it may be another tenant's job.
        detail = (
            f"no rows of request {place.request} of job {place.job} start at byte {place.offset}"
        )
        raise MidstreamError(
            "capture_failed", f"the capture file {place.name} cannot be read: {detail}"
        )
    return header
