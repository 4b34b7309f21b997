"""Fixtures of the core's system tests, and a receiver."""

from collections.abc import Iterator

import pytest
from fixtures import (
    api as api,
    api_session as api_session,
    hand as hand,
    ledger as ledger,
    redis_session as redis_session,
    redis_url as redis_url,
)
from hook_kit import Receiver, receiving


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving() as made:
        yield made
