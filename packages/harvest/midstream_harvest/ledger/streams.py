"""Streams of harvests: the units that are ready for a consumer, what it has acknowledged, how far a
harvest computes ahead of its consumers, and the shards that are no longer needed.

A cursor is a number of units: a consumer at cursor n has units 0 to n - 1. See
docs/decisions/0046-streams.md.
"""

import asyncio
import itertools
from pathlib import Path
from typing import Any

from midstream.broker.ledger.core import scripts
from midstream.broker.ledger.jobs.ledger import Ledger, LedgerPart, reachable
from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.base.limits import MAX_INT64
from midstream.schemas.base.records import from_json, from_msgpack
from midstream.storage.store import open_store

from ..files.shards import units_of
from ..names import OVER
from ..records.harvests import CheckedFile, StoredHarvest, StreamPage, UnitEntry
from ..records.work import HarvestPart

#: Scripts that change harvests.
LUA = Path(__file__).parent / "lua"


# A stream is a view of the harvest's files, so what protects a harvest from kills protects it too,
# and its bits are those of the files. The API sends no rows.
class HarvestStreams(LedgerPart):
    """The part of `Harvests` that serves streams."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__(ledger)
        self._own = ledger.scripts_of(LUA)

    # --- a consumer's side

    @reachable
    async def stream_page(
        self, harvest: StoredHarvest, consumer: str, after: int | None
    ) -> StreamPage:
        """Return the units from cursor `after` on, by default the consumer's own, that are ready:
        at most those of one part.

        Raises invalid_request for a consumer that the harvest does not have, gone for shards that
        were dropped, also if Redis does not know it, conflict at the end of a harvest that did not
        succeed.
        """
        _check(harvest, consumer)
        own, dropped, raw, total = await self._redis.hmget(
            f"ms:harvest:{harvest.id}", [f"ack:{consumer}", "dropped", "state", "units"]
        )
        cursor = int(own or 0) if after is None else after
        state = raw.decode()
        if cursor < int(dropped or 0):
            raise MidstreamError("gone", f"units before {int(dropped)} were dropped")
        units = await self._units(harvest, cursor)
        with Translated(
            FileNotFoundError,
            lambda error: MidstreamError(
                "gone",
                f"the shards of unit {cursor} were dropped",
                hint="continue after the units that the consumer has: give their number as `after`",
            ),
        ):
            files = (file for unit in units for shard in unit.shards for file in shard.files)
            for file in itertools.islice(files, 1):  # which is dropped first
                await asyncio.to_thread(open_store(harvest.uri).stat, file.key)
        if state in OVER and state != "succeeded" and not units:
            raise MidstreamError("conflict", f"harvest {harvest.id} ended as {state}")
        return StreamPage(
            state=state,
            uri=harvest.uri,
            ended=total is not None and cursor >= int(total),
            units=units,
        )

    @reachable
    async def acknowledge(self, harvest: StoredHarvest, consumer: str, cursor: int) -> None:
        """Record durably that the consumer has all units before `cursor`, and drop the shards that
        no consumer needs; a cursor that it has passed changes nothing.

        Raises invalid_request for a consumer that the harvest does not have, conflict if a unit
        before the cursor is not ready, OSError if shards cannot be deleted.
        """
        _check(harvest, consumer)
        if await self._move(harvest.id, field=f"ack:{consumer}", cursor=cursor) == "ahead":
            raise MidstreamError("conflict", f"the units before {cursor} are not all ready")
        await self._ledger.written()
        await self.drop_shards(harvest)

    # After the acknowledgement is durable, by whoever recorded it: what a killed process leaves, a
    # consumer's next call deletes.
    @reachable
    async def drop_shards(self, harvest: StoredHarvest) -> None:
        """Delete shards that all consumers have acknowledged, unless they are kept: of one part, so
        that the next acknowledgement continues.
        """
        if harvest.stream is None or harvest.stream.keep:
            return
        before = int(await self._redis.hget(f"ms:harvest:{harvest.id}", "dropped") or 0)
        floor = await self.window_end(harvest) - harvest.stream.window
        units = [unit for unit in await self._units(harvest, before) if unit.unit < floor]
        store = open_store(harvest.uri)
        keys = [file.key for unit in units for shard in unit.shards for file in shard.files]
        await asyncio.to_thread(lambda: [*map(store.delete, keys)])
        after = before + len(units)
        size = sum(unit.bytes for unit in units)
        await self._move(harvest.id, field="dropped", cursor=after, before=before, bytes=size)

    # --- the harvest's side

    # Of unit numbers, not a count of unacknowledged units: units that were computed out of order
    # could fill that while the first is missing. Here the first is always inside.
    @reachable
    async def window_end(self, harvest: StoredHarvest) -> int:
        """Return the number of the first unit that may not be computed yet."""
        if harvest.stream is None:
            return MAX_INT64
        cursors = await self._redis.hmget(
            f"ms:harvest:{harvest.id}", [f"ack:{name}" for name in harvest.stream.consumers]
        )
        return min(int(cursor or 0) for cursor in cursors) + harvest.stream.window

    @reachable
    async def has_work(self, part: HarvestPart, limit: int) -> bool:
        """Return whether the part has something to do before unit `limit`."""
        kept = await self._redis.hkeys(f"ms:harvest-units:{part.harvest}:{part.part}")
        missing = set(range(part.first, part.first + part.count)) - {int(unit) for unit in kept}
        return part.role != "run" or min(missing, default=0) < limit

    async def _units(self, harvest: StoredHarvest, first: int) -> list[UnitEntry]:
        """Return the units that count, in order, from `first` to the last before one that is
        missing, or of its part. Raises OSError, capture_damaged.
        """
        units, parts = await self._redis.hmget(f"ms:harvest:{harvest.id}", ["units", "parts"])
        if first >= int(units or 0):
            return []
        part = first // -(-int(units) // int(parts))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(f"ms:harvest-done:{harvest.id}", part)
            done, kept = await pipe.hvals(f"ms:harvest-units:{harvest.id}:{part}").execute()
        if done is None:
            entries = [from_msgpack(entry, UnitEntry) for entry in kept]
        else:
            store = open_store(harvest.uri)
            entries = await asyncio.to_thread(units_of, store, [from_json(done, CheckedFile)])
        later = sorted((e for e in entries if e.unit >= first), key=lambda entry: entry.unit)
        return [entry for place, entry in enumerate(later) if entry.unit == first + place]

    async def _move(self, harvest_id: str, **move: Any) -> str:
        """Run lua/move_cursor.lua, which documents its arguments and outcomes."""
        arguments = scripts.pack(self._ledger.settings, id=harvest_id, **move)
        return str((await self._own.move_cursor(args=arguments)).decode())


def _check(harvest: StoredHarvest, consumer: str) -> None:
    names = harvest.stream.consumers if harvest.stream else []
    if consumer not in names:
        allowed = ", ".join(names) or "none: it was not submitted as a stream"
        raise invalid("consumer", f"the harvest has no consumer {consumer!r}", allowed=allowed)
