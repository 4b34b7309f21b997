"""Capture blobs in a store: made of buffers, published as objects of their own or appended to a
segment, found by their index lines.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from zlib_ng import zlib_ng

from ..schemas.jobs.captures import SEGMENTS, BlobEntry, Manifest, index_of
from .formats.capture_blobs import DTYPE_NAMES, DamagedBlob, encode_header
from .store import Adopting, ArtifactStore, Buffer, Draft, Referring, Segment

#: Blobs in a segment begin at multiples of this: each can be mapped alone, and a deleted one leaves
#: no block half used.
SEGMENT_ALIGNMENT = 4096
#: An index is read in pieces of this many bytes.
_CHUNK = 1 << 20
#: The job of a line, found without decoding the rest.
_JOB = re.compile(rb'"job":"([^"\\]*)"')


@dataclass(frozen=True)
class Blob:
    """The bytes of a whole safetensors file, as buffers in order."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    size: int
    crc32: int
    # the same bytes in a file that the store can take; then there are no buffers
    draft: Draft | None = None

    def line(self, key: str, offset: int = 0) -> bytes:
        """The line that describes it in the index of the object `key`."""
        return (
            msgspec.json.encode(
                BlobEntry(key.rpartition("/")[2], offset, self.size, self.crc32, self.manifest)
            )
            + b"\n"
        )


def make_blob(
    manifest: Manifest, tensors: Sequence[tuple[str, str, Sequence[int], Sequence[Buffer]]]
) -> Blob:
    """`tensors`: (name, dtype, shape, C-contiguous little-endian buffers in order).

    Nothing is copied.

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
        crc = zlib_ng.crc32(buffer, crc)
    return Blob(manifest, everything, sum(map(len, everything)), crc)


def publish(store: ArtifactStore, blobs: Sequence[tuple[str, Blob]]) -> None:
    """Write each (key, blob), with its index next to it; when this returns, all of them are
    durable.

    Raises OSError (disk full, read-only, removed meanwhile, …) or ValueError (a key outside the
    store); then what has its key already is whole but must not be reported, and nothing else is
    left.
    """
    writer = store.writer()
    try:
        for key, blob in blobs:
            if blob.draft is None:
                writer.append(key, blob.buffers)
            else:
                assert isinstance(writer, Adopting), "a store that has drafts takes them"
                writer.adopt(key, blob.draft)
            writer.append(index_of(key), [blob.line(key)])
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def append(segment: Segment, blobs: Sequence[Blob]) -> list[int]:
    """Append a group, durable when this returns; the offsets of the blobs.

    Raises what `Segment.append` raises.
    """
    offsets: list[int] = []
    parts: list[Buffer] = []
    lines, end = [], segment.size
    for blob in blobs:
        padding = -end % SEGMENT_ALIGNMENT
        parts += [bytes(padding), *blob.buffers]
        offsets.append(end + padding)
        lines.append(blob.line(segment.key, end + padding))
        end += padding + blob.size
    segment.append(parts, b"".join(lines))
    return offsets


def read_entries(
    store: ArtifactStore, index: str, jobs: Collection[str] | None = None
) -> Iterator[BlobEntry]:
    """The blobs that an index names, of some jobs or all. A torn last line is left out.

    Raises DamagedBlob for another line that is not ours, FileNotFoundError.
    """
    for line in _lines(store, index):
        if jobs is not None and (
            (match := _JOB.search(line)) is None or match[1].decode(errors="replace") not in jobs
        ):
            continue
        try:
            yield msgspec.json.decode(line, type=BlobEntry)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DamagedBlob(f"{index.rpartition('/')[2]} has an invalid line: {error}") from error


def indices(store: ArtifactStore, tag: str, job: str) -> list[str]:
    """The keys of the indices under a tag that may name blobs of the job. Raises OSError."""
    if isinstance(store, Referring):
        return [
            index_of(segment) for segment in store.segments(job) if segment.startswith(f"{tag}/")
        ]
    return [key for key in store.children(f"{tag}/{SEGMENTS}/") if key.endswith(".jsonl")]


def _lines(store: ArtifactStore, index: str) -> Iterator[bytes]:
    """Complete lines only: what follows the last line's end was torn by a crash or is still being
    written.
    """
    with store.open(index) as handle:
        at, rest = 0, b""
        while chunk := handle.read(at, _CHUNK):
            at += len(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
