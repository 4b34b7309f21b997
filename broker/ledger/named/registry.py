"""Artifacts that are registered by name, for each model, by operators or by tenants."""

import functools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import msgspec

from ....schemas.access.keys import own, unscoped
from ....schemas.artifacts.registered import ArtifactKind, Registered
from ....schemas.base.errors import MidstreamError, invalid, unknown
from ....schemas.base.limits import MAX_REQUEST_POLICIES
from ....schemas.base.records import from_msgpack, to_msgpack
from ....schemas.base.tensors import PackedBlobs, Tensor
from ....schemas.jobs.models import GradientInfo
from ....schemas.requests.policies import Policy
from ..core import scripts
from ..core.tenants import MIB, limits_of, refusal
from ..jobs.ledger import Ledger, LedgerPart, reachable, unreadable

log = logging.getLogger(__name__)

T = TypeVar("T", bound=Registered)
#: How often `put` tries, if others change the name meanwhile.
PUT_TRIES = 16


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


def size_of(raw: PackedBlobs) -> int:
    return sum(map(len, raw.values()))


@reachable
async def look_up(
    ledger: Ledger, model: str, named: Iterable[tuple[ArtifactKind[Any], str]]
) -> Lookup:
    """Return the named artifacts, read in one round trip; the names of a kind take a second one, if
    one does not exist. Nothing is read for no names.
    """
    if not (distinct := {(kind.plural, name): kind for kind, name in named}):
        return Lookup(model)
    async with ledger.redis.pipeline(transaction=True) as pipe:
        for (_, name), kind in distinct.items():
            pipe.hget(kind.key + model, name)
        found = await pipe.execute()
    packed = dict(zip(distinct, found, strict=True))
    lacking = {kind.plural: kind for of, kind in distinct.items() if packed[of] is None}
    names = {plural: await Registry(ledger, kind).names(model) for plural, kind in lacking.items()}
    records = {
        of: await Registry(ledger, kind).read(model, of[1], raw)
        for of, kind in distinct.items()
        if (raw := packed[of]) is not None
    }
    return Lookup(model, records, names)


class Registry(LedgerPart, Generic[T]):
    """The names of one kind: one hash for each model, and the tensors of those that have some.
    Belongs to the ledger's event loop.

    All calls raise MidstreamError("unavailable") while Redis is unreachable.
    """

    def __init__(self, ledger: Ledger, kind: ArtifactKind[T]) -> None:
        super().__init__(ledger)
        self._kind = kind

    @reachable
    async def get(self, model: str, name: str) -> T | None:
        packed = await self._redis.hget(self._key(model), name)
        return None if packed is None else await self.read(model, name, packed)

    async def known(self, model: str, name: str, field: str = "name") -> T:
        """Return the artifact of this name. Raises `not_found` naming `field` and the names that
        exist.
        """
        if (artifact := await self.get(model, name)) is None:
            raise await self.unknown(model, name, field)
        return artifact

    async def unknown(self, model: str, name: str, field: str = "name") -> MidstreamError:
        """Return the error for a name that does not exist."""
        tenant, shown = unscoped(name)
        names = await self.names(model)
        if self._kind.of_tenants:
            names = own(tenant, names)
        return unknown(self._kind.noun, shown, model, names, field=field)

    @reachable
    async def of_model(self, model: str) -> list[T]:
        """Return all artifacts of the model, by name."""
        return [
            await self.read(model, name.decode(), packed)
            for name, packed in sorted((await self._redis.hgetall(self._key(model))).items())
        ]

    @reachable
    async def names(self, model: str) -> list[str]:
        return sorted(name.decode() for name in await self._redis.hkeys(self._key(model)))

    @reachable
    async def put(
        self,
        model: str,
        name: str,
        make: Callable[[T | None], T],
        blobs: Mapping[str, bytes | Tensor],
        check: Callable[[T, Sequence[T]], None] | None = None,
        of_accepted: bool = False,
    ) -> tuple[T, T | None]:
        """Point the name at what `make` makes of its present content (None: the name is new);
        return both.

        Accepted jobs keep the content that they have. `check` raises an error for what has no place
        beside the model's other artifacts of the kind. `of_accepted`: an accepted job made it, so
        that it may use the memory of Redis that is reserved for those.

        `blobs`: content hash → tensor, of all that might not be stored yet. Raises a 400 if the
        model has as many names as the kind's limit, or `MAX_REQUEST_POLICIES` others that apply to
        all traffic; what `refusal` returns if a tenant's limit is reached. If another change came
        in between, `make` is called again, with its content; `conflict` is raised if one came each
        time.
        """
        raw = scripts.packed_blobs(blobs)
        if not of_accepted:
            await self._ledger.check_room(size_of(raw))
        for _ in range(PUT_TRIES):
            async with self._redis.pipeline(transaction=True) as pipe:
                pipe.hget(self._key(model), name)
                pipe.get(f"ms:policies-changes:{model}")
                packed, changes = await pipe.execute()
            former = None if packed is None else await self.read(model, name, packed)
            record = make(former).after(former)
            if check is not None:
                check(record, await self.of_model(model))
            outcome, *count = await self._store(record, packed, raw, changes)
            if outcome == "stored":
                self._ledger.took_room(size_of(raw))
                return record, former
            if outcome == "refused":
                limit, used, allowed, _ = count
                raise refusal(
                    unscoped(name)[0],
                    limit,
                    int(used),
                    int(allowed),
                    -(-scripts.size_of(record) // MIB),
                    None,
                )
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
        raise MidstreamError(
            "conflict",
            f"the {self._kind.noun} {unscoped(name)[1]!r} was changed or deleted meanwhile: "
            "try again",
        )

    async def _store(
        self, record: T, former: bytes | None, blobs: PackedBlobs, changes: bytes | None
    ) -> list[str]:
        """Run lua/named/put_pinned.lua. `former`: the record being replaced, as stored. `changes`:
        how often those that apply to all traffic have changed, as stored.
        """
        reply = await self._run(
            "put_pinned",
            kind=self._kind.plural,
            model=record.model,
            name=record.name,
            record=to_msgpack(record),
            former=former,
            changes=changes,
            limit=self._kind.limit,
            tenant=unscoped(record.name)[0] if self._kind.of_tenants else None,
            size=scripts.size_of(record),
            limits=limits_of(self._settings),
            watching=isinstance(record, Policy) and record.current.content.all_traffic,
            watch_limit=MAX_REQUEST_POLICIES,
            tensors=scripts.tensors({name: blobs.get(name, b"") for name in record.tensors}),
        )
        return scripts.text(reply)

    @reachable
    async def delete(self, model: str, name: str) -> bool:
        """Delete the name; return whether it existed. Accepted jobs keep the artifact."""
        tenant = None
        if self._kind.of_tenants:
            tenant = unscoped(name)[0]
            # raises for an unreadable one, which stays: the version that wrote it may need it
            await self.get(model, name)
        kind = self._kind.plural
        return bool(
            await self._run("delete_pinned", kind=kind, model=model, name=name, tenant=tenant)
        )

    def _key(self, model: str) -> str:
        return self._kind.key + model

    async def read(self, model: str, name: str, packed: bytes) -> T:
        """Decode a stored artifact. Raises MidstreamError("version_mismatch")."""
        what = f"the {self._kind.noun} {unscoped(name)[1]!r} of {model!r}"
        try:
            return self._decode(what, packed)
        except msgspec.DecodeError as error:
            by = await self._redis.hget(f"ms:steering:{model}", f"{self._kind.plural}_by:{name}")
            raise unreadable(f"{what} was stored", error, by) from error

    def _decode(self, what: str, packed: bytes) -> T:
        try:
            return from_msgpack(packed, self._kind.record)
        except msgspec.DecodeError:
            if self._kind.of_former is None:
                raise
            renewed = self._kind.of_former(msgspec.msgpack.decode(packed))
            artifact = from_msgpack(to_msgpack(renewed), self._kind.record)
            _say_former(what)
            return artifact


@functools.cache
def _say_former(what: str) -> None:
    log.warning(
        "%s was stored by an earlier build; its mode, if that was `canary`, is now `shadow`, which "
        "only records",
        what,
    )
