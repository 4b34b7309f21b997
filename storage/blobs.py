"""Builds capture blobs from buffers, stores them as objects of their own or in a segment, and finds
them by their index lines.
"""

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import msgspec
from zlib_ng import zlib_ng

from ..schemas.jobs.captures import SEGMENTS, BlobEntry, Manifest, index_of
from .formats.capture_blobs import DTYPE_NAMES, DamagedBlob, encode_header
from .store import Adopting, ArtifactStore, Buffer, Draft, Referring, Segment, committed

#: Blobs in a segment begin at multiples of this, so that each can be mapped alone, and a deleted
#: blob's blocks can be released whole.
SEGMENT_ALIGNMENT = 4096
#: An index is read in pieces of this many bytes.
_CHUNK = 1 << 20
#: Finds the job of an index line without decoding the line.
_JOB = re.compile(rb'"job":"([^"\\]*)"')


@dataclass(frozen=True)
class FileBytes:
    """The bytes of a whole safetensors file, as buffers in order."""

    manifest: Manifest
    buffers: Sequence[memoryview]
    size: int
    crc32: int
    # a file with the same bytes that the store takes over; `buffers` is then empty
    draft: Draft | None = None

    def line(self, key: str, offset: int = 0) -> bytes:
        """Return the line that describes the blob in the index of the object `key`."""
        return (
            msgspec.json.encode(
                BlobEntry(key.rpartition("/")[2], offset, self.size, self.crc32, self.manifest)
            )
            + b"\n"
        )


def make_blob(
    manifest: Manifest, tensors: Sequence[tuple[str, str, Sequence[int], Sequence[Buffer]]]
) -> FileBytes:
    """Build a blob without copying its buffers.

    `tensors`: (name, dtype, shape, C-contiguous little-endian buffers in order).
    """
    described = []
    body = []
    for name, dtype, shape, buffers in tensors:
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        described.append((name, DTYPE_NAMES[dtype], shape, sum(map(len, views))))
        body += views
    everything = [memoryview(encode_header(described, manifest)), *body]
    crc = 0
    for buffer in everything:
        crc = zlib_ng.crc32(buffer, crc)
    return FileBytes(manifest, everything, sum(map(len, everything)), crc)


def publish(store: ArtifactStore, blobs: Sequence[tuple[str, FileBytes]]) -> None:
    """Write each (key, blob), with its index next to it; when this returns, all of them are
    durable.

    Raises OSError (disk full, read-only, removed meanwhile, …) or ValueError (a key outside the
    store). Objects that are at their keys by then are complete but must not be reported; the others
    are removed.
    """
    with committed(store) as writer:
        for key, blob in blobs:
            if blob.draft is None:
                writer.append(key, blob.buffers)
            else:
                assert isinstance(writer, Adopting), "a store that has drafts takes them"
                writer.adopt(key, blob.draft)
            writer.append(index_of(key), [blob.line(key)])


def append(segment: Segment, blobs: Sequence[FileBytes]) -> list[int]:
    """Append a group of blobs, durable when this returns; return their offsets.

    Raises what `Segment.append` raises.
    """
    offsets: list[int] = []
    parts: list[Buffer] = []
    lines = []
    end = segment.size
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
    """Yield the blobs that an index lists, for `jobs` or for all. An incomplete last line is
    ignored.

    Raises DamagedBlob for any other invalid line, FileNotFoundError.
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
    """Return the keys of the indices under a tag that may list blobs of the job. Raises OSError."""
    if isinstance(store, Referring):
        return [
            index_of(segment) for segment in store.segments(job) if segment.startswith(f"{tag}/")
        ]
    return [key for key in store.children(f"{tag}/{SEGMENTS}/") if key.endswith(".jsonl")]


def _lines(store: ArtifactStore, index: str) -> Iterator[bytes]:
    """Yield complete lines only: text after the last line break was cut off by a crash, or is still
    being written.
    """
    with store.open(index) as handle:
        at = 0
        rest = b""
        while chunk := handle.read(at, _CHUNK):
            at += len(chunk)
            *whole, rest = (rest + chunk).split(b"\n")
            yield from whole
