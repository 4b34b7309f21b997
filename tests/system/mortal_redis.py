"""A Redis that tests kill, and start again on the same port and data."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ports import free_port

from midstream_ops import redis_server


class Mortal:
    def __init__(self, directory: Path):
        self.server = redis_server.start(directory, port=free_port())
        self.url = self.server.url
        self.port = self.server.port

    def start(self) -> None:
        """Again, unless it runs."""
        if self.server.process.poll() is not None:
            self.server = redis_server.start(self.server.directory, port=self.port)

    def kill(self) -> None:
        self.server.kill()


@contextmanager
def mortal(directory: Path) -> Iterator[Mortal]:
    server = Mortal(directory)
    try:
        yield server
    finally:
        server.server.stop()
