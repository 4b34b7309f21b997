"""Fixtures of the system tests, of which those that packages share are in `fixtures.py`."""

from collections.abc import Iterator

import pytest
from fixtures import (
    api as api,
    api_session as api_session,
    hand as hand,
    ledger as ledger,
    pool as pool,
    redis_session as redis_session,
    redis_url as redis_url,
    rig as rig,
)
from ledger_kit import settler
from receipt_rig import Jobs, RelayProcess
from stack import client as client, http as http

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.broker.ledger.jobs.settlement import Settler
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream_ops import redis_server


@pytest.fixture
def reaper(ledger: Ledger) -> Reaper:
    return Reaper(ledger)


@pytest.fixture
def settle(redis_url: str) -> Settler:
    return settler(redis_url)


@pytest.fixture(scope="module")
def served(
    redis_session: redis_server.RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RelayProcess]:
    process = RelayProcess(redis_session.url, tmp_path_factory.mktemp("relay") / "relay.log")
    yield process
    process.kill()


@pytest.fixture
def relay(served: RelayProcess, redis_url: str) -> RelayProcess:
    """The module's, which runs; Redis is empty."""
    served.revive()
    return served


@pytest.fixture
def jobs(redis_url: str) -> Jobs:
    return Jobs(redis_url)
