"""How does a capture become durable? Files are written aside, synced in groups, and renamed into place.

A group costs two disk round trips however many files it holds: one sync of all contents before the renames and one of
all directories after them. Nothing is reported before the second. Layout and naming are in `docs/decisions/0001-contracts.md`.
"""

import ctypes
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from ..schemas.receipts import CapturedFile

Buffer = bytes | bytearray | memoryview

#: safetensors pads its JSON header with spaces to this many bytes.
_ALIGNMENT = 8
#: Up to this many files are synced one by one; above it one `syncfs` is cheaper than a journal commit for each file.
_SYNC_SINGLY = 4
#: `writev` takes at most this many buffers (Linux IOV_MAX).
_IOV_MAX = 1024

_SAFETENSORS_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64"}

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class PendingFile:
    """A safetensors file to be published, with its manifest beside it under the suffix `.json`.

    `tensors`: (name, dtype, shape, C-contiguous little-endian buffers in order). `manifest` is completed with
    `file`, `bytes` and `crc32`. `rows`, `layers` and `positions` go into the receipt.
    """

    path: str  # relative to the capture root
    tensors: Sequence[tuple[str, str, Sequence[int], Sequence[Buffer]]]
    manifest: dict[str, Any]
    rows: int = 0
    layers: list[int] = field(default_factory=list)
    positions: int = 0


def publish(root: Path, files: Sequence[PendingFile]) -> list[CapturedFile]:
    """Write `files` under `root`; when this returns, contents and names are on disk.

    Raises OSError (disk full, read-only, …) or ValueError (a path that leaves `root`); then none of the group is
    reported, and temporary files are removed.
    """
    written: list[tuple[Path, Path]] = []  # (temporary, final)
    captured: list[CapturedFile] = []
    try:
        for file in files:
            target = _inside(root, file.path)
            target.parent.mkdir(parents=True, exist_ok=True)
            buffers = _safetensors(file)
            size, crc = sum(len(buffer) for buffer in buffers), _crc32(buffers)
            manifest = {**file.manifest, "file": target.name, "bytes": size, "crc32": crc}
            for path, parts in ((target, buffers), (target.with_suffix(".json"), [msgspec.json.encode(manifest)])):
                temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
                written.append((temporary, path))
                _write(temporary, parts)
            captured.append(CapturedFile(file.path, size, crc, file.rows, list(file.layers), file.positions))
        _sync(root, [temporary for temporary, _ in written])
        for temporary, final in written:
            os.rename(temporary, final)
        _sync(root, _directories(root, [final for _, final in written]))
    except BaseException:
        for temporary, _ in written:
            temporary.unlink(missing_ok=True)
        raise
    return captured


def _inside(root: Path, relative: str) -> Path:
    """`root / relative`, refusing what would escape `root`."""
    pure = PurePosixPath(relative)
    if pure.is_absolute() or ".." in pure.parts or not pure.parts:
        raise ValueError(f"capture path {relative!r} is not inside the capture root")
    return root / pure


def _safetensors(file: PendingFile) -> list[memoryview]:
    """The file's bytes as buffers, header first."""
    header: dict[str, Any] = {"__metadata__": {"format": "midstream.packed.1"}}
    body: list[memoryview] = []
    offset = 0
    for name, dtype, shape, buffers in file.tensors:
        views = [memoryview(buffer).cast("B") for buffer in buffers if len(buffer)]
        size = sum(len(view) for view in views)
        header[name] = {"dtype": _SAFETENSORS_NAMES[dtype], "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
        body += views
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNMENT)
    return [memoryview(len(encoded).to_bytes(8, "little") + encoded), *body]


def _crc32(buffers: Sequence[memoryview]) -> int:
    crc = 0
    for buffer in buffers:
        crc = zlib.crc32(buffer, crc)
    return crc


def _write(path: Path, buffers: Sequence[Buffer]) -> None:
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
    try:
        pending = [memoryview(buffer) for buffer in buffers]
        while pending:
            count = os.writev(descriptor, pending[:_IOV_MAX])
            while pending and count >= len(pending[0]):
                count -= len(pending.pop(0))
            if count:
                pending[0] = pending[0][count:]
    finally:
        os.close(descriptor)


def _sync(root: Path, paths: Sequence[Path]) -> None:
    """Make files or directories durable: one by one when few, the whole file system when many."""
    if len(paths) > _SYNC_SINGLY:
        _with_descriptor(root, _syncfs)
    else:
        for path in paths:
            _with_descriptor(path, os.fsync)


def _with_descriptor(path: Path, action: Any) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        action(descriptor)
    finally:
        os.close(descriptor)


def _syncfs(descriptor: int) -> None:
    if _libc.syncfs(descriptor) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"syncfs: {os.strerror(code)}")


def _directories(root: Path, files: Sequence[Path]) -> list[Path]:
    """Every directory from the files' parents up to `root` and root's own parent: a new entry may sit in each."""
    found: dict[Path, None] = {root: None, root.parent: None}
    for file in files:
        for parent in file.parents:
            if parent == root:
                break
            found[parent] = None
    return list(found)
