"""Fixtures of the core's system tests, and what settles receipts."""

import pytest
from fixtures import ledger as ledger, redis_session as redis_session, redis_url as redis_url
from ledger_kit import settler
from stack import client as client

from midstream.broker.ledger.jobs.settlement import Settler


@pytest.fixture
def settle(redis_url: str) -> Settler:
    return settler(redis_url)
