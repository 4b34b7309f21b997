"""Checks of Redis: its answers, memory, append-only file and users."""

import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from midstream.schemas.settings.settings import Settings

from .finding import TIMEOUT_S, CheckFinding, Level, clock_finding, graded, timed
from .service import Service

#: Milliseconds of a round trip to Redis: above the first, held responses and receipts are slow;
#: above the second, everything is slow.
PING_WARN_MS = 5.0
PING_FAIL_MS = 50.0
#: Share of Redis' memory limit in use that causes a warning.
MEMORY_WARN = 0.7
PINGS = 20


def redis_server(service: Service) -> Iterator[CheckFinding]:
    """Check that Redis answers, and then everything about it. Raises redis.RedisError."""
    if not service.redis_url:
        found = "Redis URL not configured, and no `midstream up` is running on the data directory"
        advice = (
            "set MIDSTREAM_REDIS_URL, or set MIDSTREAM_DATA_DIR to the data directory of a "
            "running `midstream up`"
        )
        yield CheckFinding("warn", "redis", found, advice)
        return
    from midstream.broker.redis_service import opening as redis_open

    from ..advisories import advisory
    from ..redis_server import OLDEST

    client = redis_open.client(
        service.redis_url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S
    )
    info: dict[str, Any] = client.info()
    version = str(info["redis_version"])
    known = tuple(int(part) for part in version.split(".")[:2])
    valkey = f" (Valkey {info['valkey_version']})" if "valkey_version" in info else ""
    found = f"version {version}{valkey}, clients: {info['connected_clients']}"
    least = f"{'.'.join(map(str, OLDEST))} or later is required"
    yield graded("redis", known < OLDEST, found, least)
    if faults := advisory(info):
        yield CheckFinding("warn", "redis version", faults)
    middle, text = timed(PINGS, client.ping)  # which raises while writes are refused
    service.redis_answers = True
    advice = "move Redis closer, and check for slow commands: `redis-cli slowlog get`"
    yield graded("redis latency", middle, f"{text} pings", advice, PING_WARN_MS, PING_FAIL_MS)
    yield from _memory(info, service.settings)
    yield from _durability(info, _config(client, "appendfsync"))
    yield from default_user(client, known)
    seconds, micros = client.time()
    yield clock_finding("redis clock", seconds + micros / 1e6 - time.time())


def _memory(info: dict[str, Any], settings: Settings) -> Iterator[CheckFinding]:
    policy = str(info["maxmemory_policy"])
    used = int(info["used_memory"])
    limit = int(info["maxmemory"])
    evicts = policy != "noeviction"
    loss = ": accepted jobs are lost when memory is full" if evicts else ""
    advice = "`CONFIG SET maxmemory-policy noeviction`, and the same in Redis' configuration"
    yield graded("redis eviction", evicts, f"maxmemory-policy is {policy}{loss}", advice)
    if removed := int(info["evicted_keys"]):
        text = f"keys evicted since Redis started: {removed}; jobs are lost"
        yield CheckFinding("fail", "redis eviction", text, "resubmit the missing jobs")
    share = used / limit if limit else 0.0
    most = settings.tuning.redis_fill_limit
    text = (
        f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB used ({share:.0%}); submissions are "
        f"answered with 503 from {most:.0%}"
        if limit
        else f"{used / 2**20:.0f} MiB used, no limit (maxmemory 0)"
    )
    advice = "raise maxmemory, or let results expire sooner (result_ttl_s)"
    yield graded("redis memory", share, text, advice, MEMORY_WARN, most)


def default_user(client: Any, version: tuple[int, ...]) -> Iterator[CheckFinding]:
    """Yield whether a restart would drop data for want of the default user's rights, see
    `broker.redis_service.acl`. Nothing if this user may not ask.
    """
    import redis

    with suppress(redis.RedisError):
        if version >= (7, 0) and "+@all" not in client.acl_getuser("default")["categories"]:
            yield CheckFinding(
                "fail",
                "redis users",
                "the user default lacks rights to load the AOF: a restart drops jobs",
                "`ACL SETUSER default off ~* &* +@all`, and the same in its aclfile, before a "
                "restart",
            )


def _durability(info: dict[str, Any], appendfsync: str | None) -> Iterator[CheckFinding]:
    """Judge the append-only file."""
    if {info.get(f"aof_last_{kind}_status", "ok") for kind in ("write", "bgrewrite")} != {"ok"}:
        advice = "check Redis' log and its free disk space"
        yield CheckFinding("fail", "redis AOF", "the last write or rewrite failed", advice)
    on = f"on, appendfsync {appendfsync}: may lose"
    loaded = info.get("loading_loaded_perc", 0)
    cases: tuple[tuple[bool, Level, str, str], ...] = (
        # while loading, Redis reports the AOF as off
        (
            bool(int(info.get("loading", 0))),
            "warn",
            f"is being loaded: {loaded} %",
            "wait until it is loaded",
        ),
        (
            not int(info["aof_enabled"]),
            "fail",
            "off: jobs accepted since the last snapshot are lost on restart",
            "`CONFIG SET appendonly yes`, and the same in Redis' configuration",
        ),
        (
            appendfsync == "no",
            "fail",
            "appendfsync is no: the last 30 seconds may be lost",
            "`CONFIG SET appendfsync everysec`",
        ),
        (appendfsync is None, "ok", "on; this user is not allowed to read appendfsync", ""),
        (appendfsync == "always", "ok", f"{on} nothing", ""),
        (True, "ok", f"{on} up to a second of accepted jobs if its machine fails", ""),
    )
    yield next(
        CheckFinding(level, "redis AOF", found, advice)
        for holds, level, found, advice in cases
        if holds
    )


def _config(client: Any, name: str) -> str | None:
    """Return a configuration value of Redis; None if this user may not read it."""
    import redis

    try:
        result = client.config_get(name)
    except redis.ResponseError:  # ACL: no permission
        return None
    return str(result.get(name)) if name in result else None
