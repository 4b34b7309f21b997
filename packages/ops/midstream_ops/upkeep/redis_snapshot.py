"""Copies what a Redis holds at one moment, as one of its replicas would get it.

No access to the server's folder is needed, and the server goes on meanwhile. The copy is an RDB
file; every supported server also loads it as its append-only file, whose beginning may be one.
"""

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis

from midstream.broker.redis_service import opening
from midstream.schemas.base.errors import MidstreamError, Translated

#: Seconds without a byte after which the server counts as gone: it sends one each second while it
#: prepares the copy.
SILENT_S = 60.0
CHUNK = 1 << 20
#: How every RDB file begins.
MAGIC = b"REDIS"


def take(url: str, target: Path, took: Callable[[int], None] = lambda size: None) -> int:
    """Write the copy to `target`, which is durable and complete once it exists; return its bytes.
    `took` is called with the bytes so far.

    Raises MidstreamError for a server that gives no copy to this user.
    """
    aside = target.with_name(f".{target.name}.part")
    with (
        Translated(
            (redis.RedisError, OSError),
            lambda error: MidstreamError(
                "unavailable",
                f"Redis gives no copy of its data: {error}",
                hint="the command SYNC is needed, which managed services may refuse: use their own "
                "snapshots there",
            ),
        ),
        opening.client(url, socket_timeout=SILENT_S, retry=None) as client,
    ):
        connection: Any = client.connection_pool.get_connection()
        try:
            # a replica that wants no more than the copy does not count as a replica; before Redis 7
            # the server does not know that
            with suppress(redis.ResponseError):
                connection.send_command("REPLCONF", "rdb-only", "1")
                connection.read_response()
            connection.send_command("SYNC")
            with aside.open("wb") as file:
                size = _receive(connection._get_socket(), file.write, took)
                os.fsync(file.fileno())
        finally:
            connection.disconnect()
    aside.rename(target)
    return size


def _receive(sock: Any, write: Callable[[bytes], object], took: Callable[[int], None]) -> int:
    """Write what the server sends after SYNC: `$LENGTH`, and as many bytes. Raises OSError."""
    head, rest = _head(sock)
    if not head.startswith(b"$") or not head[1:].isdigit():
        raise OSError(head.decode(errors="replace").removeprefix("-"))
    size = int(head[1:])
    done = 0
    while True:
        part = rest[: size - done]
        write(part)
        done += len(part)
        took(done)
        if done == size:
            return size
        if not (rest := sock.recv(CHUNK)):
            raise OSError(f"the connection ended after {done} of {size} bytes")


def _head(sock: Any) -> tuple[bytes, bytes]:
    """Return the first line that is not empty, and what has arrived after it. Raises OSError."""
    arrived = b""
    while b"\r\n" not in (arrived := arrived.lstrip(b"\r\n")):
        part = sock.recv(CHUNK)
        if not part:
            raise OSError("the connection ended before the copy began")
        arrived += part
    line, _, rest = arrived.partition(b"\r\n")
    return line, rest
