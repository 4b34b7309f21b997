"""Registered artifacts: what all kinds have in common, and the description of one kind."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, Self, TypeVar

import msgspec

from ..base.limits import MAX_DESCRIPTION, MAX_PATH, Name, PathName
from ..base.records import Record


class FolderRequest(Record):
    """Fields of every registration of a folder on the server. A kind adds its own, `kw_only`."""

    name: PathName
    # of the folder, relative to the setting of its kind
    path: Annotated[str, msgspec.Meta(min_length=1, max_length=MAX_PATH)]
    model: Name | None = None  # required only if several are served
    description: Annotated[str, msgspec.Meta(max_length=MAX_DESCRIPTION)] = ""


class Registered(Record):
    """Fields of every registered artifact, as the ledger keeps it and as it is shown.

    Each kind adds `replaced`: the digest that the name had until this request.
    """

    name: str
    model: str
    digest: str  # of its content

    def replacing(self, former: "Registered") -> Self:
        """Return it with the digest that the name had, if that was another one."""
        if former.digest == self.digest:
            return self
        return msgspec.structs.replace(self, replaced=former.digest)


T = TypeVar("T", bound=Registered)


@dataclass(frozen=True)
class Kind(Generic[T]):
    """A kind of registered artifact, as the ledger and the routes treat it."""

    singular: str  # in the names of handlers
    plural: str  # the last part of its path, and the field of its page
    noun: str  # in errors
    record: type[T]
    request: type[Any]
    page: type[Any]
    key: str  # of its hash in Redis, before the model's name
    limit: int  # registered artifacts of one model
