"""Artifacts that operators register by name, per model and shared by all tenants."""

from typing import Any, Generic, TypeVar

import msgspec

from ....schemas.artifacts.registered import Kind, Registered
from ....schemas.base.errors import MidstreamError, invalid, unknown
from ....schemas.base.records import from_msgpack, to_msgpack
from ....schemas.base.version import __version__
from ..jobs.ledger import Ledger, reachable

T = TypeVar("T", bound=Registered)


class Names(Generic[T]):
    """The names of one kind: one hash for each model. Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    def __init__(self, ledger: Ledger, kind: Kind[T]) -> None:
        self._ledger, self._kind = ledger, kind
        self._redis: Any = ledger.redis

    @reachable
    async def get(self, model: str, name: str) -> T | None:
        packed = await self._redis.hget(self._key(model), name)
        return None if packed is None else self._read(packed, name)

    async def known(
        self, model: str, name: str, field: str = "name", error: str = "not_found"
    ) -> T:
        """Return the artifact of this name.

        Raises MidstreamError(`error`) naming `field` and the names that exist.
        """
        artifact = await self.get(model, name)
        if artifact is None:
            raise await self.unknown(model, name, field, error)
        return artifact

    async def unknown(
        self, model: str, name: str, field: str = "name", error: str = "not_found"
    ) -> MidstreamError:
        """Return the error for a name that does not exist."""
        names = await self.names(model)
        return unknown(self._kind.noun, name, model, names, field=field, kind=error)

    @reachable
    async def of_model(self, model: str) -> list[T]:
        """Return all artifacts of the model, by name."""
        return [
            self._read(packed, name.decode())
            for name, packed in sorted((await self._redis.hgetall(self._key(model))).items())
        ]

    @reachable
    async def names(self, model: str) -> list[str]:
        return sorted(name.decode() for name in await self._redis.hkeys(self._key(model)))

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        """Delete the name; return whether it existed. Accepted jobs keep the artifact."""
        return bool(await self._redis.hdel(self._key(model), name))

    def _key(self, model: str) -> str:
        return self._kind.key + model

    def _read(self, packed: bytes, name: str) -> T:
        try:
            return from_msgpack(packed, self._kind.record)
        except msgspec.DecodeError as error:
            detail = (
                f"the {self._kind.noun} {name!r} was stored by another version of midstream; "
                f"midstream {__version__} cannot read it"
            )
            raise MidstreamError(
                "version_mismatch", f"{detail}: {error}; register it again"
            ) from error


class Registry(Names[T]):
    """Names of artifacts whose content stays in files: a registration stores the record alone."""

    @reachable
    async def put(self, artifact: T) -> T | None:
        """Point the name at this content; returns the artifact that it replaces, or None.

        Accepted jobs keep the artifact that they have. Raises a 400 for a new name if the model has
        as many names as the kind's limit.
        """
        model, name = artifact.model, artifact.name
        if len(names := await self.names(model)) >= self._kind.limit and name not in names:
            detail = f"{model!r} has {len(names)} {self._kind.noun}s"
            raise invalid(
                "name", detail, allowed="a name that is registered", hint="remove one first"
            )
        packed, key = to_msgpack(artifact), self._key(model)
        await self._ledger.check_room(len(packed))
        async with self._redis.pipeline(transaction=True) as pipe:
            pipe.hget(key, name).hset(key, name, packed)
            former, _ = await pipe.execute()
        return None if former is None else self._read(former, name)
