"""The installation that a command works on: its data directory, its Redis, and the settings that
its processes have.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from midstream.broker.ledger.jobs.ledger import Ledger
from midstream.client.cli.keys import own_redis_url
from midstream.client.sdk import discovery
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.settings.settings import Settings, load_settings

from ..running_settings import settings_of


class Installation(NamedTuple):
    """An installation on this machine, or one whose Redis the settings name."""

    data: Path
    settings: Settings  # with the address of its Redis; empty: none answers
    stack: discovery.RunningStack | None  # the `midstream up` that runs there


def installation(data_dir: Path | None = None, *, needs_redis: bool = True) -> Installation:
    """Return the installation on a data directory. Raises MidstreamError if its Redis is needed and
    does not run.
    """
    settings = load_settings(data_dir=str(data_dir) if data_dir else None)
    data = discovery.data_dir(settings)
    stack = discovery.running(data)
    if stack is not None:
        settings = settings_of(stack) or settings
    url = settings.redis_url or own_redis_url(data)
    if needs_redis and not url:
        raise MidstreamError(
            "unavailable",
            f"no stack is running on {data}, and no redis_url is set",
            allowed="MIDSTREAM_DATA_DIR or --data-dir of a running `midstream up`, or "
            "MIDSTREAM_REDIS_URL",
        )
    settings = msgspec.structs.replace(settings, redis_url=url, data_dir=str(data))
    return Installation(data, settings, stack)


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Ledger]:
    """Yield the ledger of the settings' Redis."""
    ledger = Ledger.connect(settings)
    try:
        yield ledger
    finally:
        await ledger.close()
