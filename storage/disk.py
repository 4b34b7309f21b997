"""Recognises errors of full or read-only disks, and tests whether a folder can be written."""

import errno
import re
import tempfile
from pathlib import Path

FULL = "disk full"
READ_ONLY = "disk read-only"
#: Error number of the operating system → text for users.
TROUBLES = {
    errno.ENOSPC: FULL,
    errno.EDQUOT: FULL,
    errno.EROFS: READ_ONLY,
}
#: The same errors in the texts of SQLite and Redis, which have no error number.
_TEXTS = {
    FULL: re.compile(r"No space left on device|Disk quota exceeded|database or disk is full"),
    READ_ONLY: re.compile(r"Read-only file system|readonly database"),
}
#: Bytes of a test write: more than some file systems store in the inode, where a full disk would
#: not show.
PROBE_BYTES = 16 << 10


def disk_trouble(error: BaseException | str) -> str:
    """Returns `disk full` or `disk read-only` if `error` means that; empty for other errors."""
    number = error.errno if isinstance(error, OSError) else None
    if number in TROUBLES:
        return TROUBLES[number]
    return next((trouble for trouble, pattern in _TEXTS.items() if pattern.search(str(error))), "")


def probe(folder: Path) -> str:
    """Return why `folder` cannot be written, such as `disk full: /data/outbox cannot be written`;
    empty if it can be written or does not exist.

    Writes a file without a name, so nothing is left behind by a process that is killed.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(PROBE_BYTES))
            file.flush()  # retries after a partial write, so that a full disk raises
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{disk_trouble(error) or error.strerror}: {folder} cannot be written"
    return ""
