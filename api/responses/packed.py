"""A request's blobs joined into one safetensors stream: headers are merged, tensor bytes are copied, nothing is loaded.

Blobs are opened before the answer begins, so that a deletion meanwhile cannot cut it short: see `storage.store`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
from zlib_ng import zlib_ng

from ...broker.artifacts.headers import Place, explained, header_of, must_be_there
from ...schemas.blobs import DamagedBlob, Header, TensorPlace, encode_header
from ...schemas.captures import Manifest
from ...schemas.errors import MidstreamError
from ...storage.store import ArtifactStore, Handle

CHUNK = 1 << 20


@dataclass(frozen=True)
class OpenBlob:
    """Stays readable for as long as this object is referred to."""

    handle: Handle
    place: Place
    header: Header

    def check(self, crc32: int) -> None:
        """Reads all of it. Raises DamagedBlob when it is not what was written, OSError."""
        found = 0
        try:
            for chunk in self.read(0, self.place.bytes):
                found = zlib_ng.crc32(chunk, found)
        except EOFError as error:
            raise DamagedBlob(str(error)) from error
        if found != crc32:
            raise DamagedBlob(f"CRC32 mismatch in {self.place.bytes} bytes: {found:08x} read, {crc32:08x} written")

    def read(self, start: int, count: int) -> Iterator[bytes]:
        """`count` bytes of the blob in chunks. Raises OSError, EOFError when the file has become shorter."""
        at, end = self.place.offset + start, self.place.offset + start + count
        while at < end:
            chunk = self.handle.read(at, min(CHUNK, end - at))
            if not chunk:
                raise EOFError(f"{self.place.name} ends {end - at} bytes early")
            at += len(chunk)
            yield chunk


def open_blobs(store: ArtifactStore, job: str, blobs: Sequence[tuple[Place, int]]) -> list[OpenBlob]:
    """The requested blobs of a job, read once and compared with the CRC32 of each place.

    Raises MidstreamError: `gone` when one is not there any more, `capture_damaged` for one that is not what was written,
    `capture_failed` when the disk refuses.
    """
    handles: dict[str, Handle] = {}
    found = []
    try:
        for place, crc32 in blobs:
            with explained(job, place):
                handle = handles.get(place.key) or handles.setdefault(place.key, store.open(place.key))
                found.append(OpenBlob(handle, place, header_of(handle, place)))
                found[-1].check(crc32)
    finally:
        must_be_there(store, job)  # raises with the reason: deleted, or missing
    return found


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
                "conflict", "the pipeline stages hold rows of different positions because some were dropped: download the files instead"
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
