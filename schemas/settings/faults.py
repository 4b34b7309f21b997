"""Crash points for tests: named places, one at every durable boundary, where a process can be
killed.

`MIDSTREAM_FAULT=crash:at=relay.committed` kills the first process of the stack that reaches this
point, with SIGKILL, once: a file in the data directory records it. Without the setting, a point
costs one comparison. `tests/faults/test_crash_points.py` kills at every point, and checks what must
hold for the job.
"""

import os
import re
import signal
from pathlib import Path

from .settings import SettingsError

#: Name → what has been done at this point; and what has not.
CRASH_POINTS: dict[str, str] = {
    "api.committed": (
        "the job is in the ledger and its message in the queue; its client has no response"
    ),
    "worker.received": "a worker has the message; it has not claimed the job",
    "worker.claimed": "the job is claimed; the engine has not been called",
    "worker.generated": "the engine has finished; the outputs are not stored",
    "worker.stored": "the outputs are stored; the message is not acknowledged",
    "worker.released": (
        "a dead engine's job has been requeued; the message of its last attempt is not acknowledged"
    ),
    "worker.aborted": "a cancelled job has left the engine; the ledger has not been updated",
    "capture.written": "a capture's file is written under its temporary name",
    "capture.renamed": (
        "the file has its final name; the directory is not synced, and no receipt names it"
    ),
    "segment.written": "rows are in a segment; its index does not name them",
    "segment.indexed": "the index names them; no receipt does",
    "receipt.stored": "a receipt is in the outbox; it has not been sent",
    "receipt.sent": "a receipt has been sent; it has not been acknowledged",
    "relay.received": "the relay has received receipts; they are not committed",
    "relay.committed": "the receipts are committed; they are not acknowledged",
    "sweep.kept": "one cell of a sweep is stored; the next is not",
    "attribution.kept": "the estimates of one pair are stored; those of the next are not",
    "attribution.estimated": "all pairs are estimated; the job is not handed on",
    "attribution.handed": "the job waits for a vLLM worker; the message is not acknowledged",
    "harvest.planned": "the plan of a harvest is durable; the ledger has not recorded it",
    "harvest.written": "all shards of a unit are durable and reported; the unit is not committed",
    "harvest.kept": "the unit is committed; the next is not",
    "harvest.part": "the manifest of a part is durable; the ledger has not recorded the part",
    "harvest.surveyed": "the file of a survey is durable; the ledger has not recorded it",
    "harvest.sealing": "files of superseded attempts are removed; the harvest has no manifest",
    "sweeper.requeued": (
        "a dead worker's job has been requeued; the other jobs that are due have not been checked"
    ),
    "webhook.lent": "a webhook is leased to a sender; it has not been sent",
    "webhook.sent": "its receiver has it; that is not recorded",
}

#: Folder in the data directory with a file for each point that has killed a process.
FOLDER = "faults"
_FAULT = re.compile(r"(?:^|[;,])crash:at=([a-z.]+)")

_armed = ""
_folder = Path()


def arm(fault: str, data_dir: str | Path) -> None:
    """Let this process die at the crash point that the setting `fault` names, if any. Called once,
    when the process starts.

    Raises SettingsError for an unknown point.
    """
    global _armed, _folder
    match = _FAULT.search(fault)
    if match is not None and match[1] not in CRASH_POINTS:
        raise SettingsError(
            f"MIDSTREAM_FAULT={fault}: unknown crash point {match[1]!r}; valid: "
            f"{', '.join(CRASH_POINTS)}"
        )
    _armed = match[1] if match else ""
    _folder = Path(data_dir).resolve() / FOLDER


def crash_point(name: str) -> None:
    """Kill this process if `name` is the armed point and has not killed a process before.

    An empty name has no effect.
    """
    if _armed and name == _armed:
        _crash(name)


def _crash(name: str) -> None:
    _folder.mkdir(parents=True, exist_ok=True)
    try:
        os.close(os.open(_folder / name, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
    except FileExistsError:
        return
    os.kill(os.getpid(), signal.SIGKILL)
