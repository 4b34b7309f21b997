"""The artifact store: the protocol between capture writers, readers and deletion, and the opening
of a store by its URI.

Keys are strings relative to the store, such as `tag/job_1/p0000.a1.pp0.safetensors`; a folder ends
in "/". The protocol needs no rename and no append to an object that is complete, so that object
storage can implement it. Failures are the OSErrors that a disk raises: FileNotFoundError for a key
that is not there, PermissionError, and so on. See docs/decisions/0012-artifact-store.md.
"""

import errno
import re
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePath
from types import TracebackType
from typing import Protocol, Self, TypeVar, runtime_checkable

T = TypeVar("T")
R = TypeVar("R")
Buffer = bytes | bytearray | memoryview

#: Errors that say nothing about what was asked: the store was not reached, did not answer, or asked
#: to come again.
PASSING = frozenset({errno.EBUSY, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET})

_SCHEME = re.compile(r"([a-z][a-z0-9]*)://")


class NotInPlaceError(OSError):
    """A written object is not at its key: it was removed or replaced meanwhile.

    Written again, it would be.
    """


class Handle(Protocol):
    """An object opened for reading.

    It shows what was there when it was opened, or raises; closed at the latest when it is dropped.
    """

    size: int

    @property
    def stamp(self) -> str:
        """Return what another version of the object differs in: the time of its last change, or an
        ETag.
        """

    def read(self, start: int, count: int) -> bytes:
        """The bytes `[start, start + count)`; fewer only at the object's end. Raises OSError."""

    def view(self) -> memoryview:
        """Return all of it, read-only; mapped where the store can.

        Stays readable, and held, after `close`. Raises OSError, MidstreamError.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...


class Writer(Protocol):
    """New objects that become durable together. Belongs to one thread."""

    def append(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Add bytes to the object `key`, invisible before `commit`.

        Raises OSError, ValueError for a key outside the store.
        """

    def commit(self) -> None:
        """When this returns, contents and keys of all objects are durable, at a fixed number of
        disk round trips for any number.

        Raises OSError; then nothing of the group may be reported, though some of it may be there,
        each object whole.
        """

    def abort(self) -> None:
        """Drop what was appended and not committed."""


class Draft(Protocol):
    """A file whose parts are written in any order before it becomes an object.

    Without a key: nothing is left of one that is dropped.
    """

    @property
    def adoptable(self) -> bool:
        """Return whether a writer of its store can take it: once, and not one that is merely
        scratch space.
        """

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all of `buffers` contiguously from `offset` on. Raises OSError."""

    def read(self, start: int, count: int) -> bytes:
        """The bytes `[start, start + count)`, all of them written. Raises OSError."""

    def view(self) -> memoryview:
        """Return all of it, read-only and mapped; it stays readable when the draft is dropped.

        Raises OSError, MidstreamError.
        """

    def truncate(self, size: int) -> None: ...


@runtime_checkable
class Drafts(Protocol):
    """Optional capability: objects whose parts are written in any order.

    Its writers are `Adopting`.
    """

    def draft(self, key: str) -> Draft | None:
        """For an object that will get `key`; None where the store, as it is here, cannot.

        Raises OSError, ValueError.
        """


@runtime_checkable
class Adopting(Protocol):
    """A `Writer` that takes drafts."""

    def adopt(self, key: str, draft: Draft) -> None:
        """Add an adoptable draft as the object `key`, as `append` adds bytes.

        Raises OSError, ValueError.
        """


@runtime_checkable
class Signing(Protocol):
    """Optional capability: links that need no credentials."""

    def sign(self, key: str, seconds: int, endpoint: str = "") -> str:
        """A URL at which any caller that has it reads the object for so long.

        `endpoint`: how they reach the store, if not as we do.
        """


@runtime_checkable
class Distant(Protocol):
    """Optional capability: concurrent reads of many objects, because each answer takes time."""

    def together(self, action: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """`action` on each, concurrently.

        Raises the first error, when none runs any more. Not to be called by an `action`.
        """


@runtime_checkable
class Referring(Protocol):
    """Optional capability: the segments of a job without reading the index of each."""

    def segments(self, job: str) -> list[str]:
        """The keys of those that hold blobs of the job, or may; sorted.

        Forgotten by `unmark(job)`. Raises OSError.
        """


@runtime_checkable
class Demanding(Protocol):
    """Optional requirement: features that the store's server may lack."""

    def unfit(self) -> str:
        """Return why it cannot be used, however often it is tried; empty when it can.

        Raises OSError when that is not known now.
        """


@runtime_checkable
class Rewriting(Protocol):
    """Optional restriction: erasing replaces the whole segment, which is in memory meanwhile."""

    @property
    def rewritten_bytes(self) -> int:
        """Return what a segment with several blobs should have at most.

        One with a single blob is never rewritten, but deleted.
        """


class Segment(Protocol):
    """An object that many blobs share and its index (`index_of(key)`), created with this.

    Belongs to one thread of one process.
    """

    key: str
    size: int  # bytes so far

    @property
    def usable(self) -> bool:
        """Return whether another group may follow: not when it is in doubt what the store holds, or
        when it takes one group alone.
        """

    def append(self, data: Sequence[Buffer], index: bytes) -> None:
        """Durable when this returns: first `data` at `size`, then `index` at the end of the index.

        Raises OSError; then none of the group is in the segment. NotInPlaceError: the group belongs
        into another segment.
        """

    def close(self) -> None:
        """Nothing is appended from now on."""


@runtime_checkable
class ArtifactStore(Protocol):
    """Stateless for its callers: may be shared by threads. Equal stores hold the same objects."""

    @property
    def uri(self) -> str:
        """Return what `open_store` takes."""

    def prepare(self) -> None:
        """Make the store before anything is written, so that deletion can distinguish an empty
        store from a missing one. Raises OSError.
        """

    def trouble(self) -> str:
        """Return why nothing can be written, such as `disk full: …`; empty when it can, or when the
        store is not here.
        """

    def used(self) -> int:
        """Bytes that all objects take."""

    def writer(self) -> Writer: ...

    def segment(self, key: str) -> Segment:
        """Create a segment.

        Raises FileExistsError when there is one, OSError, ValueError for a key outside the store.
        """

    def open(self, key: str, hold: bool = True) -> Handle:
        """Open for reading.

        `hold`: nothing is erased in it until the handle and its views are dropped. Raises OSError,
        ValueError.
        """

    def stat(self, key: str) -> int:
        """Bytes of an object that this process may read. Raises OSError, ValueError."""

    def children(self, folder: str = "") -> list[str]:
        """The keys directly in `folder`, sorted; folders end in "/".

        Without those of objects that are still being written.
        """

    def check(self, key: str) -> None:
        """Raises ValueError for a key that leads outside the store, also through links in it."""

    def link(self, key: str) -> str | None:
        """Return where other programs read the object: a path or a URL; None for nowhere."""

    def delete(self, key: str) -> None:
        """Remove an object, or with a final "/" everything below it.

        Nothing happens where there is none. Raises OSError.
        """

    def erase(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        """Durably replace (offset, bytes) ranges of a segment by zeros; False, with nothing done,
        while it is held. Raises OSError.
        """

    def sealed(self, key: str) -> bool:
        """Return whether nothing is appended to the segment any more, by any process.

        Raises OSError.
        """

    def mark(self, name: str) -> None:
        """Note that the objects of `name` are being deleted.

        Raises OSError where there is no store.
        """

    def unmark(self, name: str) -> None: ...

    def marked(self, name: str) -> bool: ...

    def marks(self) -> list[str]:
        """Every marked name, sorted."""


def check_key(key: str) -> str:
    """The key. Raises ValueError for one that is not inside the store."""
    if key.startswith("/") or ".." in key.split("/") or not key.strip("./"):
        raise ValueError(f"capture path {key!r} is not inside the capture root")
    return key


def below(uri: str, name: str) -> str:
    """The URI of the store `name` inside of another."""
    path, mark, options = uri.partition("?") if _SCHEME.match(uri) else (uri, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def around(uri: str) -> tuple[str, str]:
    """The inverse of `below`: the URI of the outer store, and the name."""
    path, mark, options = uri.partition("?") if _SCHEME.match(uri) else (uri, "", "")
    outer, _, name = path.rpartition("/")
    return outer + mark + options, name


@lru_cache(maxsize=64)
def open_store(uri: str | PurePath) -> ArtifactStore:
    """The store at a URI, or in a local folder: `scheme://…` is opened by `open_store` of the
    module `<scheme>_store` next to this one.

    Opening does not touch the store. Raises ValueError for a scheme that has no module.
    """
    text = str(uri)
    match = _SCHEME.match(text)
    scheme = match[1] if match else "file"
    name = f"{__package__}.{scheme}_store"
    if find_spec(name) is None:
        raise ValueError(
            f"there is no artifact store for {scheme}://; valid: a folder, file:///folder, "
            "or s3://bucket/prefix"
        )
    try:
        module = import_module(name)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"a store at {scheme}:// needs the package {error.name}: pip install "
            f"'midstream[{scheme}]'"
        ) from error
    store: ArtifactStore = module.open_store(text)
    return store
