"""Shared memory of an engine's processes: named after the data directory, so that what killed
processes left in /dev/shm, which is memory, is found and removed.

Python removes it in a process of its own (`multiprocessing.resource_tracker`), which is killed with
the others when a worker's whole group is.
"""

import hashlib
import secrets
from contextlib import suppress
from multiprocessing import shared_memory, synchronize
from pathlib import Path

FOLDER = Path("/dev/shm")


def name_after(data: Path) -> None:
    """Name the shared memory and the semaphores that this process creates from here on after the
    data directory.
    """
    prefix = _prefix(data)
    # joblib replaces how semaphores are named, but not where it gets their random part from
    synchronize.SemLock._rand = iter(lambda: prefix + secrets.token_hex(8), "")  # type: ignore[attr-defined]
    shared_memory._make_filename = lambda: f"/{prefix}{secrets.token_hex(8)}"  # type: ignore[attr-defined]


def remove_left(data: Path) -> None:
    """Remove what processes of the data directory have left, unless a living process has it
    mapped.
    """
    left = [*FOLDER.glob(f"*{_prefix(data)}*")]
    mapped = _mapped() if left else set()
    for path in left:
        with suppress(OSError):  # its own process removes it, or it is another account's
            if path.stat().st_ino not in mapped:
                path.unlink()


def _prefix(data: Path) -> str:
    return f"midstream-{hashlib.sha256(str(data.resolve()).encode()).hexdigest()[:12]}-"


def _mapped() -> set[int]:
    """Return the inodes in /dev/shm that processes of this account have mapped. (A semaphore's
    creator has mapped it under another name.)
    """
    found = set[int]()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it ended, or belongs to another account, which cannot map them
            lines = maps.read_text(errors="replace").splitlines()
            found.update(int(line.split()[4]) for line in lines if f"{FOLDER}/" in line)
    return found
