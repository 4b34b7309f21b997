"""Things that operators register by name, per model and for all tenants: LoRA adapters, sparse
autoencoders.
"""

from typing import Any, Generic, Protocol, TypeVar

import msgspec

from ....schemas.base.errors import MidstreamError, invalid
from ....schemas.base.records import from_msgpack, to_msgpack
from ....schemas.base.version import __version__
from ..jobs.ledger import Ledger, reachable


class Registered(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def model(self) -> str: ...


T = TypeVar("T", bound=Registered)


class Registry(Generic[T]):
    """One hash of names for each model. Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    def __init__(self, ledger: Ledger, kind: type[T], key: str, thing: str, most: int) -> None:
        """`key`: the prefix of its keys, before the model's name.

        `thing`: what it is called. `most`: of one model.
        """
        self._ledger = ledger
        self._redis: Any = ledger.redis
        self._kind, self._key, self._thing, self._most = kind, key, thing, most

    @reachable
    async def put(self, one: T) -> T | None:
        """Point the name at this content; returns what it pointed at before.

        Accepted jobs keep what they have.

        Raises a 400 for a new name when there are `most`.
        """
        if len(names := await self.names(one.model)) >= self._most and one.name not in names:
            detail = f"{one.model!r} has {len(names)} {self._thing}s"
            raise invalid("name", detail, allowed="a name that is registered; or remove one first")
        packed, key = to_msgpack(one), self._key + one.model
        await self._ledger.check_room(len(packed))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(key, one.name).hset(key, one.name, packed)
            former, _ = await pipe.execute()
        return None if former is None else self._read(former, one.name)

    @reachable
    async def get(self, model: str, name: str) -> T | None:
        packed = await self._redis.hget(self._key + model, name)
        return None if packed is None else self._read(packed, name)

    @reachable
    async def of_model(self, model: str) -> list[T]:
        """By name."""
        return [
            self._read(packed, name.decode())
            for name, packed in sorted((await self._redis.hgetall(self._key + model)).items())
        ]

    @reachable
    async def names(self, model: str) -> list[str]:
        return sorted(name.decode() for name in await self._redis.hkeys(self._key + model))

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        """Return whether there was one. Accepted jobs keep it."""
        return bool(await self._redis.hdel(self._key + model, name))

    def _read(self, packed: bytes, name: str) -> T:
        try:
            return from_msgpack(packed, self._kind)
        except msgspec.DecodeError as error:
            detail = (
                f"the {self._thing} {name!r} was stored by another version of midstream; "
                f"midstream {__version__} cannot read it"
            )
            raise MidstreamError(
                "version_mismatch", f"{detail}: {error}; register it again"
            ) from error
