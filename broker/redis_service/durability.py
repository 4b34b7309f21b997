"""Refuses a Redis that may forget accepted jobs: one without an append-only file, or one that
evicts keys when it is full.

`INFO` reports both; managed services that forbid `CONFIG` allow it.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import redis

from ...schemas.base.errors import MidstreamError
from ...schemas.settings.settings import Settings, SettingsError
from . import opening as redis_open
from .availability import LossyRedis, is_redis_unavailable
from .ledger_schema import claim_redis

log = logging.getLogger(__name__)

EXIT_BAD_SETTINGS = 2
TIMEOUT_S = 5.0
#: Seconds between two checks of a Redis that was unreachable, or loaded its log, at the start.
ASK_AGAIN_S = 1.0
#: Seconds between two lines about the progress of loading.
PROGRESS_S = 10.0
#: Seconds after which a load without progress is an error.
STALLED_S = 60.0

#: The answer to INFO, or sections of it.
RedisInfo = dict[str, Any]


def dangers(info: RedisInfo) -> list[str]:
    """Return why a Redis with this `info` may forget jobs; empty if it does not."""
    result = []
    if not info.get("aof_enabled", True) and not info.get("loading"):
        # the file counts as off while it is loaded
        result.append("it has no append-only file (`CONFIG SET appendonly yes`)")
    if (policy := info.get("maxmemory_policy", "noeviction")) != "noeviction":
        result.append(
            f"it evicts keys when full: maxmemory-policy is {policy} (`CONFIG SET "
            "maxmemory-policy noeviction`)"
        )
    return result


def refuse_lossy(info: RedisInfo, allowed: bool) -> None:
    """Raise LossyRedis, unless `allowed`, for a Redis that was durable when this process began, and
    no longer is.
    """
    if not allowed and (result := dangers(info)):
        raise LossyRedis(f"{_refusal(result)}; until one of these is done, nothing is accepted")


def _refusal(result: list[str]) -> str:
    return (
        f"this Redis may lose accepted jobs: {'; '.join(result)}; set "
        "MIDSTREAM_REDIS_ALLOW_LOSSY=true to allow this"
    )


def require(settings: Settings, end: Callable[[int], object] = os._exit) -> None:
    """Raise SettingsError for a Redis that may forget jobs, unless `redis_allow_lossy` is set.

    A thread checks a Redis that is unreachable, or that loads its log, until it is ready, and ends
    the process if that Redis may forget jobs, or makes no progress in loading.
    """
    load = LogLoading()
    if not _decide(settings, load):
        threading.Thread(
            target=_ask_later, args=(settings, load, end), name="redis durability", daemon=True
        ).start()


class LogLoading:
    """The progress of a Redis that loads its log."""

    def __init__(self) -> None:
        self._loaded = -1
        self._deadline = self._log_at = 0.0

    def watch(self, info: RedisInfo) -> bool:
        """Return whether Redis is loading, by INFO; logs the progress.

        Raises SettingsError if there was no progress for `STALLED_S`.
        """
        if not info.get("loading"):
            return False
        loaded = info.get("loading_loaded_bytes", 0)
        at = time.monotonic()
        if loaded != self._loaded:
            self._loaded = loaded
            self._deadline = at + STALLED_S
        elif at > self._deadline:
            raise SettingsError(
                f"redis_url: Redis loads its log, and has made no progress for {STALLED_S:.0f} "
                f"s, at byte {loaded}"
            )
        if at >= self._log_at:
            self._log_at = at + PROGRESS_S
            percent = info.get("loading_loaded_perc", 0)
            remaining = info.get("loading_eta_seconds", 0)
            log.warning(
                "waiting for Redis, which loads its log: %s %%, about %s s left", percent, remaining
            )
        return True


def _decide(settings: Settings, load: LogLoading) -> bool:
    """Return whether Redis has answered and has loaded its log. Raises SettingsError, also for data
    of a version that this one cannot read.
    """
    try:
        with redis_open.client(
            settings.redis_url,
            socket_timeout=TIMEOUT_S,
            socket_connect_timeout=TIMEOUT_S,
            retry=None,
        ) as client:
            info = client.info()
            if load.watch(info):
                return False  # the append-only file counts as off while it is loaded
            _refuse_dangers(info, settings)
            claim_redis(client)
    except MidstreamError as error:
        raise SettingsError(f"redis_url: {error}") from error
    except redis.RedisError as error:
        if is_redis_unavailable(error):
            return False
        raise SettingsError(f"redis_url: Redis does not answer: {error}") from error
    return True


def _refuse_dangers(info: RedisInfo, settings: Settings) -> None:
    """Raise SettingsError for a Redis that may forget jobs, or warn of it if that is allowed."""
    result = dangers(info)
    if result and not settings.redis_allow_lossy:
        raise SettingsError(f"redis_url: {_refusal(result)}")
    if result:
        log.warning(
            "redis_allow_lossy is set; this Redis may lose accepted jobs: %s", "; ".join(result)
        )


def _ask_later(settings: Settings, load: LogLoading, end: Callable[[int], object]) -> None:
    try:
        while not _decide(settings, load):
            time.sleep(ASK_AGAIN_S)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        end(EXIT_BAD_SETTINGS)
