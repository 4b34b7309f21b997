"""What do the blobs of a job's captures say of themselves? Read where the receipts say that they lie, or found on the disk."""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import fstat, pread
from pathlib import Path
from typing import IO

from ...schemas.blobs import DamagedBlob, Header, read_entries, read_header
from ...schemas.captures import DELETED, SEGMENTS, BlobEntry, path_fault
from ...schemas.errors import MidstreamError
from ...schemas.jobs import FileEntry
from ...schemas.receipts import CapturedFile
from .retention import gone

#: Why the blobs of a job cannot be read.
UNREADABLE = frozenset({"gone", "capture_failed", "capture_damaged"})


@dataclass(frozen=True)
class Place:
    """Where a blob lies, `path` inside the capture root, and whose rows it holds."""

    path: Path
    offset: int
    bytes: int
    job: str
    request: int
    tag: str


def place_in(root: Path, job: str, request: int, file: FileEntry | CapturedFile) -> Place:
    """The place of a blob that a receipt of `job` names.

    Receipts are not trusted: raises MidstreamError("capture_failed") for a path that is not the job's or leaves the capture root.
    """
    path = (root / file.path).resolve()
    fault = path_fault(file.path, job)
    if fault is None and not path.is_relative_to(root):
        fault = f"{file.path!r} is not inside the capture root"
    if fault is not None:
        raise MidstreamError("capture_failed", fault)
    return Place(path, file.offset, file.bytes, job, request, file.path.partition("/")[0])


def read_headers(root: Path, job: str, places: Sequence[Place]) -> list[Header]:
    """What all of a job's blobs say of themselves; one file is open at a time, for there may be thousands.

    Raises MidstreamError: `gone` when one is not there any more, `capture_damaged` for one that is not what was written,
    `capture_failed` for another job's and when the disk refuses.
    """
    found = []
    try:
        for place in places:
            with explained(job, place), opened(place.path) as file:
                found.append(header_of(file, place))
    finally:
        must_be_there(root, job)  # says more than that a file is not there
    return found


def find_entries(root: Path, job: str, tag: str) -> list[tuple[str, BlobEntry]]:
    """The blobs that a job has on disk under a tag, as the files beside them say: (path relative to the capture root, entry).

    Raises MidstreamError: `gone` when they were deleted, `capture_damaged` or `capture_failed` for a manifest that cannot be read.
    """
    folder = root / tag
    found: list[tuple[str, BlobEntry]] = []
    for index in [*sorted((folder / job).glob("*.json")), *sorted((folder / SEGMENTS).glob("*.jsonl"))]:
        try:
            found += [(str((index.parent / entry.file).relative_to(root)), entry) for entry in read_entries(index, {job})]
        except FileNotFoundError:
            continue  # removed since it was listed
        except DamagedBlob as error:
            raise MidstreamError("capture_damaged", f"the manifest {index.name} cannot be read: {error}") from error
        except OSError as error:
            raise MidstreamError("capture_failed", f"the manifest {index.name} cannot be read: {error}") from error
    must_be_there(root, job)
    return found


def must_be_there(root: Path, job: str) -> None:
    """To be asked when everything was read: raises `gone` when deleting began before that."""
    if (root / DELETED / job).exists():
        raise gone(job)


@contextmanager
def explained(job: str, place: Place) -> Iterator[None]:
    """Errors of the disk and of the file's content as a MidstreamError that names the file.

    A blob of zeros was deleted only if the ledger or `must_be_there` reports it: the caller checks.
    """
    try:
        yield
    except FileNotFoundError as error:
        detail = f"{place.path.name} is not in the capture root of this process: it was removed, or the worker writes elsewhere"
        raise MidstreamError("gone", detail) from error
    except DamagedBlob as error:
        raise MidstreamError("capture_damaged", f"the capture file {place.path.name} of job {job} is damaged: {error}") from error
    except OSError as error:
        raise MidstreamError("capture_failed", f"the capture file {place.path.name} cannot be read: {error}") from error


def header_of(file: IO[bytes], place: Place) -> Header:
    """Raises DamagedBlob for a blob that is cut short or not one of ours.

    MidstreamError("capture_failed") for one of another job, prompt or tag.
    """
    size = min(place.bytes, max(0, fstat(file.fileno()).st_size - place.offset))
    header = read_header(lambda start, count: pread(file.fileno(), count, place.offset + start), size)
    if size < place.bytes:
        raise DamagedBlob(f"it is cut short: {size} bytes of {place.bytes}")
    found = header.manifest
    if (found.job, found.request, found.tag or place.tag) != (place.job, place.request, place.tag):
        # The owner is not named: it may be another tenant's job.
        detail = f"at byte {place.offset} it does not hold rows of request {place.request} of job {place.job}"
        raise MidstreamError("capture_failed", f"the capture file {place.path.name} cannot be read: {detail}")
    return header


def opened(path: Path) -> IO[bytes]:
    """For reading; a segment is locked against deletion for as long as it is open."""
    file = path.open("rb", buffering=0)
    if path.suffix == ".seg":
        fcntl.flock(file, fcntl.LOCK_SH)
    return file
