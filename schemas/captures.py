"""What is in a job's capture files? The manifest as `GET /v1/captures/{id}` shows it."""

import msgspec

from .base import Record
from .specs import CaptureStatus


class Sidecar(msgspec.Struct):
    """The `.json` beside a capture file, as far as the manifest shows it; writers may add to it."""

    hook: str
    layers: list[int]
    dtype: str
    positions: list[int]
    token_ids: list[int]
    bytes: int
    crc32: int


class ManifestFile(Record):
    """One durable file: rows of `hook` at each of `layers` × `positions`, `[hidden_size]` of `dtype` each."""

    name: str
    url: str  # the file's bytes
    path: str  # relative to the capture root
    request: int  # index of the prompt
    rank: int
    pp: int
    bytes: int
    crc32: int  # of the whole file
    rows: int
    hook: str
    dtype: str
    layers: list[int]
    positions: list[int]  # absolute token positions, in the order of the rows
    token_ids: list[int]  # the token at each position


class CaptureManifest(Record):
    """Answer of `GET /v1/captures/{id}`."""

    job: str
    status: CaptureStatus
    root: str | None  # the capture root, for readers on the same machine
    bytes: int
    rows: int
    files: list[ManifestFile]
    detail: str = ""
