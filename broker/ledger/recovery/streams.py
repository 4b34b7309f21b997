"""Streams of harvests: which units are ready for a consumer, what it has acknowledged, how far the
harvest may compute ahead of its consumers, and the shards that are no longer needed.

A cursor is a number of units: a consumer at cursor n has units 0 to n - 1. See
docs/decisions/0046-streams.md.
"""

import asyncio
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from zlib_ng import zlib_ng

from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.limits import MAX_INT64
from ....schemas.base.records import from_json, from_msgpack
from ....schemas.jobs.harvests import (
    OVER,
    HarvestStream,
    PartFile,
    PartManifest,
    StoredHarvest,
    StreamPage,
    UnitEntry,
)
from ....schemas.requests.harvest_work import HarvestPart
from ....storage.store import open_store
from ..core import scripts
from ..jobs.ledger import Ledger, reachable

log = logging.getLogger(__name__)

DROPPED = "dropped"


def cursor_field(consumer: str) -> str:
    """Return the field of a harvest's record with the consumer's cursor."""
    return f"ack:{consumer}"


class Streams:
    """Streams of the harvests in a ledger. Belongs to the ledger's event loop."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._redis: Any = ledger.redis
        self._scripts = scripts.Scripts(ledger.redis)

    @reachable
    async def harvest(self, harvest_id: str) -> StoredHarvest:
        """Return the harvest as accepted, without its request's lines. Raises not_found."""
        spec = await self._redis.hget(f"ms:harvest:{harvest_id}", "spec")
        if spec is None:
            raise MidstreamError("not_found", f"unknown harvest {harvest_id}")
        return from_msgpack(spec, StoredHarvest)

    # --- a consumer's side

    async def page(self, harvest: StoredHarvest, consumer: str, after: int | None) -> StreamPage:
        """Return the units from cursor `after` on, by default the consumer's own, that are ready:
        at most those of one part.

        Raises conflict for a harvest without a stream or one that did not succeed, invalid_request
        for another consumer, gone if the shards were dropped.
        """
        stream = _stream_of(harvest, consumer)
        raw, dropped, state, total = await self._fields(
            harvest.id, cursor_field(consumer), DROPPED, "state", "units"
        )
        own = int(raw or 0)
        cursor = own if after is None else after
        if not stream.keep and cursor < int(dropped or 0):
            raise MidstreamError("gone", f"units before {int(dropped)} were dropped")
        units = await self.units(harvest, cursor)
        shown = state.decode()
        if shown in OVER and shown != "succeeded" and not units:
            raise MidstreamError("conflict", f"harvest {harvest.id} ended as {shown}")
        return StreamPage(
            state=shown, acknowledged=own, total=None if total is None else int(total), units=units
        )

    async def acknowledge(self, harvest: StoredHarvest, consumer: str, cursor: int) -> None:
        """Record durably that the consumer has all units before `cursor`, and drop the shards that
        no consumer needs; a cursor that it had before changes nothing.

        Raises conflict if a unit before the cursor is not ready, and what `page` raises.
        """
        _stream_of(harvest, consumer)
        moved = await self._move(harvest.id, field=cursor_field(consumer), cursor=cursor)
        if moved != "moved":
            detail = f"harvest {harvest.id} has not got {cursor} units that are ready"
            raise MidstreamError("conflict", detail)
        await self._ledger.written()
        await self.drop(harvest)

    async def drop(self, harvest: StoredHarvest) -> None:
        """Delete the shards of units that all consumers have acknowledged, unless they are kept. If
        the store is unavailable, they are deleted with the next acknowledgement.
        """
        if harvest.stream is None or harvest.stream.keep:
            return
        (raw,), floor = await self._fields(harvest.id, DROPPED), await self._floor(harvest)
        before = int(raw or 0)
        store = open_store(harvest.uri)
        try:
            # those of a part that a failed harvest did not finish are no longer known
            while before < floor and (units := await self.units(harvest, before)):
                units = [unit for unit in units if unit.unit < floor]
                for key in _keys(units):
                    await asyncio.to_thread(store.delete, key)
                after, size = before + len(units), sum(unit.bytes for unit in units)
                await self._move(harvest.id, field=DROPPED, cursor=after, before=before, bytes=size)
                before = after
        except OSError as error:
            log.warning("harvest %s keeps acknowledged shards: %s", harvest.id, error)

    # --- the harvest's side

    async def limit(self, harvest: StoredHarvest) -> int:
        """Return the number of the first unit that may not be computed yet."""
        if harvest.stream is None:
            return MAX_INT64
        return await self._floor(harvest) + harvest.stream.window

    @reachable
    async def within(self, part: HarvestPart, limit: int) -> bool:
        """Return whether the part has something to do before unit `limit`."""
        if part.role != "run" or part.first + part.count <= limit:
            return True
        kept = await self._redis.hkeys(f"ms:harvest-units:{part.harvest}:{part.part}")
        missing = set(range(part.first, part.first + part.count)) - set(map(int, kept))
        return not missing or min(missing) < limit

    @reachable
    async def units(self, harvest: StoredHarvest, first: int) -> list[UnitEntry]:
        """Return the units that count, in order, from `first` to the first that is missing, or to
        the end of its part. Raises OSError, capture_damaged.
        """
        units, parts = await self._fields(harvest.id, "units", "parts")
        if units is None or first >= int(units):
            return []
        part = first // -(-int(units) // int(parts))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(f"ms:harvest-done:{harvest.id}", part)
            done, kept = await pipe.hgetall(f"ms:harvest-units:{harvest.id}:{part}").execute()
        entries = (
            [from_msgpack(entry, UnitEntry) for entry in kept.values()]
            if done is None
            else await asyncio.to_thread(_read, harvest.uri, from_json(done, PartFile))
        )
        known = {entry.unit: entry for entry in entries}
        return list(_run(known, first))

    async def _floor(self, harvest: StoredHarvest) -> int:
        """Return the cursor of the consumer that has acknowledged least."""
        assert harvest.stream is not None
        fields = await self._fields(harvest.id, *map(cursor_field, harvest.stream.consumers))
        return min(int(field or 0) for field in fields)

    @reachable
    async def _fields(self, harvest_id: str, *names: str) -> Sequence[Any]:
        fields: Sequence[Any] = await self._redis.hmget(f"ms:harvest:{harvest_id}", names)
        return fields

    @reachable
    async def _move(self, harvest_id: str, **move: Any) -> str:
        """Run lua/harvests/move_cursor.lua, which documents its arguments and outcomes."""
        arguments = scripts.pack(self._ledger.settings, id=harvest_id, **move)
        return str((await self._scripts.move_cursor(args=arguments)).decode())


def _stream_of(harvest: StoredHarvest, consumer: str) -> HarvestStream:
    stream = harvest.stream
    if stream is None:
        raise MidstreamError("conflict", f"harvest {harvest.id} was not submitted as a stream")
    if consumer not in stream.consumers:
        allowed = ", ".join(stream.consumers)
        raise invalid("consumer", f"the stream has no consumer {consumer!r}", allowed=allowed)
    return stream


def _run(known: Mapping[int, UnitEntry], number: int) -> Iterator[UnitEntry]:
    while number in known:
        yield known[number]
        number += 1


def _keys(units: Sequence[UnitEntry]) -> list[str]:
    return [file.key for unit in units for shard in unit.shards for file in shard.files]


def _read(uri: str, part: PartFile) -> list[UnitEntry]:
    with open_store(uri).open(part.key) as handle:
        data = handle.read(0, handle.size)
    if zlib_ng.crc32(data) != part.crc32:
        raise MidstreamError("capture_damaged", f"{part.key} is not what was written")
    return from_json(data, PartManifest).units
