"""Direct writes: large files go from memory to the disk without the page cache.

A large capture would fill the page cache with pages that are rarely read again, and allocating that
many pages costs several times more than copying the rows. Instead, the rows are copied to a small
aligned buffer, from which they are written directly to the disk.
"""

import errno
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from .store import Buffer

#: The smallest file, in bytes, that is written directly. Smaller ones are often read soon (rows of
#: source runs), or share a sync.
LEAST = 1 << 20
#: Bytes of the buffer, and the alignment of offsets and sizes of direct writes.
_BUFFER = 4 << 20
_ALIGNMENT = 4096
#: Errors of file systems or disks that do not support direct writes.
_UNABLE = (errno.EINVAL, errno.EOPNOTSUPP)


class DirectWriter:
    """Writes whole files. Belongs to one thread, and keeps its buffer until that ends."""

    def __init__(self, write_at: Callable[[int, Sequence[Buffer], int], None]) -> None:
        """`write_at(descriptor, buffers, offset)` writes all buffers, one after the other."""
        self._write_at = write_at
        self._memory = -1  # a file in memory: writing to it copies without holding the GIL
        self._buffer: mmap.mmap | None = None

    def write(self, path: Path, buffers: Sequence[Buffer]) -> bool:
        """Write these bytes to the file `path`. If direct writes are not supported, return False
        and leave the file empty.

        Raises OSError.
        """
        size = sum(map(len, buffers))
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_DIRECT, 0o644)
        except OSError as error:
            if error.errno in _UNABLE:
                return False
            raise
        try:
            with suppress(OSError):  # if there is no space, the writes fail
                os.posix_fallocate(descriptor, 0, size)
            self._copy(descriptor, buffers)
            os.ftruncate(descriptor, size)
        except OSError as error:
            os.ftruncate(descriptor, 0)
            if error.errno not in _UNABLE:
                raise
            return False
        finally:
            os.close(descriptor)
        return True

    def _copy(self, descriptor: int, buffers: Sequence[Buffer]) -> None:
        if self._buffer is None:
            self._memory = os.memfd_create("midstream-rows")
            os.ftruncate(self._memory, _BUFFER)
            self._buffer = mmap.mmap(self._memory, _BUFFER)
        offset = 0
        with memoryview(self._buffer) as staged:
            for part in _parts(buffers):
                filled = sum(map(len, part))
                self._write_at(self._memory, part, 0)
                whole = filled + -filled % _ALIGNMENT  # `write` cuts off the last part's padding
                self._write_at(descriptor, [staged[:whole]], offset)
                offset += filled


def _parts(buffers: Sequence[Buffer]) -> Iterator[list[memoryview]]:
    """Yield the bytes in parts; each part except the last fills the buffer."""
    part: list[memoryview] = []
    room = _BUFFER
    for buffer in buffers:
        rest = memoryview(buffer).cast("B")
        while len(rest):
            part.append(rest[:room])
            rest = rest[room:]
            room -= len(part[-1])
            if not room:
                yield part
                part = []
                room = _BUFFER
    if part:
        yield part
