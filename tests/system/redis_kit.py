"""What must a test wait for before it kills Redis?"""

import time

import redis


def handed_over(url: str, timeout: float = 20.0) -> None:
    """Wait until the kernel has all that Redis has answered.

    While its last background fsync runs, a Redis that syncs every second holds writes back for up to 2 s (docs/reliability.md).
    """
    deadline = time.monotonic() + timeout
    with redis.Redis.from_url(url) as client:
        while client.info("persistence")["aof_buffer_length"]:
            assert time.monotonic() < deadline, "Redis cannot write"
            time.sleep(0.01)
