"""Recognises errors of disks that take no writes, and tests whether a folder can be written."""

import errno
import re
import tempfile
from pathlib import Path

FULL, READ_ONLY = "disk full", "disk read-only"
#: Error number of the operating system → text for users.
TROUBLES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: READ_ONLY,
}
#: The same in the texts of SQLite and Redis, which carry no number.
_TEXTS = {
    FULL: re.compile(r"No space left on device|Disk quota exceeded|database or disk is full"),
    READ_ONLY: re.compile(r"Read-only file system|readonly database"),
}
#: Bytes of a test write: more than some file systems keep next to a file's name, where a full disk
#: would not show.
PROBE_BYTES = 16 << 10


def disk_trouble(error: BaseException | str) -> str:
    """`disk full` or `disk read-only` where that is what `error` is about; empty for any other
    error.
    """
    number = error.errno if isinstance(error, OSError) else None
    if number in TROUBLES:
        return TROUBLES[number]
    return next((trouble for trouble, pattern in _TEXTS.items() if pattern.search(str(error))), "")


def probe(folder: Path) -> str:
    """Return why `folder` cannot be written, such as `disk full: /data/outbox cannot be written`;
    empty when it can, or is not there.

    Writes a file without a name, so nothing is left behind by a process that is killed.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()  # which continues after a short write, and then fails
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{disk_trouble(error) or error.strerror}: {folder} cannot be written"
    return ""
