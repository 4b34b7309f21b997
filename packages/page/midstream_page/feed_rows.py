"""Reads the rows of the page's table of jobs, in batches.

A record that cannot be read is left out, and logged.
"""

import logging
from collections.abc import Sequence

import msgspec

from midstream.broker.ledger.core.record import LIST_FIELDS, SHOWN
from midstream.broker.ledger.jobs.ledger import Ledger, reachable
from midstream.broker.ledger.results import views
from midstream.schemas.base.errors import shortened
from midstream.schemas.base.records import from_json

from .records import FeedJob

log = logging.getLogger(__name__)

#: Bytes of a job's outputs that are read for its row: the head of the list and of the first output,
#: and `SHOWN` characters of its text.
OUTPUT_BYTES = 64 + 4 * SHOWN


def _output(head: bytes) -> str:
    """Return the beginning of the first output's text; `head`: of a packed `list[Output]`."""
    rest = head.partition(b"\xa4text")[2] or b"\xa0"
    wide = {0xD9: 1, 0xDA: 2, 0xDB: 4}.get(rest[0], 0)  # bytes of the text's length
    length = int.from_bytes(rest[1 : 1 + wide]) if wide else rest[0] & 0x1F
    return shortened(rest[1 + wide :][:length].decode(errors="ignore"), SHOWN)


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
            pipe.hmget(f"ms:job:{name}", LIST_FIELDS)
            pipe.hget(f"ms:capture:{name}", "tags").getrange(f"ms:out:{name}", 0, OUTPUT_BYTES - 1)
        raw = await pipe.execute(raise_on_error=False)
    result = []
    for name, values, tags, out in zip(names, raw[::3], raw[1::3], raw[2::3], strict=True):
        try:
            for part in (values, tags, out):
                if isinstance(part, Exception):
                    raise ValueError(f"its record has another type: {part}")
            if (job := views.listed(name, values, ledger.settings)) is not None:
                known = from_json(tags, list[str]) if tags else []
                fields = msgspec.structs.asdict(job)
                result.append(FeedJob(**fields, tags=known, output=_output(out)))
        except (TypeError, ValueError, msgspec.DecodeError) as error:
            log.warning(
                "job %s is left out of the page's table: its record cannot be read: %r", name, error
            )
    return result
