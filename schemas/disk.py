"""Names a disk that takes no writes, in the words that users read, and tests whether a folder can be written."""

import errno
import os
import re
import tempfile
from pathlib import Path

#: What the operating system says, as it stands in an error → what users are told.
TROUBLES = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk full",
    errno.EROFS: "disk read-only",
}
#: The same in the texts of SQLite and Redis, which carry no number.
_TEXTS = {
    "disk full": re.compile(r"No space left on device|Disk quota exceeded|database or disk is full"),
    "disk read-only": re.compile(r"Read-only file system|readonly database"),
}
#: Bytes of a test write: what a page cache or a file system keeps in an inode would hide a full disk.
PROBE_BYTES = 16 << 10


def disk_trouble(error: BaseException | str) -> str:
    """`disk full` or `disk read-only` where that is what `error` is about; empty for any other error."""
    number = error.errno if isinstance(error, OSError) else None
    if number in TROUBLES:
        return TROUBLES[number]
    return next((trouble for trouble, pattern in _TEXTS.items() if pattern.search(str(error))), "")


def probe(folder: Path) -> str:
    """Why `folder` cannot be written, such as `disk full: /data/outbox cannot be written`; empty when it can, or is not there.

    Writes a file without a name, so nothing is left behind by a process that is killed.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.write(file.fileno(), bytes(PROBE_BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except OSError as error:
        return f"{disk_trouble(error) or error.strerror}: {folder} cannot be written"
    return ""
