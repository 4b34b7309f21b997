"""Artifacts that operators register by name, per model and shared by all tenants."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ....schemas.artifacts.registered import ArtifactKind, Registered
from ....schemas.base.errors import MidstreamError, invalid, unknown
from ....schemas.base.limits import MAX_REQUEST_POLICIES
from ....schemas.base.records import from_msgpack
from ....schemas.base.version import __version__
from ....schemas.jobs.models import GradientInfo
from ..core import scripts
from ..jobs.ledger import Ledger, of_each, reachable

T = TypeVar("T", bound=Registered)
#: How often `put` tries, if others change the name meanwhile.
PUT_TRIES = 8


class Lookup(NamedTuple):
    """Artifacts of one model that a request names, read together."""

    model: str = ""
    records: Mapping[tuple[str, str], Any] = {}  # (`ArtifactKind.plural`, name) → those that exist
    # `ArtifactKind.plural` → all names, of kinds of which a named one does not exist
    names: Mapping[str, Sequence[str]] = {}
    gradients: GradientInfo | None = None  # of the model's gradient workers, if asked for

    def known(self, kind: ArtifactKind[T], name: str, field: str) -> T:
        """Return the artifact of this name. Raises a 400 naming `field` and the names that
        exist.
        """
        record: T | None = self.records.get((kind.plural, name))
        if record is None:
            names = self.names.get(kind.plural, ())
            raise unknown(kind.noun, name, self.model, names, field=field, kind="invalid_request")
        return record

    def present(self, kind: ArtifactKind[T], names: Iterable[str]) -> list[T]:
        """Return those of these names that exist, in this order."""
        given = ((kind.plural, name) for name in names)
        return [self.records[of] for of in given if of in self.records]


NOTHING_FOUND = Lookup()


@reachable
async def look_up(
    ledger: Ledger, model: str, named: Iterable[tuple[ArtifactKind[Any], str]]
) -> Lookup:
    """Return the named artifacts, read in one round trip; the names of a kind take a second one, if
    one does not exist.
    """
    distinct = {(kind.plural, name): kind for kind, name in named}
    if not distinct:
        return Lookup(model)
    found = await of_each(
        ledger.redis, distinct, lambda pipe, of: pipe.hget(distinct[of].key + model, of[1])
    )
    packed = dict(zip(distinct, found, strict=True))
    lacking = {kind.plural: kind for of, kind in distinct.items() if packed[of] is None}
    names = {plural: await Registry(ledger, kind).names(model) for plural, kind in lacking.items()}
    records = {
        of: Registry(ledger, kind).read(raw, of[1])
        for of, kind in distinct.items()
        if (raw := packed[of]) is not None
    }
    return Lookup(model, records, names)


class Registry(Generic[T]):
    """The names of one kind: one hash for each model, and the tensors of those that have some.
    Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    def __init__(self, ledger: Ledger, kind: ArtifactKind[T]) -> None:
        self._ledger, self._kind = ledger, kind
        self._redis: Any = ledger.redis

    @reachable
    async def get(self, model: str, name: str) -> T | None:
        packed = await self._redis.hget(self._key(model), name)
        return None if packed is None else self.read(packed, name)

    async def known(self, model: str, name: str) -> T:
        """Return the artifact of this name. Raises `not_found` with the names that exist."""
        artifact = await self.get(model, name)
        if artifact is None:
            raise await self.unknown(model, name)
        return artifact

    async def unknown(self, model: str, name: str) -> MidstreamError:
        """Return the error for a name that does not exist."""
        return unknown(self._kind.noun, name, model, await self.names(model))

    @reachable
    async def of_model(self, model: str) -> list[T]:
        """Return all artifacts of the model, by name."""
        return [
            self.read(packed, name.decode())
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
            former = None if packed is None else self.read(packed, name)
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
    async def delete(self, model: str, name: str) -> bool:
        """Delete the name; return whether it existed. Accepted jobs keep the artifact."""
        arguments = scripts.pack(
            self._ledger.settings, kind=self._kind.plural, model=model, name=name
        )
        return bool(await scripts.Scripts(self._redis).delete_pinned(args=arguments))

    def _key(self, model: str) -> str:
        return self._kind.key + model

    def read(self, packed: bytes, name: str) -> T:
        """Decode a stored artifact. Raises MidstreamError("version_mismatch")."""
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
