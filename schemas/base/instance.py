"""Identifies the running stack that a process belongs to: the same name for `midstream up`, its
API, and a client on its machine.
"""

import hashlib
from pathlib import Path

#: Places in `/proc/<pid>/stat`, counted from behind the name (proc(5) counts from 1 with pid and
#: name).
_STATE, _STARTTIME = 0, 19


def instance_of(pid: int) -> str:
    """The name of the stack whose `midstream up` is process `pid`; empty if there is none.

    Boot, pid and start time name a process for good, so that a state file of another boot or of a
    process that is gone matches nothing.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # behind the name, which may hold anything
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no such process, or no Linux
        return ""
    if fields[_STATE] == "Z":
        return ""
    return hashlib.sha256(f"{boot} {pid} {fields[_STARTTIME]}".encode()).hexdigest()[:16]
