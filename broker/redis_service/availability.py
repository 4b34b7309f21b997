"""Distinguishes an unavailable or read-only Redis from an invalid request, and waits until Redis
accepts writes.
"""

import logging
import time
from collections.abc import Callable

import redis
import redis.exceptions

from ...storage.disk import disk_trouble
from . import opening as redis_open

log = logging.getLogger(__name__)

#: Codes of errors that may pass with time. Inside a script, Redis 6.2 returns plain errors with the
#: code in the text.
CODES = (
    "LOADING",
    "BUSY ",
    "MISCONF",
    "OOM",
    "READONLY",
    "NOREPLICAS",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "TRYAGAIN",
    "UNBLOCKED",
)
#: redis-py drops the code of an error that it has a class for.
_CLASSES = (
    redis.exceptions.ConnectionError,
    redis.exceptions.TimeoutError,
    redis.exceptions.ReadOnlyError,
    redis.exceptions.OutOfMemoryError,
    redis.exceptions.ClusterDownError,
    redis.exceptions.TryAgainError,
    # redis-py loads a missing script and then calls it by its hash: Redis was restarted in between
    redis.exceptions.NoScriptError,
)
#: Written to test whether Redis takes writes.
PROBE_KEY = "ms:probe"
FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0


class LossyRedis(redis.exceptions.ConnectionError):
    """Redis may lose what it confirms, after a change of its configuration: nothing is accepted
    until that is undone.
    """


def is_redis_unavailable(error: BaseException) -> bool:
    """Return whether Redis is unreachable, loading, restarted during the call, read-only, full,
    unable to write or in a long script: the request is not at fault.
    """
    if isinstance(error, _CLASSES):
        return True
    return isinstance(error, redis.exceptions.ResponseError) and any(
        code in str(error) for code in CODES
    )


def detail_of(error: BaseException) -> str:
    """Return the text of the error for users."""
    if isinstance(error, LossyRedis):
        return str(error)
    if trouble := disk_trouble(str(error)):
        return f"{trouble}: Redis cannot write its log"
    if isinstance(error, redis.exceptions.NoScriptError):
        return "the job ledger is unavailable: Redis was restarted during the call"
    read_only = redis.exceptions.ReadOnlyError
    full = redis.exceptions.OutOfMemoryError
    refuses = "Redis refuses writes: " if isinstance(error, read_only | full) else ""
    return f"the job ledger is unavailable: {refuses}{error}"


def await_writes(url: str, check: Callable[[], object] = lambda: None) -> None:
    """Return once the Redis at `url` accepts a write; `check` is called before each try and may
    raise to give up.

    Raises redis.RedisError for errors that are not temporary (`is_redis_unavailable`).
    """
    pause = FIRST_PAUSE_S
    with redis_open.client(url, socket_timeout=5, socket_connect_timeout=5, retry=None) as client:
        while True:
            check()
            try:
                client.set(PROBE_KEY, 1, ex=60)
                return
            except redis.RedisError as error:
                if not is_redis_unavailable(error):
                    raise
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
