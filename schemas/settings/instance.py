"""Identifies the running stack that a process belongs to: the same name for `midstream up`, its
API, and a client on its machine.
"""

import hashlib
from pathlib import Path

#: Indices of fields in `/proc/<pid>/stat`, where 0 is the field after the process's name (field 3
#: in proc(5)).
STATE = 0
SESSION = 3
STARTTIME = 19


def instance_of(pid: int) -> str:
    """Return the name of the stack whose `midstream up` is process `pid`; empty if there is none.

    Boot, pid and start time together identify a process, even after the pid is reused. A state file
    from an earlier boot, or of a process that has ended, therefore matches no stack.
    """
    if not (fields := stat_of(pid)):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return hashlib.sha256(f"{boot} {pid} {fields[STARTTIME]}".encode()).hexdigest()[:16]


def stat_of(pid: int) -> list[str]:
    """Return the fields of `/proc/<pid>/stat` after the process's name (the name may contain any
    character); empty if the process is gone or a zombie, and on systems other than Linux.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[STATE] == "Z" else fields
