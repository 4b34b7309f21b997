"""Artifacts that operators register by name, per model and shared by all tenants."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ....schemas.artifacts.registered import Kind, Registered
from ....schemas.base.errors import MidstreamError, invalid, unknown
from ....schemas.base.limits import MAX_REQUEST_POLICIES
from ....schemas.base.records import from_msgpack
from ....schemas.base.version import __version__
from ..core import scripts
from ..jobs.ledger import Ledger, reachable

T = TypeVar("T", bound=Registered)
#: How often `put` tries, if others change the name meanwhile.
PUT_TRIES = 8


class Registry(Generic[T]):
    """The names of one kind: one hash for each model, and the tensors of those that have some.
    Belongs to the ledger's event loop.

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
    async def put(
        self, model: str, name: str, make: Callable[[T | None], T], blobs: Mapping[str, bytes]
    ) -> tuple[T, T | None]:
        """Point the name at what `make` makes of its present content (None: the name is new);
        return both.

        Accepted jobs keep the content that they have.

        `blobs`: content hash → packed tensor, of all that might not be stored yet. Raises a 400
        if the model has as many names as the kind's limit, or `MAX_REQUEST_POLICIES` others that
        apply to all traffic. If another change came in between, `make` is called again, with its
        content; `conflict` is raised if one came each time.
        """
        await self._ledger.check_room(sum(map(len, blobs.values())))
        for _ in range(PUT_TRIES):
            packed = await self._redis.hget(self._key(model), name)
            former = None if packed is None else self._read(packed, name)
            record = make(former)
            arguments = scripts.put_pinned(self._ledger.settings, self._kind, record, packed, blobs)
            outcome, *count = scripts.text(
                await scripts.Scripts(self._redis).put_pinned(args=arguments)
            )
            if outcome == "stored":
                return record, former
            if outcome == "full":
                raise invalid(
                    "name",
                    f"{model!r} has {count[0]} {self._kind.plural}",
                    allowed=f"up to {self._kind.limit}",
                    hint="delete one first",
                )
            if outcome == "crowded":
                raise invalid(
                    "name",
                    f"{count[0]} {self._kind.plural} apply to all traffic of {model!r}",
                    allowed=f"up to {MAX_REQUEST_POLICIES}",
                )
            if outcome != "raced":  # a tensor is gone, which another try does not bring back
                break
        detail = f"the {self._kind.noun} {name!r} was changed or deleted meanwhile: try again"
        raise MidstreamError("conflict", detail)

    @reachable
    async def named(self, model: str, names: Sequence[bytes]) -> list[T]:
        """Return those with these names, in this order, without those that do not exist."""
        result = await self._redis.hmget(self._key(model), names) if names else []
        return [
            self._read(packed, name.decode())
            for name, packed in zip(names, result, strict=True)
            if packed is not None
        ]

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        """Delete the name; return whether it existed. Accepted jobs keep the artifact."""
        arguments = scripts.pack(
            self._ledger.settings, kind=self._kind.plural, model=model, name=name
        )
        return bool(await scripts.Scripts(self._redis).delete_pinned(args=arguments))

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
