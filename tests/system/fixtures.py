"""Fixtures that system tests share with those of packages: a real redis-server for the whole
session, emptied before each test that asks for it, and an API over it with a worker by hand.
"""

import os
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import redis
import redis_servers
from edge import Api, Hand, running
from ledger_kit import open_ledger
from sweep_rig import Rig

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream_ops import redis_server


@pytest.fixture(scope="session")
def redis_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[redis_server.RedisServer]:
    server = redis_server.start(tmp_path_factory.mktemp("redis"))
    with redis.Redis.from_url(server.url) as client:
        name = redis_servers.name_of(client.info("server"))
    assert os.environ.get("REDIS_SERVER", name) == name, "another server is running"
    yield server
    server.stop()


@pytest.fixture
def redis_url(redis_session: redis_server.RedisServer) -> str:
    with redis.Redis.from_url(redis_session.url) as client:
        client.flushall()
    return redis_session.url


@pytest.fixture
async def ledger(redis_url: str, tmp_path: Path) -> AsyncIterator[Ledger]:
    """A ledger with the usual settings; `open_ledger` is for others."""
    async with open_ledger(redis_url, data_dir=str(tmp_path)) as opened:
        yield opened


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
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that wait."""
    with ThreadPoolExecutor(32) as threads:
        yield threads


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    """A worker without its process, over an empty Redis."""
    async with Rig(redis_url, tmp_path, **getattr(request, "param", {})) as opened:
        yield opened
