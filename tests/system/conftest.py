"""A real redis-server for the whole session, emptied before each test that asks for it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
import redis_servers
from edge import Api, Hand, running
from receipt_rig import Jobs, RelayProcess
from redis_keys import documented, family
from up_kit import Up

from midstream.broker.ops import redis_server

#: Keys that a test left, whose types are compared with docs/redis.md.
CHECKED = 500


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    server = redis_server.start(tmp_path_factory.mktemp("redis"))
    with redis.Redis.from_url(server.url) as client:
        name = redis_servers.name_of(client.info("server"))
    assert os.environ.get("REDIS_SERVER", name) == name, "another server is running"
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_session: redis_server.RedisServer) -> Iterator[str]:
    with redis.Redis.from_url(redis_session.url) as client:
        client.flushall()
        yield redis_session.url
        left = [key.decode() for key in client.scan_iter("ms:*", count=1000)][:CHECKED]
        with client.pipeline(transaction=False) as pipe:
            for key in left:
                pipe.type(key)
            types = [kind.decode() for kind in pipe.execute()]
        assert [
            (key, kind)
            for key, kind in zip(left, types, strict=True)
            if kind not in (documented().get(family(key)), "none")
        ] == []


@pytest.fixture(scope="session")
def api_session(
    redis_session: redis_server.RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Api]:
    with running(tmp_path_factory.mktemp("api"), redis_session.url, lease_s=300.0) as api:
        yield api


@pytest.fixture
def api(api_session: Api, redis_url: str) -> Api:
    """An API over an empty Redis."""
    return api_session


@pytest.fixture
def hand(api: Api) -> Iterator[Hand]:
    """A worker by hand that serves the tiny model of `edge`."""
    with Hand(api.settings) as worker:
        yield worker


@pytest.fixture
def relay(redis_url: str, tmp_path: Path) -> Iterator[RelayProcess]:
    process = RelayProcess(redis_url, tmp_path / "relay.log")
    yield process
    process.kill()


@pytest.fixture
def jobs(redis_url: str) -> Jobs:
    return Jobs(redis_url)


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """A whole stack with the fake engine, shared by the tests of a module."""
    started = Up(tmp_path_factory.mktemp("up") / "data", steering_wait_s=90)
    started.ready()
    yield started
    started.close()
