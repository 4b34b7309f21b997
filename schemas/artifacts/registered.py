"""Registered artifacts: the fields that all kinds share, and the row of a kind: what every process
knows of it, and where its parts are.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, Generic, Self, TypeVar

import msgspec

from ..access.keys import Caller, Scope, scoped
from ..base.limits import MAX_DESCRIPTION, FolderPath, Name
from ..base.records import JsonObject, Record, now
from ..packages import part

T = TypeVar("T", bound="Registered")
S = TypeVar("S", bound=Record)


class Registration(Record):
    """Fields of every registration."""

    model: Name | None = None  # null: the only served model
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] = ""

    def registered(self, record: type[T], name: str, model: str, **own: Any) -> T:
        """Return what is registered for it. `own`: the fields that are not of every artifact."""
        return record(name=name, model=model, created=now(), description=self.description, **own)


class FolderRequest(Registration, kw_only=True):
    """Fields of every registration of a folder on the server. A kind adds its own as `kw_only`."""

    # the folder's path, relative to the setting of its kind
    path: FolderPath

    def registered(self, record: type[T], name: str, model: str, **own: Any) -> T:
        return super().registered(record, name, model, path=self.path, **own)


class Registered(Record):
    """Fields of every registered artifact, as the ledger stores it and the API returns it."""

    name: str
    model: str
    digest: str  # of its content
    created: float
    description: str = ""
    replaced: str = ""  # the previous digest of the name, if this request replaced it

    @property
    def tensors(self) -> list[str]:
        """The content hashes of its tensors; those of folders stay in their files."""
        return []

    def as_kept(self, kind: type[S]) -> S:
        """Return what a job stores of it: a record whose fields are some of its own."""
        return msgspec.convert(self, kind, from_attributes=True)

    def shown_to(self, caller: Caller) -> "Registered":
        """Return the artifact as the caller sees it."""
        return self

    def after(self, former: Self | None) -> Self:
        """Return the artifact as it is stored in place of `former`: of the same content, that one's
        `created` stays.
        """
        if former is None or former.digest != self.digest:
            return self
        return msgspec.structs.replace(self, created=former.created)

    def replacing(self, previous: "Registered") -> Self:
        """Return the artifact with `replaced` set, if the previous digest differs."""
        if previous.digest == self.digest:
            return self
        return msgspec.structs.replace(self, replaced=previous.digest)


class RegisteredFolder(Registered, kw_only=True):
    """Fields of every artifact that stays in a folder on the server."""

    path: str
    bytes: int


@dataclass(frozen=True, eq=False)
class ArtifactKind(Generic[T]):
    """A kind of registered artifact."""

    plural: str  # in its URL path and keys of Redis, the field of its list, the client's attribute
    short: str  # in `Job.contents`
    noun: str  # in errors
    record: type[T]
    request: type[Any]  # a `Registration`
    takes: str  # what `PUT` makes one of, in words
    #: Makes an artifact of a body: takes a `request`, the name, a `ModelInfo`, the `AppContext` and
    #: the `Caller`; returns a `Made`. As `module:name`, as each of its parts.
    make: str
    name: str = ""  # on the command line, if it is not `short`
    scope: Scope = "steer-global"  # that changes require
    limit: int = 0  # the most registered artifacts of one model
    # whether each tenant has names of its own, `scoped`, and limits of them in place of `limit`
    of_tenants: bool = False
    shown: type[Registered] | None = None  # what `shown_to` returns, if it is not a `record`
    # makes a `record` of what an earlier build stored, both as plain values
    of_former: Callable[[JsonObject], JsonObject] | None = None

    # Its other parts; empty: it has none.
    #: Decodes a body that is a file: takes bytes, returns a `request`.
    file: str = ""
    #: Raises an error for one that has no place beside the others of its kind: takes a `ModelInfo`,
    #: the record, and the others.
    check: str = ""
    #: Returns records with what their answers have beside what is registered: takes the ledger and
    #: a list of records.
    complete: str = ""
    #: Returns a record with what is questionable about it, for its registration's answer: takes
    #: the `AppContext`, a `ModelInfo` and the record.
    warn: str = ""
    #: Its group of calls of a client (a class).
    calls: str = "midstream.client.sdk.registered:Named"
    #: Verb of the command line, beside `list`, `get`, `put` and `delete` or in place of one → a
    #: call of the client, such as `policies.change`, or a part that first gets what connects to it.
    acts: Mapping[str, str] = field(default_factory=dict)

    @property
    def command(self) -> str:
        """The name on the command line."""
        return self.name or self.short

    @property
    def key(self) -> str:
        """The prefix, before the model's name, of its hash's key in Redis."""
        return f"ms:{self.plural}:"

    def load(self, name: str) -> Any:
        """Load a part by its field. None: it has none."""
        path = getattr(self, name)
        return part(path) if path else None

    @property
    def view(self) -> type[Any]:
        """Return the type of what the API returns of an artifact."""
        return self.shown or self.record

    @cached_property
    def page(self) -> type[msgspec.Struct]:
        """Return the type of the answer of a list."""
        fields = [(self.plural, list[self.view])]  # type: ignore[name-defined]
        return msgspec.defstruct(f"{self.record.__name__}Page", fields, bases=(Record,))

    def key_of(self, tenant: str, name: str) -> str:
        """Return the name under which a tenant's artifact is stored."""
        return scoped(tenant, name) if self.of_tenants else name


#: A registered artifact that a request names: its kind and its name.
NamedArtifact = tuple[ArtifactKind[Any], str]


def references(*named: tuple[ArtifactKind[Any], str | None]) -> list[NamedArtifact]:
    """Return those that have a name."""
    return [(kind, name) for kind, name in named if name is not None]
