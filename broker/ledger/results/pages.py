"""Pages of listings, newest first: sorted sets of ids by creation time."""

import re
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from ....schemas.base.errors import invalid

T = TypeVar("T")
#: Creation time and id of the last entry of a page: the next page begins after it.
PageEnd = tuple[float, str]
#: Ids with their creation times, newest first.
Chunk = list[tuple[str, float]]

#: Entries read per query while filling a filtered page.
CHUNK = 100
#: Entries read in total for one page.
SCAN = 5000
_CURSOR = re.compile(r"^(\d+(?:\.\d+)?):([A-Za-z0-9_]+)$")


def format_cursor(score: float, last: str) -> str:
    return f"{score!r}:{last}"


def parse_cursor(cursor: str | None) -> PageEnd:
    """Return the place after which to continue.

    Raises MidstreamError("invalid_request") for an invalid cursor.
    """
    if not cursor:
        return float("inf"), ""
    if (match := _CURSOR.match(cursor)) is None:
        raise invalid("cursor", f"{cursor!r} is not a cursor", "the `next` of a previous page")
    return float(match[1]), match[2]


async def older(redis: Any, listed: str, place: PageEnd) -> Chunk:
    """Return the next `CHUNK` entries of the sorted set `listed` after a place."""
    score, last = place
    result: Chunk = []
    offset = 0
    # entries with the same time are ordered by id: those already returned are skipped
    while len(result) < CHUNK:
        rows = await redis.zrevrangebyscore(
            listed, score, "-inf", start=offset, num=CHUNK, withscores=True
        )
        offset += CHUNK
        result += [(name.decode(), at) for name, at in rows if at < score or name.decode() < last]
        if len(rows) < CHUNK:
            break
    return result[:CHUNK]


async def page(
    place: PageEnd,
    limit: int,
    older: Callable[[PageEnd], Awaitable[Chunk]],
    read: Callable[[Chunk], Awaitable[Iterable[T | None]]],
    wanted: Callable[[T], bool],
    scan: int = SCAN,
) -> tuple[list[T], str | None]:
    """Return up to `limit` of the `wanted` records after a place, and the next page's cursor.

    `read` returns the record of each entry, None for one that was deleted. Where few are wanted, a
    page may be short and still have a cursor.
    """
    result: list[T] = []
    for _ in range(scan // CHUNK):
        if not (chunk := await older(place)):
            return result, None
        for (name, created), record in zip(chunk, await read(chunk), strict=True):
            if record is not None and wanted(record):
                if len(result) == limit:
                    return result, format_cursor(*place)
                result.append(record)
            place = created, name
    return result, format_cursor(*place)
