"""Reads the rows of the web page's table of jobs, in batches.

A record that cannot be read is left out, and logged.
"""

import logging
from collections.abc import Sequence

import msgspec

from ....schemas.base.records import from_json
from ....schemas.service.feed import FeedJob
from ..core.record import FIELDS, decode
from ..jobs.ledger import Ledger, reachable
from ..results import views

log = logging.getLogger(__name__)


@reachable
async def newest(ledger: Ledger, tenant: str | None, count: int) -> list[str]:
    """Return the ids of the newest `count` jobs (of `tenant`), newest first."""
    return [
        name.decode()
        for name in await ledger.redis.zrevrange(views.listing("jobs", tenant), 0, count - 1)
    ]


@reachable
async def read_jobs(ledger: Ledger, names: Sequence[str]) -> list[FeedJob]:
    """Return the rows of those jobs that exist, in this order; one round trip."""
    if not names:
        return []
    async with ledger.redis.pipeline(transaction=False) as pipe:
        for name in names:
            pipe.hmget(f"ms:job:{name}", FIELDS).hget(f"ms:capture:{name}", "tags")
        raw = await pipe.execute(raise_on_error=False)
    result = []
    for name, values, tags in zip(names, raw[::2], raw[1::2], strict=True):
        try:
            if isinstance(values, Exception) or isinstance(tags, Exception):
                raise ValueError(
                    "its record has another type: "
                    f"{values if isinstance(values, Exception) else tags}"
                )
            record = decode(name, values)
            if record is not None:
                view = views.view(record, ledger.settings)
                listed = from_json(tags, list[str]) if tags else []
                result.append(FeedJob(**msgspec.structs.asdict(view), tags=listed))
        except (TypeError, ValueError, msgspec.DecodeError) as error:
            log.warning(
                "job %s is left out of the page's table: its record cannot be read: %r", name, error
            )
    return result
