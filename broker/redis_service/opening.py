"""Opens Redis at the setting `redis_url`, for every process.

The address is that of one master, or of what stands in front of several servers and leads to their
master. Such an address may come to lead elsewhere, so a connection ends where a server refuses a
write because it has become a replica: the next one follows the address.
"""

from typing import Any, Literal

import redis
import redis.asyncio
from redis.connection import SSLConnection, parse_url


def client(url: str, **options: Any) -> "redis.Redis":
    """Return a synchronous client; `options` are those of a redis-py connection."""
    pool = redis.ConnectionPool.from_url(url, **options)
    pool.connection_class = type("MasterConnection", (_MasterConnection, pool.connection_class), {})
    return redis.Redis.from_pool(pool)


def async_pool(url: str, **options: Any) -> "redis.asyncio.BlockingConnectionPool":
    """Return a pool for asyncio, whose callers wait for a free connection; `options` are those of
    redis-py's BlockingConnectionPool.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(url, **options)
    pool.connection_class = type(
        "AsyncMasterConnection", (_AsyncMasterConnection, pool.connection_class), {}
    )
    return pool


class _MasterConnection:
    """Closes itself where the server has become a replica."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)  # type: ignore[misc]
        except redis.ResponseError as error:
            if not _is_of_replica(error):
                raise
            self.disconnect()  # type: ignore[attr-defined]
            raise _demoted(error) from error


class _AsyncMasterConnection:
    """`_MasterConnection` for asyncio."""

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except redis.ResponseError as error:
            if not _is_of_replica(error):
                raise
            await self.disconnect()  # type: ignore[attr-defined]
            raise _demoted(error) from error


def _is_of_replica(error: redis.ResponseError) -> bool:
    """Return whether a replica has refused a write; a script's error has the code in its text."""
    return isinstance(error, redis.ReadOnlyError) or "READONLY" in str(error)


def _demoted(error: redis.ResponseError) -> redis.ConnectionError:
    """Return an error after which callers connect and try again."""
    return redis.ConnectionError(f"Redis refuses writes, as a replica: {error}")


def database_of(url: str) -> int:
    """Return the number of the database."""
    return int(parse_url(url).get("db", 0))  # type: ignore[no-untyped-call]


def tls_of(url: str) -> dict[str, Any] | Literal[False]:
    """Return the TLS options for Celery; False without TLS."""
    options = parse_url(url)  # type: ignore[no-untyped-call]
    if options.get("connection_class") is not SSLConnection:
        return False
    given = {name: value for name, value in options.items() if name.startswith("ssl_")}
    return {"ssl_cert_reqs": "required", "ssl_check_hostname": True, **given}
