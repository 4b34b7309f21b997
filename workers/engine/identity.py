"""Identity of a worker: its id, derived here if no setting gives one, and the id of its start."""

import os
import re
import socket
import uuid
from pathlib import Path

import msgspec

from ...broker.processes.private_files import locked_file
from ...schemas.base.errors import MidstreamError
from ...schemas.settings.settings import Settings

#: Id of this start of the process; receipts and leases carry it, so that leftovers of a previous
#: start are recognised.
BOOT = uuid.uuid4().hex


def with_worker_id(settings: Settings) -> Settings:
    """Returns the settings with `worker_id` filled in: stable over restarts, and valid as a file
    and node name.
    """
    kind = "-gradients" if settings.engine == "gradients" else ""
    needed = settings.worker_id or f"{socket.gethostname()}-{settings.served_model}{kind}"
    return msgspec.structs.replace(settings, worker_id=re.sub(r"[^A-Za-z0-9_.-]", "-", needed))


class WorkerLock:
    """A lock held for a worker's lifetime: a second live worker with the same id would release the
    jobs of the first.
    """

    def __init__(self, settings: Settings, patience_s: float = 5.0):
        """Raises MidstreamError("conflict") when another process holds the lock for longer than
        `patience_s` seconds.
        """
        folder = Path(settings.data_dir).resolve() / "workers"
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{settings.worker_id}.lock"
        self._file = locked_file(
            self.path,
            str(os.getpid()),
            patience_s,
            lambda holder: MidstreamError(
                "conflict",
                f"worker {settings.worker_id!r} is already running (pid {holder or 'unknown'}) in "
                f"{settings.data_dir}: use another worker_id",
                field="worker_id",
            ),
        )

    def release(self) -> None:
        self._file.close()
