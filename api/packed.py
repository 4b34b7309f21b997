"""How do a request's blobs become one safetensors? Headers are parsed and joined, tensor bytes are copied, nothing is loaded.

Blobs are opened before the answer begins, so that a deletion meanwhile cannot cut it short: see `schemas.captures.DELETED`.
"""

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import fstat, pread
from pathlib import Path
from typing import IO

import msgspec

from ..broker.retention import gone
from ..schemas.blobs import DamagedBlob, DeletedBlob, Header, TensorPlace, encode_header, read_header
from ..schemas.captures import DELETED, Manifest
from ..schemas.errors import MidstreamError

CHUNK = 1 << 20


@dataclass(frozen=True)
class Place:
    """Where a receipt says that a blob lies; `path` is inside the capture root."""

    path: Path
    offset: int
    bytes: int


@dataclass(frozen=True)
class OpenBlob:
    """Stays readable for as long as this object is referred to; in a segment it is locked against deletion."""

    file: IO[bytes]
    place: Place
    header: Header

    def read(self, start: int, count: int) -> Iterator[bytes]:
        """`count` bytes of the blob in chunks. Raises OSError, EOFError when the file has become shorter."""
        at, end = self.place.offset + start, self.place.offset + start + count
        while at < end:
            chunk = pread(self.file.fileno(), min(CHUNK, end - at), at)
            if not chunk:
                raise EOFError(f"{self.place.path.name} ends {end - at} bytes too early")
            at += len(chunk)
            yield chunk


def open_blobs(root: Path, job: str, places: Sequence[Place]) -> list[OpenBlob]:
    """All of a job's blobs that are asked for.

    Raises MidstreamError: `gone` when one is not there any more, `capture_failed` for one that is cut short or cannot be read.
    """
    files: dict[Path, IO[bytes]] = {}
    found = []
    for place in places:
        with _explained(job, place):
            file = files.get(place.path) or files.setdefault(place.path, _opened(place.path))
            found.append(OpenBlob(file, place, _header(file, place)))
    _must_be_there(root, job)
    return found


def read_headers(root: Path, job: str, places: Sequence[Place]) -> list[Header]:
    """What all of a job's blobs say of themselves; one file is open at a time, for there may be thousands.

    Raises as `open_blobs`.
    """
    found = []
    for place in places:
        with _explained(job, place), _opened(place.path) as file:
            found.append(_header(file, place))
    _must_be_there(root, job)
    return found


def _must_be_there(root: Path, job: str) -> None:
    """To be asked when everything was read: raises `gone` when deleting began before that."""
    if (root / DELETED / job).exists():
        raise gone(job)


@contextmanager
def _explained(job: str, place: Place) -> Iterator[None]:
    """Errors of the disk and of the file's content as a MidstreamError that names the file."""
    try:
        yield
    except FileNotFoundError as error:
        detail = f"{place.path.name} is not in the capture root of this API: it was removed, or the worker writes elsewhere"
        raise MidstreamError("gone", detail) from error
    except DeletedBlob as error:
        raise gone(job) from error
    except (OSError, DamagedBlob) as error:
        raise MidstreamError("capture_failed", f"the capture file {place.path.name} cannot be read: {error}") from error


def _header(file: IO[bytes], place: Place) -> Header:
    size = min(place.bytes, max(0, fstat(file.fileno()).st_size - place.offset))
    header = read_header(lambda start, count: pread(file.fileno(), count, place.offset + start), size)
    if size < place.bytes:
        raise DamagedBlob(f"it is cut short: {size} bytes of {place.bytes}")
    return header


def _opened(path: Path) -> IO[bytes]:
    file = path.open("rb", buffering=0)
    if path.suffix == ".seg":
        fcntl.flock(file, fcntl.LOCK_SH)
    return file


@dataclass(frozen=True)
class Joined:
    """A safetensors file that is yet to be sent."""

    head: bytes
    parts: list[tuple[OpenBlob, TensorPlace]]

    @property
    def length(self) -> int:
        return len(self.head) + sum(tensor.length for _, tensor in self.parts)

    def chunks(self) -> Iterator[bytes]:
        yield self.head
        for blob, tensor in self.parts:
            yield from blob.read(tensor.start, tensor.length)


def join(blobs: Sequence[OpenBlob], sites: dict[str, list[int]]) -> Joined:
    """The tensors of `sites` from one request's blobs, `positions` and `token_ids`, with a manifest that says just that.

    Raises MidstreamError: `capture_failed` when a tensor is in none of the blobs, `conflict` when stages hold other rows.
    """
    first = blobs[0].header.manifest
    for blob in blobs:
        other = blob.header.manifest
        if (other.positions, other.token_ids) != (first.positions, first.token_ids):
            raise MidstreamError(
                "conflict", "the pipeline stages hold rows of different positions, as some were dropped: fetch the files themselves"
            )
    held = {tensor.site: (blob, tensor) for blob in blobs for tensor in blob.header.tensors.values() if tensor.site is not None}
    parts = []
    for hook, layers in sites.items():
        for layer in layers:
            if (hook, layer) not in held:
                raise MidstreamError("capture_failed", f"{hook}.{layer} is in no file: a pipeline stage is missing")
            parts.append(held[hook, layer])
    parts += [(blobs[0], blobs[0].header.tensors[name]) for name in ("positions", "token_ids")]
    manifest: Manifest = msgspec.structs.replace(first, sites=sites, stage_sites=sites, all_sites=sites, stages=1, pp=0, reused=0)
    described = [(tensor.name, tensor.dtype, tensor.shape, tensor.length) for _, tensor in parts]
    return Joined(encode_header(described, manifest), parts)
