"""Fixtures of the core's system tests, and a sweep's worker."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from fixtures import (
    api as api,
    api_session as api_session,
    hand as hand,
    ledger as ledger,
    redis_session as redis_session,
    redis_url as redis_url,
)
from stack import client as client
from sweep_rig import Rig


@pytest.fixture
async def rig(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    async with Rig(redis_url, tmp_path, **getattr(request, "param", {})) as opened:
        yield opened
