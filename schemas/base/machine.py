"""Facts about the machine that this process runs on."""

import os
from contextlib import suppress
from pathlib import Path

#: Limits of a container, of control groups of version 2 and 1, beside the machine's memory.
_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def host_bytes() -> int:
    """Return the bytes of memory of this machine, or of the container if that is less."""
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for file in _LIMITS:
        with suppress(OSError, ValueError):  # no limit
            sizes.append(int(file.read_text()))
    return min(sizes)
