"""Refuses a Redis that may forget accepted jobs: one without an append-only file, or one that evicts keys when it is full.

`INFO` reports both; managed services that forbid `CONFIG` allow it.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import redis

from ...schemas.settings import SENTINEL_SCHEMES, Settings, SettingsError
from . import redis_open
from .redis_availability import is_absence

log = logging.getLogger(__name__)

EXIT_BAD_SETTINGS = 2
TIMEOUT_S = 5.0
#: Seconds between two checks of a Redis that was unreachable at the start.
ASK_AGAIN_S = 1.0


def dangers(info: dict[str, Any]) -> list[str]:
    """Why a Redis that answers INFO like this may forget jobs; empty when it does not."""
    found = []
    if not info.get("aof_enabled"):
        found.append("it has no append-only file (`CONFIG SET appendonly yes`)")
    if (policy := info.get("maxmemory_policy")) != "noeviction":
        found.append(f"it evicts keys when full: maxmemory-policy is {policy} (`CONFIG SET maxmemory-policy noeviction`)")
    return found


def require(settings: Settings, end: Callable[[int], object] = os._exit) -> None:
    """Raise SettingsError for a Redis that may forget jobs, unless `redis_allow_lossy` is set.

    A thread checks an unreachable Redis until it answers, and ends the process if that Redis may forget jobs.
    """
    if urlsplit(settings.redis_url).scheme in SENTINEL_SCHEMES and not (settings.redis_replicas or settings.redis_allow_lossy):
        raise SettingsError(
            "redis_replicas is 0, and redis_url names sentinels: a failover would lose jobs that no replica had yet; set it to 1 or more, "
            "or set MIDSTREAM_REDIS_ALLOW_LOSSY=true to allow this"
        )
    if not _decide(settings):
        threading.Thread(target=_ask_later, args=(settings, end), name="redis durability", daemon=True).start()


def _decide(settings: Settings) -> bool:
    """Whether Redis has answered. Raises SettingsError."""
    try:
        with redis_open.client(settings.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=None) as client:
            found = dangers(client.info())
    except redis.RedisError as error:
        if is_absence(error):
            return False
        raise SettingsError(f"redis_url: Redis does not answer INFO: {error}") from error
    if found and not settings.redis_allow_lossy:
        raise SettingsError(
            f"redis_url: this Redis may lose accepted jobs: {'; '.join(found)}; set MIDSTREAM_REDIS_ALLOW_LOSSY=true to allow this"
        )
    if found:
        log.warning("redis_allow_lossy is set; this Redis may lose accepted jobs: %s", "; ".join(found))
    return True


def _ask_later(settings: Settings, end: Callable[[int], object]) -> None:
    try:
        while not _decide(settings):
            time.sleep(ASK_AGAIN_S)
    except SettingsError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        end(EXIT_BAD_SETTINGS)
