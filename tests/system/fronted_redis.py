"""A Redis, its replica, and an address in front that leads to the master, as of a proxy or a name.

with FrontedRedis(tmp_path, free_port()) as pair:
    settings = load_settings({}, redis_url=pair.url, redis_replicas=1)
    pair.promote()                       # the replica; the former master lives
    pair.lead_to_promoted(cut=True)
    pair.demote_former()
"""

import asyncio
import contextlib
import threading
from pathlib import Path
from typing import Self

import redis
from mortal_redis import Mortal
from wait_kit import wait_until

START_S = 60.0


class Front:
    """A TCP proxy on `port` to the port `target`, which may change."""

    def __init__(self, port: int, target: int):
        self.target = target
        self._port = port
        self._open: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="front")

    def start(self) -> None:
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", self._port)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(START_S)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self.cut()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """Close every connection."""

        async def close() -> None:
            for writer in list(self._open):
                writer.transport.abort()

        asyncio.run_coroutine_threadsafe(close(), self._loop).result(START_S)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ends = [writer]
        try:
            behind, behind_writer = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(behind_writer)
            self._open.update(ends)
            await asyncio.gather(_pump(reader, behind_writer), _pump(behind, writer))
        except OSError:
            return
        finally:
            self._open.difference_update(ends)
            for end in ends:
                end.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


class FrontedRedis:
    """`master` and `replica` change places with each failover."""

    def __init__(self, directory: Path, port: int):
        self._directory = directory
        self._port = port
        self.url = f"redis://127.0.0.1:{port}/0"

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.master, self.replica = (Mortal(self._directory / name) for name in ("one", "two"))
            for server in (self.master, self.replica):
                stack.callback(lambda server=server: server.server.stop())
            self._follow(self.replica, self.master)
            self.front = Front(self._port, self.master.port)
            self.front.start()
            stack.callback(self.front.stop)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    # A failover, step by step

    def kill_master(self) -> None:
        self.master.kill()

    def promote(self) -> None:
        """Make the replica a master; the former one, if it lives, knows nothing of it."""
        with redis.Redis.from_url(self.replica.url) as client:
            client.replicaof("NO", "ONE")

    def lead_to_promoted(self, cut: bool) -> None:
        """From now on new connections lead to the promoted one; the others stay, or are `cut`."""
        self.master, self.replica = self.replica, self.master
        self.front.target = self.master.port
        if cut:
            self.front.cut()

    def demote_former(self) -> None:
        """Make the former master a replica of the promoted one; it closes no client's
        connection.
        """
        self.replica.start()
        self._follow(self.replica, self.master)

    @staticmethod
    def _follow(replica: Mortal, master: Mortal) -> None:
        with redis.Redis.from_url(replica.url) as client:
            client.replicaof("127.0.0.1", str(master.port))
            wait_until(lambda: client.info("replication")["master_link_status"] == "up", START_S)
