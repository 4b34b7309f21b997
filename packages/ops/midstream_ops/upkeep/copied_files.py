"""Copies folders file by file, so that a copy that was cut off goes on where it was."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from midstream.schemas.base.records import Record, from_json, to_json
from midstream.storage.file_store import sync

CHUNK = 4 << 20


class CopiedFile(Record):
    """A file of a backup: what a line of its list says."""

    path: str  # relative to the backup
    bytes: int
    sha256: str


class FileList:
    """The files of a backup that are complete, in a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.files = {each.path: each for each in _read(path)}
        if path.exists():
            _cut_half_a_line(path)

    def add(self, file: CopiedFile) -> None:
        with self._path.open("ab") as lines:
            lines.write(to_json(file) + b"\n")
        self.files[file.path] = file


def _read(path: Path) -> Iterator[CopiedFile]:
    if not path.exists():
        return
    for line in path.read_bytes().splitlines(keepends=True):
        if line.endswith(b"\n"):  # else the process was killed in the middle of it
            yield from_json(line, CopiedFile)


def _cut_half_a_line(path: Path) -> None:
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole < len(content):
        os.truncate(path, whole)


def files_below(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path (relative) and size of each file, sorted, without links, and without files and
    folders whose names begin with a dot: those are not complete.
    """
    for place, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(place, name)
            with suppress(FileNotFoundError):  # removed meanwhile
                if not name.startswith(".") and not path.is_symlink():
                    yield str(path.relative_to(folder)), path.stat().st_size


def copy_new(
    source: Path,
    backup: Path,
    name: str,
    known: FileList,
    copied: Callable[[int], None] = lambda size: None,
) -> int:
    """Copy the files below `source` into the folder `name` of a backup, but those that it has in
    the same size; return how many were removed meanwhile. `copied`: is called with the bytes of
    each. A file of captures never changes, but segments grow.
    """
    gone = 0
    for path, size in files_below(source):
        inside = f"{name}/{path}"
        former = known.files.get(inside)
        if former is not None and former.bytes == size and (backup / inside).exists():
            continue
        try:
            file = copy(source / path, backup / inside, inside)
        except FileNotFoundError:
            gone += 1
            continue
        known.add(file)
        copied(file.bytes)
    return gone


def copy(source: Path, target: Path, name: str) -> CopiedFile:
    """Copy a file: `target` exists once it is complete and durable. Raises OSError."""
    digest = hashlib.sha256()
    size = 0
    with source.open("rb") as read:
        target.parent.mkdir(parents=True, exist_ok=True)
        aside = target.with_name(f".{target.name}.part")
        with aside.open("wb") as write:
            while part := read.read(CHUNK):
                digest.update(part)
                size += write.write(part)
            write.flush()
            os.fsync(write.fileno())
    aside.rename(target)
    sync(target.parent)
    return CopiedFile(path=name, bytes=size, sha256=digest.hexdigest())


def digest_of(path: Path) -> str:
    """Return the SHA-256 of a file. Raises OSError."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
