"""The artifact store: the protocol between capture writers, readers and deletion, and the opening
of a store by its URI.

Keys are strings relative to the store, such as `tag/job_1/p0000.a1.pp0.safetensors`; a folder ends
in "/". The protocol needs no rename and no append to a complete object, so that object storage can
implement it. Failures are the OSErrors that a disk raises: FileNotFoundError for a missing key,
PermissionError, and so on. See docs/decisions/0012-artifact-store.md.
"""

import errno
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from importlib import import_module
from pathlib import PurePath
from typing import Protocol, Self, TypeVar, runtime_checkable

from ..schemas import packages

T = TypeVar("T")
R = TypeVar("R")
Buffer = bytes | bytearray | memoryview

#: Transient errors, independent of the request: the store was not reached, did not answer, or asked
#: for a later retry.
TRANSIENT = frozenset({errno.EBUSY, errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET})

#: Entry points of stores: scheme of their URIs → function that opens one.
STORES = "midstream.stores"
#: The schemes of packages that are developed with this one. An extra with the scheme's name
#: installs each.
PACKAGED = frozenset({"s3"})

_SCHEME = re.compile(r"([a-z][a-z0-9]*)://")


class NotInPlaceError(OSError):
    """A written object is not at its key, because it was removed or replaced meanwhile; writing it
    again would succeed.
    """


# A handle may raise, so a store with versions of objects needs no locks for `erase` to succeed.
class Handle(Protocol):
    """An object opened for reading.

    It shows the content at the time of opening, or raises. It is closed at the latest when it is
    dropped.
    """

    size: int

    @property
    def stamp(self) -> str:
        """An identifier of the object's version: the time of its last change, or an ETag."""

    def read(self, start: int, count: int) -> bytes:
        """Return the bytes `[start, start + count)`; fewer only at the end. Raises OSError."""

    def view(self) -> memoryview:
        """Return the whole object, read-only; mapped if the store can map it.

        The view stays readable, and the object held, after `close`. Raises OSError, MidstreamError.
        """

    def close(self) -> None: ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...


class StoreWriter(Protocol):
    """New objects that become durable together. Belongs to one thread."""

    def append(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Add bytes to the object `key`, which is invisible before `commit`.

        Raises OSError, and ValueError for a key outside the store.
        """

    def commit(self) -> None:
        """Make contents and keys of all objects durable, with a number of disk round trips that
        does not depend on the number of objects.

        Raises OSError; then no object of the group may be reported, although some may exist, each
        of them whole.
        """

    def abort(self) -> None:
        """Drop what was appended and not committed."""


class Draft(Protocol):
    """A file whose parts are written in any order before it becomes an object.

    It has no key yet: a dropped draft leaves nothing behind.
    """

    @property
    def adoptable(self) -> bool:
        """Return whether a writer of its store can still take it; false for scratch space."""

    def write(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Write all of `buffers` contiguously from `offset` on. Raises OSError."""

    def read(self, start: int, count: int) -> bytes:
        """Return the bytes `[start, start + count)`, all of them written. Raises OSError."""

    def view(self) -> memoryview:
        """Return the whole file, read-only and mapped; readable after the draft is dropped.

        Raises OSError, MidstreamError.
        """

    def truncate(self, size: int) -> None: ...


@runtime_checkable
class Drafts(Protocol):
    """Optional capability: objects whose parts are written in any order. The store's writers are
    `Adopting`.
    """

    def draft(self, key: str) -> Draft | None:
        """Return a draft for an object that will get `key`; None if drafts are impossible here.

        Raises OSError, ValueError.
        """


@runtime_checkable
class Adopting(Protocol):
    """A `StoreWriter` that takes drafts."""

    def adopt(self, key: str, draft: Draft) -> None:
        """Add an adoptable draft as the object `key`, as `append` adds bytes.

        Raises OSError, ValueError.
        """


@runtime_checkable
class Signing(Protocol):
    """Optional capability: links that need no credentials."""

    def sign(self, key: str, seconds: int, endpoint: str = "") -> str:
        """Return a URL with which any caller can read the object for `seconds`.

        `endpoint`: how callers reach the store, if not as this process does.
        """


@runtime_checkable
class Distant(Protocol):
    """Optional capability: concurrent reads of many objects, because each answer takes time."""

    def together(self, action: Callable[[T], R], items: Iterable[T]) -> list[R]:
        """Run `action` on all items concurrently and return the results.

        Raises the first error once no action runs any more. An `action` must not call this.
        """


@runtime_checkable
class Referring(Protocol):
    """Optional capability: finding the segments of a job without reading every index."""

    def segments(self, job: str) -> list[str]:
        """Return the keys of the segments that may hold blobs of the job, sorted.

        `unmark(job)` removes these references. Raises OSError.
        """


@runtime_checkable
class Demanding(Protocol):
    """Optional requirement: features that the store's server may lack."""

    def unfit(self) -> str:
        """Return why the server can never be used; empty when it can.

        Raises OSError when that is unknown now.
        """


@runtime_checkable
class Rewriting(Protocol):
    """Optional restriction: erasing replaces the whole segment, which is in memory meanwhile."""

    @property
    def rewritten_bytes(self) -> int:
        """The most bytes that a segment with several blobs should have; a segment with a single
        blob is not rewritten but deleted.
        """


class Segment(Protocol):
    """An object that many blobs share, with its index (`index_of(key)`); both are created together.

    Belongs to one thread of one process.
    """

    key: str
    size: int  # bytes so far

    @property
    def usable(self) -> bool:
        """Return whether another group may follow: false if the stored content is uncertain, or if
        the segment takes only one group.
        """

    def append(self, data: Sequence[Buffer], index: bytes) -> None:
        """Append a group: first `data` at `size`, then `index` to the index; durable on return.

        Raises OSError; then none of the group is in the segment. After NotInPlaceError, the group
        can be appended to another segment.
        """

    def close(self) -> None:
        """Append nothing from now on."""


@runtime_checkable
class ArtifactStore(Protocol):
    """A store of objects. Threads may share it; equal stores hold the same objects."""

    @property
    def uri(self) -> str:
        """The URI that `open_store` takes."""

    def prepare(self) -> None:
        """Create the store before anything is written, so that deletion can distinguish an empty
        store from a missing one. Raises OSError.
        """

    def trouble(self) -> str:
        """Return why the store cannot be written, such as `disk full: …`; empty if it can be
        written or does not exist here.
        """

    def used(self) -> int:
        """Return the bytes that all objects take."""

    def writer(self) -> StoreWriter: ...

    def segment(self, key: str) -> Segment:
        """Create a segment.

        Raises FileExistsError if it exists, OSError, and ValueError for a key outside the store.
        """

    def open(self, key: str, hold: bool = True) -> Handle:
        """Open an object for reading.

        `hold`: nothing in it is erased until the handle and its views are dropped. Raises OSError,
        ValueError.
        """

    def stat(self, key: str) -> int:
        """Return the bytes of an object that this process may read. Raises OSError, ValueError."""

    def children(self, folder: str = "") -> list[str]:
        """Return the keys directly in `folder`, sorted, without objects that are still being
        written; folders end in "/".
        """

    def check(self, key: str) -> None:
        """Raise ValueError for a key that leads outside the store, also through links in it."""

    def link(self, key: str) -> str | None:
        """Return the path or URL at which other programs read the object; None if there is none."""

    def delete(self, key: str) -> None:
        """Remove an object, or with a final "/" everything below it; a missing key is no error.

        Raises OSError.
        """

    def erase(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        """Durably replace (offset, bytes) ranges of a segment by zeros; returns False, with nothing
        done, while the segment is held. Raises OSError.
        """

    def sealed(self, key: str) -> bool:
        """Return whether no process appends to the segment any more. Raises OSError."""

    def mark(self, name: str) -> None:
        """Record that the objects of `name` are being deleted.

        Raises OSError if there is no store.
        """

    def unmark(self, name: str) -> None: ...

    def marked(self, name: str) -> bool: ...

    def marks(self) -> list[str]:
        """Return every marked name, sorted."""


@contextmanager
def committed(store: ArtifactStore) -> Iterator[StoreWriter]:
    """Yield a writer, whose objects are durable after the block; if the block or the commit raises,
    what was not committed is dropped.
    """
    writer = store.writer()
    try:
        yield writer
        writer.commit()
    except BaseException:
        writer.abort()
        raise


def check_key(key: str) -> str:
    """Returns the key. Raises ValueError if it is not inside the store."""
    if key.startswith("/") or ".." in key.split("/") or not key.strip("./"):
        raise ValueError(f"capture path {key!r} is not inside the capture root")
    return key


def below(uri: str, name: str) -> str:
    """Returns the URI of the store `name` inside the store at `uri`."""
    path, mark, options = uri.partition("?") if _SCHEME.match(uri) else (uri, "", "")
    return f"{path.rstrip('/')}/{name}{mark}{options}"


def around(uri: str) -> tuple[str, str]:
    """Inverts `below`: returns the URI of the outer store, and the name."""
    path, mark, options = uri.partition("?") if _SCHEME.match(uri) else (uri, "", "")
    outer, _, name = path.rpartition("/")
    return outer + mark + options, name


@lru_cache(maxsize=64)
def open_store(uri: str | PurePath) -> ArtifactStore:
    """Returns the store at a URI or in a local folder. `scheme://…` is opened by the function that
    an installed package names under the scheme, in the entry points of `STORES`.

    Opening does not access the store. Raises ValueError for a scheme that no package has.
    """
    text = str(uri)
    match = _SCHEME.match(text)
    scheme = match[1] if match else "file"
    return _opener(scheme)(text)


def _opener(scheme: str) -> Callable[[str], ArtifactStore]:
    opener: Callable[[str], ArtifactStore]
    if scheme == "file":
        # this module is imported by that one
        opener = import_module(f"{__package__}.file_store").open_store
        return opener
    if scheme not in packages.offered(STORES) and scheme not in PACKAGED:
        raise ValueError(
            f"there is no artifact store for {scheme}://; valid: a folder, file:///folder, "
            "or s3://bucket/prefix"
        )
    try:
        opener = packages.load(STORES, scheme, extra=scheme if scheme in PACKAGED else "")
    except packages.MissingPackageError as error:
        raise ValueError(f"a store at {scheme}:// {error}") from error
    return opener
