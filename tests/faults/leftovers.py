"""What do the processes of a stack leave on the machine: memory and semaphores in /dev/shm,
temporary files, processes, and file descriptors of those that still run?

Other stacks may run on the machine: memory counts if it was made since the beginning and no process
has it mapped, files if they are in the stack's own temporary folder, processes by their session,
which each process of a stack leads.
"""

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from stack import Stack

from midstream.broker.ledger.core.connection import MAX_CONNECTIONS
from midstream.broker.processes.leftovers import FOLDER, _mapped
from midstream_ops.processes import birth, members

#: Compiled code, which the next start uses.
KEPT = "torchinductor_"
#: Processes that a living process of the stack may have started since the beginning: they are
#: started when they are first needed (tokenisers, readers of sources, checks of formats).
SPARE_PROCESSES = 4
#: Descriptors of these and of open connections, beside those to Redis, which are kept once a load
#: has needed them.
SPARE_DESCRIPTORS = 64 + MAX_CONNECTIONS


@contextlib.contextmanager
def own_temporary_folder() -> Iterator[Path]:
    """A folder for the temporary files of everything that is started inside the block. Its path is
    short, because sockets are made in it.
    """
    folder = Path(tempfile.mkdtemp(prefix="gate-", dir="/tmp"))
    former = os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = str(folder)
    try:
        yield folder
    finally:
        del os.environ["TMPDIR"]
        if former is not None:
            os.environ["TMPDIR"] = former
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Census:
    """Counts what a stack holds: at its construction, when the stack is ready, and in `left`."""

    stack: Stack
    temporary: Path
    began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.files = self._files()
        self.processes = self._counts()

    def left(self) -> list[str]:
        """In words, what there is that was not there at the beginning."""
        return [
            *(f"{name} in {FOLDER} is mapped by no process" for name in self._unmapped()),
            *(
                f"{name} in the temporary folder"
                for name in sorted(self._files() - self.files)
                if not name.startswith(KEPT)
            ),
            *(f"process {name} outlived {leader}" for leader, name in self._orphans()),
            *self._grown(),
        ]

    def figures(self) -> dict[str, object]:
        """The counts themselves."""
        return {
            "unmapped": len(self._unmapped()),
            "files": len(self._files()),
            "orphans": len(self._orphans()),
            "processes and descriptors": {
                name: [self.processes.get(name), now] for name, now in self._counts().items()
            },
        }

    def _unmapped(self) -> list[str]:
        """Memory and semaphores made since the beginning."""
        made = [path for path in FOLDER.iterdir() if path.stat().st_mtime >= self.began]
        mapped = _mapped()
        return [path.name for path in made if path.exists() and path.stat().st_ino not in mapped]

    def _files(self) -> set[str]:
        """Without the folders of processes that run."""
        owners = [f"-{process.pid}-" for process in self.stack.processes.values()]
        names = {path.name for path in self.temporary.iterdir()}
        return {name for name in names if not any(owner in name for owner in owners)}

    def _orphans(self) -> list[tuple[int, str]]:
        """Session of a process that has ended → name of a process that has not."""
        running = {process.pid for process in self.stack.processes.values()}
        found = []
        for leader, born in self.stack.sessions.items():
            # The kernel gives a leader's pid to another process once its session has no member.
            if leader in running or birth(leader) not in (0, born):
                continue
            for pid in members(leader):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.append((leader, psutil.Process(pid).name()))
        return found

    def _counts(self) -> dict[str, tuple[int, int]]:
        """Name in the stack → its processes, and their descriptors together."""
        counts = {}
        for name, process in self.stack.processes.items():
            opened = []
            for pid in members(process.pid):
                with contextlib.suppress(psutil.NoSuchProcess):
                    opened.append(psutil.Process(pid).num_fds())
            counts[name] = len(opened), sum(opened)
        return counts

    def _grown(self) -> Iterator[str]:
        for name, (processes, descriptors) in self._counts().items():
            before, opened = self.processes.get(name, (0, 0))
            if processes > before + SPARE_PROCESSES:
                yield f"{name} has {processes} processes, at first {before}"
            if descriptors > opened + SPARE_DESCRIPTORS:
                yield f"{name} has {descriptors} descriptors, at first {opened}"
