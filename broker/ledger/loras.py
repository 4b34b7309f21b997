"""Registered LoRA adapters of a ledger, per model and for all tenants. The ledger's side of `schemas.loras`."""

from typing import Any

import msgspec

from ...schemas.base import from_msgpack, to_msgpack
from ...schemas.errors import MidstreamError, invalid
from ...schemas.limits import MAX_LORAS
from ...schemas.loras import Lora
from ...schemas.version import __version__
from .jobs import Ledger, reachable


class Loras:
    """Belongs to the ledger's event loop. All calls raise MidstreamError("unavailable") while Redis is unreachable."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._redis: Any = ledger.redis

    @reachable
    async def put(self, lora: Lora) -> Lora | None:
        """Point the name at this content; returns what it pointed at before. Accepted jobs keep what they have.

        Raises a 400 for a new name when there are `MAX_LORAS`.
        """
        if len(names := await self.names(lora.model)) >= MAX_LORAS and lora.name not in names:
            raise invalid("name", f"{lora.model!r} has {len(names)} adapters", allowed="a name that is registered; or remove one first")
        packed = to_msgpack(lora)
        await self._ledger.check_room(len(packed))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(_key(lora.model), lora.name).hset(_key(lora.model), lora.name, packed)
            former, _ = await pipe.execute()
        return None if former is None else _read(former, lora.name)

    @reachable
    async def get(self, model: str, name: str) -> Lora | None:
        packed = await self._redis.hget(_key(model), name)
        return None if packed is None else _read(packed, name)

    @reachable
    async def of_model(self, model: str) -> list[Lora]:
        """By name."""
        return [_read(packed, name.decode()) for name, packed in sorted((await self._redis.hgetall(_key(model))).items())]

    @reachable
    async def names(self, model: str) -> list[str]:
        return sorted(name.decode() for name in await self._redis.hkeys(_key(model)))

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        """Whether there was one. Accepted jobs keep it."""
        return bool(await self._redis.hdel(_key(model), name))


def _key(model: str) -> str:
    return f"ms:loras:{model}"


def _read(packed: bytes, name: str) -> Lora:
    try:
        return from_msgpack(packed, Lora)
    except msgspec.DecodeError as error:
        detail = f"the adapter {name!r} was stored by another version of midstream; midstream {__version__} cannot read it: {error}"
        raise MidstreamError("version_mismatch", f"{detail}; register it again") from error
