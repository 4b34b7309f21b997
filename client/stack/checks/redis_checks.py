"""Checks of Redis: its answers, memory, append-only file and users."""

import statistics
import time
from collections.abc import Iterator
from typing import Any

from ....schemas.base.settings import Settings
from .finding import TIMEOUT_S, Finding, Level, clock_finding

#: Milliseconds of a round trip to Redis: above the first, held responses and receipts are slow;
#: above the second, everything is slow.
PING_WARN_MS, PING_FAIL_MS = 5.0, 50.0
#: Share of Redis' memory limit in use that causes a warning.
MEMORY_WARN = 0.7
PINGS = 20


def redis_server(url: str, settings: Settings) -> Iterator[Finding]:
    """Check that Redis answers, and then everything about it."""
    import redis

    from ....broker.ops import redis_open
    from ....broker.ops.redis_server import OLDEST

    client = redis_open.client(url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)
    try:
        info: dict[str, Any] = client.info()
    except redis.AuthenticationError as error:
        yield Finding(
            "fail",
            "redis",
            f"access denied: {error}",
            "set MIDSTREAM_REDIS_PASSWORD, or the user in MIDSTREAM_REDIS_URL",
        )
        return
    except (redis.RedisError, OSError) as error:
        yield Finding(
            "fail",
            "redis",
            f"does not answer: {error}",
            "start Redis, and check MIDSTREAM_REDIS_URL and the network",
        )
        return
    version = str(info["redis_version"])
    known = tuple(int(part) for part in version.split(".")[:2])
    if known < OLDEST:
        least = ".".join(map(str, OLDEST))
        yield Finding("fail", "redis", f"version {version}", f"{least} or later is required")
    else:
        valkey = f" (Valkey {info['valkey_version']})" if "valkey_version" in info else ""
        clients = info["connected_clients"]
        yield Finding("ok", "redis", f"version {version}{valkey}, clients: {clients}")
    yield from _latency(client)
    yield from _memory(info, settings)
    yield from _durability(info, _config(client, "appendfsync"))
    yield from default_user(client, known)
    seconds, micros = client.time()
    yield clock_finding("redis clock", seconds + micros / 1e6 - time.time())


def _latency(client: Any) -> Iterator[Finding]:
    took = []
    for _ in range(PINGS):
        began = time.perf_counter()
        client.ping()
        took.append((time.perf_counter() - began) * 1000)
    middle = statistics.median(took)
    level: Level = "fail" if middle > PING_FAIL_MS else "warn" if middle > PING_WARN_MS else "ok"
    advice = (
        ""
        if level == "ok"
        else "move Redis closer, and check for slow commands: `redis-cli slowlog get`"
    )
    yield Finding(
        level,
        "redis latency",
        f"median {middle:.2f} ms, maximum {max(took):.2f} ms in {PINGS} pings",
        advice,
    )


def _memory(info: dict[str, Any], settings: Settings) -> Iterator[Finding]:
    policy, used, limit = (
        str(info["maxmemory_policy"]),
        int(info["used_memory"]),
        int(info["maxmemory"]),
    )
    if policy != "noeviction":
        advice = "`CONFIG SET maxmemory-policy noeviction`, and the same in Redis' configuration"
        yield Finding(
            "fail",
            "redis eviction",
            f"maxmemory-policy is {policy}: accepted jobs are lost when memory is full",
            advice,
        )
    else:
        yield Finding("ok", "redis eviction", "maxmemory-policy is noeviction")
    if removed := int(info["evicted_keys"]):
        yield Finding(
            "fail",
            "redis eviction",
            f"keys evicted since Redis started: {removed}; jobs are lost",
            "resubmit the missing jobs",
        )
    if not limit:
        yield Finding("ok", "redis memory", f"{used / 2**20:.0f} MiB used, no limit (maxmemory 0)")
        return
    share = used / limit
    text = f"{used / 2**20:.0f} of {limit / 2**20:.0f} MiB used ({share:.0%})"
    if share >= settings.redis_fill_limit:
        yield Finding(
            "fail",
            "redis memory",
            f"{text}: submissions are answered with 503",
            "raise maxmemory, or let results expire sooner (result_ttl_s)",
        )
    elif share >= MEMORY_WARN:
        yield Finding(
            "warn",
            "redis memory",
            text,
            f"submissions are rejected at {settings.redis_fill_limit:.0%}: raise maxmemory",
        )
    else:
        yield Finding("ok", "redis memory", text)


def default_user(client: Any, version: tuple[int, ...]) -> Iterator[Finding]:
    """Yield whether a restart would drop data for want of the default user's rights, see
    `broker.ops.acl`. Nothing if this user may not ask.
    """
    import redis

    try:
        user = client.acl_getuser("default")
    except redis.RedisError:
        return
    if version >= (7, 0) and "+@all" not in user["categories"]:
        yield Finding(
            "fail",
            "redis users",
            "the user default lacks rights with which Redis loads its AOF: a restart drops jobs",
            "`ACL SETUSER default off ~* &* +@all`, and the same in its aclfile, before a restart",
        )


def _durability(info: dict[str, Any], appendfsync: str | None) -> Iterator[Finding]:
    if int(info.get("loading", 0)):  # while loading, Redis reports the AOF as off
        yield Finding(
            "warn",
            "redis AOF",
            f"is being loaded: {info.get('loading_loaded_perc', 0)} %",
            "wait until it is loaded",
        )
        return
    if not int(info["aof_enabled"]):
        advice = "`CONFIG SET appendonly yes`, and the same in Redis' configuration"
        yield Finding(
            "fail",
            "redis AOF",
            "off: jobs accepted since the last snapshot are lost on restart",
            advice,
        )
        return
    if (
        info.get("aof_last_write_status", "ok") != "ok"
        or info.get("aof_last_bgrewrite_status", "ok") != "ok"
    ):
        yield Finding(
            "fail",
            "redis AOF",
            "the last write or rewrite failed",
            "check Redis' log and its free disk space",
        )
    if appendfsync is None:
        yield Finding("ok", "redis AOF", "on; this user is not allowed to read appendfsync")
    elif appendfsync == "no":
        yield Finding(
            "fail",
            "redis AOF",
            "appendfsync is no: the last 30 seconds may be lost",
            "`CONFIG SET appendfsync everysec`",
        )
    else:
        loss = (
            "nothing"
            if appendfsync == "always"
            else "up to a second of accepted jobs if its machine fails"
        )
        yield Finding("ok", "redis AOF", f"on, appendfsync {appendfsync}: may lose {loss}")


def _config(client: Any, name: str) -> str | None:
    """Return a configuration value of Redis; None if this user may not read it."""
    import redis

    try:
        result = client.config_get(name)
    except redis.ResponseError:  # ACL: no permission
        return None
    return str(result.get(name)) if name in result else None
