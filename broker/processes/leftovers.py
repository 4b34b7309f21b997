"""Shared memory and temporary files of an engine's processes: named after the data directory, so
that what killed processes left in /dev/shm, which is memory, and in the temporary folder is found
and removed.

Python removes it in a process of its own (`multiprocessing.resource_tracker`), which is killed with
the others when a worker's whole group is.
"""

import hashlib
import os
import secrets
import shutil
import tempfile
from contextlib import suppress
from multiprocessing import shared_memory, synchronize
from pathlib import Path

FOLDER = Path("/dev/shm")
TEMPORARY = Path(tempfile.gettempdir())
#: Characters of `TEMPORARY` with which a folder inside it still has room for vLLM's sockets: the
#: path of a socket has 107 at most.
LONGEST = 31


def name_after(data: Path) -> None:
    """Name the shared memory and the semaphores that this process creates from here on after the
    data directory.
    """
    prefix = _prefix(data)
    # joblib replaces how semaphores are named, but not where it gets their random part from
    synchronize.SemLock._rand = iter(lambda: prefix + secrets.token_hex(8), "")  # type: ignore[attr-defined]
    shared_memory._make_filename = lambda: f"/{prefix}{secrets.token_hex(8)}"  # type: ignore[attr-defined]


def own_temporary_folder(data: Path) -> None:
    """Have this process, and those that it starts, make temporary files in a folder of its own.
    vLLM leaves sockets and a file there.
    """
    # Compiled code stays outside of it, for the next start.
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"{TEMPORARY}/torchinductor_{os.getuid()}")
    if len(str(TEMPORARY)) <= LONGEST:
        prefix = f"{_prefix(data)}{os.getpid()}-"
        folder = tempfile.mkdtemp(prefix=prefix)
        os.environ["TMPDIR"] = folder
        tempfile.tempdir = folder


def remove_left(data: Path) -> None:
    """Remove what processes of the data directory have left: shared memory, unless a living process
    has it mapped, and temporary folders, unless another living process made them.
    """
    left = [*FOLDER.glob(f"*{_prefix(data)}*")]
    for folder in TEMPORARY.glob(f"{_prefix(data)}*"):
        pid = folder.name.split("-")[2]
        # In a container, the next process often has the same number as the former.
        if pid == str(os.getpid()) or not Path("/proc", pid).exists():
            # vLLM names the memory that ranks share after the file through which they meet.
            left += [path for file in folder.iterdir() for path in FOLDER.glob(f"{file.name}-*")]
            shutil.rmtree(folder, ignore_errors=True)
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
