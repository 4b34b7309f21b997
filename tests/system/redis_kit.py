"""What may a test do to a Redis that it kills?"""

import subprocess
import time
from pathlib import Path

import redis
from wait_kit import wait_until

#: Seconds that the disk takes for an fsync; while it does, Redis holds writes back, and answers.
SLOW_S = 1.0
_SLOW = f"""
#include <sys/syscall.h>
#include <unistd.h>
int fdatasync(int file) {{ usleep({SLOW_S * 1e6:.0f}); return syscall(SYS_fdatasync, file); }}
"""


def handed_over(url: str, timeout: float = 60.0) -> None:
    """Wait until the kernel has all that Redis has answered: for what no API has promised to
    anybody.
    """
    with redis.Redis.from_url(url) as client:
        wait_until(lambda: client.info("persistence")["aof_buffer_length"] == 0, timeout)


def slow_disk(directory: Path) -> str:
    """What `LD_PRELOAD` must name so that every fsync of the log takes `SLOW_S`."""
    library = directory / "slow_disk.so"
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-o", library, "-xc", "-"], input=_SLOW.encode(), check=True
    )
    return str(library)


def hold_back(url: str, timeout: float = 60.0) -> None:
    """Return while a Redis on a slow disk holds back what it is told, just after it wrote what it
    had held back before.
    """
    deadline = time.monotonic() + timeout
    with redis.Redis.from_url(url) as client:
        most = 0
        while True:
            client.set("something", "to write")
            held_back = client.info("persistence")["aof_buffer_length"]
            if 0 < held_back < most:
                return
            most = max(most, held_back)
            assert time.monotonic() < deadline, "nothing was held back"
            time.sleep(0.01)
