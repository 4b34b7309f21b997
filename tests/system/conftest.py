"""A real redis-server for the whole session, emptied before each test that asks for it."""

from collections.abc import Iterator

import pytest
import redis

from midstream.broker import redis_server


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    server = redis_server.start(tmp_path_factory.mktemp("redis"))
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_session: redis_server.RedisServer) -> str:
    with redis.Redis.from_url(redis_session.url) as client:
        client.flushall()
    return redis_session.url
