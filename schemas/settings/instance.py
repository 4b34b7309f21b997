"""Identifies the running stack that a process belongs to: the same name for `midstream up`, its
API, and a client on its machine.
"""

import hashlib
from pathlib import Path

#: Indices of fields in `/proc/<pid>/stat`, where 0 is the field after the process's name (field 3
#: in proc(5)).
_STATE, _STARTTIME = 0, 19


def instance_of(pid: int) -> str:
    """Return the name of the stack whose `midstream up` is process `pid`; empty if there is none.

    Boot, pid and start time together identify a process, even after the pid is reused. A state file
    from an earlier boot, or of a process that has ended, therefore matches no stack.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        # the fields after the process's name, which may contain any character
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no such process, or no Linux
        return ""
    if fields[_STATE] == "Z":
        return ""
    return hashlib.sha256(f"{boot} {pid} {fields[_STARTTIME]}".encode()).hexdigest()[:16]
