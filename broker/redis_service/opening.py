"""Opens Redis as the setting `redis_url` says: directly, or through Sentinel, which names the
master.

    redis://USER:PASSWORD@HOST:6379/0                 rediss:// with TLS
    redis+sentinel://USER:PASSWORD@S1:26379,S2:26379,S3:26379/0?service=midstream

`rediss+sentinel://` uses TLS for both.

User, password and options are those of Redis itself; `sentinel_username` and `sentinel_password`
are those of the sentinels. Every process opens Redis here, so that all of them follow a failover.
"""

import asyncio
import contextlib
import time
from types import MethodType
from typing import Any, Literal, NamedTuple
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

import redis
import redis.asyncio
import redis.asyncio.sentinel
import redis.exceptions
import redis.sentinel
from redis.connection import SSLConnection, parse_url

from ...schemas.settings.settings import SENTINEL_SCHEMES, SettingsError

SENTINEL_PORT = 26379
#: Seconds to wait for a sentinel's answer; a sentinel that is cut off costs this much time.
SENTINEL_S = 1.0
#: Seconds after which a busy pool asks Sentinel again for the master: an earlier master that still
#: answers causes no error by which the pool would notice the change.
RECHECK_S = 2.0


class RedisTarget(NamedTuple):
    """A parsed `redis_url`. `sentinels` is empty where Redis is opened directly."""

    # of a connection to Redis, for redis-py; includes `host` and `port` only without Sentinel
    options: dict[str, Any]
    ssl: dict[str, Any]  # the TLS options among them; empty: no TLS
    sentinels: list[tuple[str, int]]
    service: str
    sentinel_options: dict[str, Any]  # of a connection to a sentinel

    @property
    def is_tls(self) -> bool:
        return bool(self.ssl)

    @property
    def database(self) -> int:
        return int(self.options.get("db", 0))


def target_of(url: str) -> RedisTarget:
    """Parse a `redis_url`.

    Raises SettingsError for a Sentinel URL without a service, or with a wrong address.
    """
    parts = urlsplit(url)
    if parts.scheme not in SENTINEL_SCHEMES:
        options = dict(parse_url(url))  # type: ignore[no-untyped-call]
        return RedisTarget(options, _tls(options), [], "", {})
    query = dict(parse_qsl(parts.query))
    if not (service := query.pop("service", "")):
        raise SettingsError(
            "redis_url: a Sentinel URL must name the service whose master it opens: "
            "…/0?service=NAME"
        )
    known = {
        name: query.pop(f"sentinel_{name}")
        for name in ("username", "password")
        if f"sentinel_{name}" in query
    }
    user, _, hosts = parts.netloc.rpartition("@")
    plain = parts._replace(
        scheme=parts.scheme.partition("+")[0],
        netloc=f"{user}@sentinel" if user else "sentinel",
        query=urlencode(query),
    )
    options = dict(parse_url(urlunsplit(plain)))  # type: ignore[no-untyped-call]
    for name in ("host", "port", "connection_class"):  # redis-py's Sentinel pool has its own
        options.pop(name, None)
    tls = _tls(options) if parts.scheme.startswith("rediss") else {}
    if parts.scheme.startswith("rediss"):
        tls = {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **tls}
        options |= {"ssl": True, **tls}
    request = {"socket_timeout": SENTINEL_S, "socket_connect_timeout": SENTINEL_S, "retry": None}
    return RedisTarget(
        options,
        tls,
        [_address(host) for host in hosts.split(",")],
        service,
        request | known | ({"ssl": True} | tls if tls else {}),
    )


def _tls(options: dict[str, Any]) -> dict[str, Any]:
    result = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return (
        {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **result}
        if options.get("connection_class") is SSLConnection
        else result
    )


def _address(text: str) -> tuple[str, int]:
    try:
        parts = urlsplit(f"//{text}")
        if not parts.hostname:
            raise ValueError("no host")
        return parts.hostname, parts.port or SENTINEL_PORT
    except ValueError as error:
        raise SettingsError(
            f"redis_url: {text!r} is not the address of a sentinel (HOST:{SENTINEL_PORT}): {error}"
        ) from error


def client(url: str, **options: Any) -> "redis.Redis":
    """Return a synchronous client of the Redis server, or, with Sentinel, of the service's master;
    `options` are those of a redis-py connection.
    """
    result = target_of(url)
    if not result.sentinels:
        return redis.Redis.from_url(url, **options)
    sentinel = redis.sentinel.Sentinel(  # type: ignore[no-untyped-call]
        result.sentinels, sentinel_kwargs=result.sentinel_options
    )
    sentinel.discover_master = MethodType(newest_master, sentinel)  # type: ignore[method-assign]
    options["connection_class"] = MasterSSLConnection if result.is_tls else MasterConnection
    return sentinel.master_for(  # type: ignore[no-untyped-call]
        result.service, **result.options | options
    )


def async_client(url: str, **options: Any) -> "redis.asyncio.Redis":
    """Return a client like `client`, for asyncio."""
    result = target_of(url)
    if not result.sentinels:
        return redis.asyncio.Redis.from_url(url, **options)
    return redis.asyncio.Redis.from_pool(_sentinel_pool(result, **options))


def async_pool(url: str, **options: Any) -> "redis.asyncio.BlockingConnectionPool":
    """Return a pool whose callers wait for a free connection; `options` are those of redis-py's
    BlockingConnectionPool.
    """
    result = target_of(url)
    return (
        _sentinel_pool(result, **options)
        if result.sentinels
        else redis.asyncio.BlockingConnectionPool.from_url(url, **options)
    )


def _sentinel_pool(target: RedisTarget, **options: Any) -> "MasterPool":
    sentinel = NewestSentinel(  # type: ignore[no-untyped-call]
        target.sentinels, sentinel_kwargs=target.sentinel_options
    )
    options["connection_class"] = (
        AsyncMasterSSLConnection if target.is_tls else AsyncMasterConnection
    )
    return MasterPool(target.service, sentinel, **target.options | options)


def newest_master(self: redis.sentinel.Sentinel, service: str) -> tuple[str, int]:
    """Replace `Sentinel.discover_master`: ask all sentinels, and take the newest configuration that
    any of them knows.

    redis-py takes the first answer, perhaps from a sentinel that is cut off with the old master.
    Raises MasterNotFoundError.
    """
    states: list[Any] = []
    for sentinel in self.sentinels:
        with contextlib.suppress(redis.exceptions.RedisError, OSError):
            states.append(sentinel.sentinel_master(service))
    return _newest(self, service, states)


def _newest(sentinel: Any, service: str, states: list[dict[str, Any]]) -> tuple[str, int]:
    newest = max(states, key=lambda state: int(state["config-epoch"]), default=None)
    if newest is None or not sentinel.check_master_state(newest, service):
        raise redis.sentinel.MasterNotFoundError(f"no sentinel knows a live master of {service!r}")
    return str(newest["ip"]), int(newest["port"])


class NewestSentinel(redis.asyncio.sentinel.Sentinel):
    """`newest_master` for asyncio."""

    async def discover_master(self, service: str) -> tuple[str, int]:
        answers = await asyncio.gather(
            *[sentinel.sentinel_master(service) for sentinel in self.sentinels],
            return_exceptions=True,
        )
        for answer in answers:
            if isinstance(answer, asyncio.CancelledError):
                raise answer
        return _newest(self, service, [answer for answer in answers if isinstance(answer, dict)])


class MasterConnection(redis.sentinel.SentinelManagedConnection):
    """Asks Sentinel for the master whenever it connects.

    redis-py's class reconnects to its former address when it repeats a command.
    """

    def connect_check_health(self, *args: Any, **options: Any) -> None:
        if self._sock is None:
            self.host, self.port = self.connection_pool.get_master_address()
        super().connect_check_health(*args, **options)


class MasterSSLConnection(MasterConnection, redis.sentinel.SentinelManagedSSLConnection):
    """With TLS."""


class AsyncMasterConnection(redis.asyncio.sentinel.SentinelManagedConnection):
    """`MasterConnection` for asyncio."""

    async def connect_check_health(self, *args: Any, **options: Any) -> None:
        if not self.is_connected:
            self.host, self.port = await self.connection_pool.get_master_address()
        await super().connect_check_health(*args, **options)

    async def send_packed_command(self, *args: Any, **options: Any) -> None:
        """Raise redis.ConnectionError also if the pool has closed the connection meanwhile: uvloop
        and redis-py raise other errors then.
        """
        try:
            await super().send_packed_command(*args, **options)
        except (RuntimeError, AttributeError) as error:
            await self.disconnect(nowait=True)
            raise redis.exceptions.ConnectionError(f"the connection was closed: {error}") from error


class AsyncMasterSSLConnection(
    AsyncMasterConnection, redis.asyncio.sentinel.SentinelManagedSSLConnection
):
    """With TLS."""


class MasterPool(
    redis.asyncio.sentinel.SentinelConnectionPool, redis.asyncio.BlockingConnectionPool
):
    """Connections to the master that Sentinel names.

    When Sentinel names another one, all connections to the previous master are closed, those in use
    too, so that none of its answers is taken for the new master's.

    redis-py asks Sentinel only when it connects. A previous master that is alive, but cut off from
    its replicas, would keep its connections for as long as that lasts; so this pool asks again
    every `RECHECK_S` while it is used.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self.switched = float("-inf")  # when another master was found (monotonic)
        self._looked = time.monotonic()
        self._look: asyncio.Task[None] | None = None

    async def get_connection(self, *args: Any, **options: Any) -> Any:
        if time.monotonic() - self._looked > RECHECK_S:
            self._looked = time.monotonic()
            self._look = asyncio.create_task(self.look(), name="midstream-sentinel")
        return await super().get_connection(*args, **options)  # type: ignore[no-untyped-call]

    async def look(self) -> None:
        """Ask Sentinel for the master; if no sentinel answers, nothing changes."""
        try:
            await self.get_master_address()
        except (redis.exceptions.RedisError, OSError):
            return

    async def get_master_address(self) -> tuple[str, int]:
        former = self.master_address
        address: tuple[str, int] = await self.sentinel_manager.discover_master(self.service_name)
        if self.master_address != address:  # not changed by a concurrent caller meanwhile
            self.master_address = address
            if former is not None:
                self.switched = time.monotonic()
            await self.disconnect(inuse_connections=former is not None)
        return address


class Broker(NamedTuple):
    """kombu's connection to the same Redis."""

    url: str
    ssl: dict[str, Any] | Literal[False]
    options: dict[str, Any]  # of its transport


def broker(url: str) -> Broker:
    """Return URL, TLS options and transport options for Celery."""
    result = target_of(url)
    if not result.sentinels:
        return Broker(url, result.ssl if result.is_tls else False, {})
    user = urlsplit(url).netloc.rpartition("@")[0]
    addresses = [
        f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host, port in result.sentinels
    ]
    urls = [
        f"sentinel://{f'{user}@' if user else ''}{address}/{result.database}"
        for address in addresses
    ]
    return Broker(";".join(urls), result.ssl if result.is_tls else False, {
        "master_name": result.service, "sentinel_kwargs": result.sentinel_options,
    })  # fmt: skip
