"""Joins a request's blobs into one safetensors stream: merges headers and copies tensor bytes,
without loading tensors.

Blobs are opened before the answer begins, so that a concurrent deletion cannot truncate it: see
`storage.store`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from zlib_ng import zlib_ng

from ...broker.artifacts.headers import BlobPlace, explained, header_of, must_be_there
from ...schemas.base.errors import MidstreamError, Translated
from ...schemas.base.records import by_key
from ...schemas.jobs.captures import Manifest
from ...schemas.prompts.selectors import StoredSites
from ...storage.formats.capture_blobs import DamagedBlob, Header, TensorPlace, encode_header
from ...storage.store import ArtifactStore, Handle

CHUNK = 1 << 20


@dataclass(frozen=True)
class OpenBlob:
    """A blob that stays readable as long as this object is referenced."""

    handle: Handle
    place: BlobPlace
    header: Header

    def check(self, crc32: int) -> None:
        """Read the whole blob. Raises DamagedBlob if it is not what was written, OSError."""
        crc = 0
        with Translated(EOFError, lambda error: DamagedBlob(str(error))):
            for chunk in self.read(0, self.place.bytes):
                crc = zlib_ng.crc32(chunk, crc)
        if crc != crc32:
            raise DamagedBlob(
                f"CRC32 mismatch in {self.place.bytes} bytes: {crc:08x} read, {crc32:08x} written"
            )

    def read(self, start: int, count: int) -> Iterator[bytes]:
        """Yield `count` bytes of the blob in chunks.

        Raises OSError, EOFError when the file has become shorter.
        """
        at = self.place.offset + start
        end = self.place.offset + start + count
        while at < end:
            chunk = self.handle.read(at, min(CHUNK, end - at))
            if not chunk:
                raise EOFError(f"{self.place.name} ends {end - at} bytes early")
            at += len(chunk)
            yield chunk


def open_blobs(
    store: ArtifactStore, job: str, blobs: Sequence[tuple[BlobPlace, int]]
) -> list[OpenBlob]:
    """Open the requested blobs of a job; read each once to check its CRC32.

    Raises MidstreamError: `gone` if a blob no longer exists, `capture_damaged` if it is not what
    was written, `capture_failed` if it cannot be read.
    """
    handles: dict[str, Handle] = {}
    result = []
    try:
        for place, crc32 in blobs:
            with explained(job, place):
                handle = handles.get(place.key) or handles.setdefault(
                    place.key, store.open(place.key)
                )
                result.append(OpenBlob(handle, place, header_of(handle, place)))
                result[-1].check(crc32)
    finally:
        must_be_there(store, job)  # raises with the reason: deleted, or missing
    return result


@dataclass(frozen=True)
class JoinedFile:
    """A safetensors file to send."""

    head: bytes
    # for each tensor: its place, or the places of its columns in order
    parts: list[list[tuple[OpenBlob, TensorPlace]]]

    @property
    def length(self) -> int:
        return len(self.head) + sum(tensor.length for part in self.parts for _, tensor in part)

    def chunks(self) -> Iterator[bytes]:
        yield self.head
        for part in self.parts:
            blob, tensor = part[0]
            if len(part) == 1:
                yield from blob.read(tensor.start, tensor.length)
            else:  # several ranks stored columns of the rows: some rows at a time
                yield from (block.tobytes() for block in blocks(part, 0, tensor.shape[0]))


def blocks(
    part: Sequence[tuple[OpenBlob, TensorPlace]], first: int, count: int
) -> Iterator[np.ndarray]:
    """Yield the bytes of the rows `[first, first + count)` of one tensor, some rows at a time:
    uint8 `[rows, bytes of a row]`, C-contiguous.

    Raises OSError, EOFError.
    """
    total = part[0][1].shape[0]
    widths = [tensor.length // total if total else 0 for _, tensor in part]
    step = max(1, CHUNK // max(1, sum(widths)))
    for at in range(first, first + count, step):
        rows = min(step, first + count - at)
        read = [
            np.frombuffer(
                b"".join(blob.read(tensor.start + at * width, rows * width)), np.uint8
            ).reshape(rows, width)
            for (blob, tensor), width in zip(part, widths, strict=True)
        ]
        yield np.concatenate(read, axis=1)


def join(blobs: Sequence[OpenBlob], sites: StoredSites) -> JoinedFile:
    """Join the tensors of `sites`, `positions` and `token_ids` from one request's blobs, with a
    manifest of exactly these.

    Raises MidstreamError: `capture_failed` if a tensor is in none of the blobs, `conflict` if
    stages hold different rows.
    """
    first = blobs[0].header.manifest
    for blob in blobs:
        other = blob.header.manifest
        if (other.positions, other.token_ids) != (first.positions, first.token_ids):
            raise MidstreamError(
                "conflict",
                (
                    "the pipeline stages hold rows of different positions because some were "
                    "dropped: download the files instead"
                ),
            )
    held = by_key(
        (tensor.site, (blob, tensor))
        for blob in sorted(blobs, key=lambda blob: blob.header.manifest.columns)
        for tensor in blob.header.tensors.values()
        if tensor.site is not None
    )
    parts = []
    for hook, layers in sites.items():
        for layer in layers:
            if (hook, layer) not in held:
                raise MidstreamError(
                    "capture_failed", f"{hook}.{layer} is in no file: a pipeline stage is missing"
                )
            parts.append(held[hook, layer])
    parts += [[(blobs[0], blobs[0].header.tensors[name])] for name in ("positions", "token_ids")]
    described = []
    for part in parts:
        tensor = part[0][1]
        shape = (
            [tensor.shape[0], sum(place.shape[1] for _, place in part)]
            if tensor.site is not None
            else tensor.shape
        )
        described.append((tensor.name, tensor.dtype, shape, sum(place.length for _, place in part)))
    widths = {name.partition(".")[0]: shape[1] for name, _, shape, _ in described if len(shape) > 1}
    manifest: Manifest = msgspec.structs.replace(
        first,
        sites=sites,
        stage_sites=sites,
        all_sites=sites,
        stages=1,
        pp=0,
        reused=0,
        widths=widths,
        columns=[],
        row=first.row if all(blob.header.manifest.row == first.row for blob in blobs) else None,
    )
    return JoinedFile(encode_header(described, manifest), parts)
