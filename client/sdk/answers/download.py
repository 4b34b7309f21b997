"""Opens a job's capture files on this machine, or downloads them over HTTP."""

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

import httpx2
from zlib_ng import zlib_ng

from ....schemas.base.errors import MidstreamError
from ....schemas.jobs.captures import path_fault
from ....storage.store import open_store
from ...captures.blobs import BlobLocation
from ..wire import ManifestEntry, ReadManifest

#: `<tag>.p<request>.pp<stage>.safetensors`; with `.<hook>.<layer>` before the suffix if each tensor
#: has its own file.
FILE_NAME = re.compile(
    r"[A-Za-z0-9][A-Za-z0-9_-]*\.p(?P<request>\d+)\.pp\d+(\.[a-z_]+\.\d+)?\.safetensors"
)

#: Seconds without data after which a download from a link is abandoned.
LINK_S = 20.0
#: Status of an incomplete capture → kind of the error. (A `partial` capture has all its files: only
#: what its detail names is missing.)
_REFUSED = {"pending": "conflict", "error": "capture_failed", "timed_out": "receipts_timed_out"}


def check(manifest: ReadManifest, job_id: str, partial: bool) -> None:
    """Check that the job's files are complete. Raises MidstreamError with the reason if there are
    none, or if some are missing and `partial` is false.
    """
    because = f" ({manifest.detail})" if manifest.detail else ""
    if not manifest.files:
        raise MidstreamError(
            "not_found", f"job {job_id} has no capture files: status {manifest.status}{because}"
        )
    if not partial and (kind := _REFUSED.get(manifest.status)):
        detail = f"the capture of job {job_id} is incomplete: status {manifest.status}{because}"
        raise MidstreamError(kind, detail, hint="partial=True reads the available rows")


def in_place(manifest: ReadManifest, job_id: str) -> list[BlobLocation]:
    """Return the blobs below the server's capture root if all of them are complete on this machine;
    otherwise an empty list.
    """
    if manifest.root is None or "://" in manifest.root:  # a bucket: download
        return []
    if any(path_fault(file.path, job_id) for file in manifest.files):
        return []  # downloading raises the server's error
    try:
        store = open_store(manifest.root)
        # raises for an unreadable folder of another account: its files are then downloaded
        sizes = {key: store.stat(key) for key in {file.path for file in manifest.files}}
    except (OSError, ValueError):
        return []
    if any(sizes[file.path] < file.offset + file.bytes for file in manifest.files):
        return []
    return [
        BlobLocation(store, file.path, file.offset, file.bytes, file.crc32)
        for file in manifest.files
    ]


def target_folder(folder: Path | str | None) -> Path:
    """Return `folder`, created if it is missing; without one, a temporary folder, removed when the
    program ends.
    """
    if folder is None:
        target = Path(tempfile.mkdtemp(prefix="midstream-capture-"))
        atexit.register(shutil.rmtree, target, ignore_errors=True)
        return target
    target = Path(folder).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    return target


def from_link(folder: Path, job_id: str, file: ManifestEntry) -> Path | None:
    """Download a file directly from the store, and check it. Returns None on failure: the caller
    then uses the API, which has the file or reports the error.

    The API key is not sent.
    """
    if file.link is None:
        return None
    try:
        with httpx2.stream("GET", file.link, timeout=LINK_S) as response:
            return (
                save(folder, job_id, file, response.iter_bytes())
                if response.status_code == 200
                else None
            )
    except (httpx2.HTTPError, httpx2.InvalidURL, MidstreamError):
        return None


def downloaded(folder: Path, request: int) -> list[Path]:
    """Return the capture files of one request in a folder of downloads."""
    named = ((path, FILE_NAME.fullmatch(path.name)) for path in sorted(folder.iterdir()))
    return [path for path, match in named if match and int(match["request"]) == request]


class Saved:
    """Writes a downloaded file, chunk by chunk, and a manifest for `verify`. A file with the wrong
    size or CRC32 is removed.

    Only names of capture files are accepted, so a server cannot write outside `folder`. Raises
    MidstreamError for other names, and at the end of the context if size or CRC32 are not those
    that the server named.
    """

    def __init__(self, folder: Path, job_id: str, file: ManifestEntry):
        if not FILE_NAME.fullmatch(file.name):
            raise MidstreamError(
                "capture_failed",
                f"the server names a file {file.name!r}, which is not a capture file's name",
            )
        self.path = folder / file.name
        self._partial = self.path.with_name(f".{file.name}.part")
        self._job = job_id
        self._file = file
        self._size = self._crc = 0

    def __enter__(self) -> "Saved":
        self._handle = self._partial.open("wb")
        return self

    def write(self, chunk: bytes) -> None:
        self._handle.write(chunk)
        self._size += len(chunk)
        self._crc = zlib_ng.crc32(chunk, self._crc)

    def __exit__(self, kind: object, *_: object) -> None:
        self._handle.close()
        file = self._file
        if kind is not None:
            self._partial.unlink()
            return
        if (self._size, self._crc) != (file.bytes, file.crc32):
            self._partial.unlink()
            raise MidstreamError(
                "capture_damaged",
                f"{file.name} of job {self._job} arrived as {self._size} bytes with CRC32 "
                f"{self._crc:08x}, not {file.bytes} bytes with CRC32 {file.crc32:08x}",
            )
        described = {"job": self._job, "file": file.name, "bytes": self._size, "crc32": self._crc}
        self.path.with_suffix(".json").write_text(json.dumps(described))
        self._partial.rename(self.path)


def save(folder: Path, job_id: str, file: ManifestEntry, chunks: Iterable[bytes]) -> Path:
    """Write a whole download. Raises what `Saved` raises."""
    with Saved(folder, job_id, file) as saved:
        for chunk in chunks:
            saved.write(chunk)
    return saved.path
