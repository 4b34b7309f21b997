"""Private folders: creation with mode 700; and files that one process at a time holds.

Redis, SQLite and loggers choose the modes of their files, so the folder has to keep other accounts
of the machine out: of the ledger's log (prompts, outputs, secrets of webhooks), of the outboxes
(receipts) and of the processes' logs. Capture files are not in such folders: other accounts may be
meant to read them, so the umask decides their mode.
"""

import fcntl
import logging
import os
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

log = logging.getLogger(__name__)

OWNER_ALONE = 0o700


def private_folder(path: Path) -> Path:
    """Return `path`, created for its owner alone if it is missing.

    An existing folder is closed to all but its owner and group: group permissions are the
    operator's choice and stay.
    """
    path.mkdir(mode=OWNER_ALONE, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & stat.S_IRWXO:
        try:
            path.chmod(mode & ~stat.S_IRWXO)
        except PermissionError:
            log.warning(
                "%s is accessible to every account and owned by another: run chmod o-rwx on it",
                path,
            )
    return path


def kept_secret(path: Path, make: Callable[[], str]) -> str:
    """Return the secret in a file that only its owner can read; `make` creates one if the file does
    not exist or is empty.

    Written to another file and renamed, so that a crash leaves no incomplete secret.
    """
    private_folder(path.parent)
    try:
        text = path.read_text().strip()
    except FileNotFoundError:
        text = ""
    if not text:
        aside = path.with_name(f".{path.name}.{os.getpid()}")
        with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            text = make()
            file.write(f"{text}\n")
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    return text


def locked_file(
    path: Path, holder: str, wait_s: float, refused: Callable[[str], Exception]
) -> IO[str]:
    """Return the file at `path`, locked until it is closed or the process dies, with `holder` as
    its text. Raises what `refused` makes of the text of the process that still has it after
    `wait_s`.
    """
    file = path.open("a+", encoding="utf-8")
    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError:
            if time.monotonic() >= deadline:
                file.seek(0)
                with file:
                    raise refused(file.read().strip()) from None
            time.sleep(0.05)
    file.truncate(0)
    file.write(holder)
    file.flush()
    return file
