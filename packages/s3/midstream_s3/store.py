"""Artifacts in a bucket of S3, or of a server that speaks its protocol.

An object is uploaded whole or in parts, becomes visible when it is complete, and counts as durable
when the store reports it with the size and the ETag of the upload. In a group, indices are
uploaded after the objects that they describe. A segment holds a single group. A mark is an empty
object `.deleted/<name>`. Names that begin with a dot are not listed. See
docs/decisions/0034-object-storage.md.
"""

import errno
import queue
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, Self, TypeVar
from urllib.parse import parse_qsl, urlencode, urlsplit

import obstore

from midstream.schemas.jobs.captures import SEGMENTS, index_of
from midstream.schemas.settings.faults import crash_point
from midstream.storage.calls import StoreCall
from midstream.storage.disk import disk_trouble
from midstream.storage.store import Buffer, NotInPlaceError, check_key, committed

from .client import S3Address, Stale, ask, client, counted, explained, together, where

T = TypeVar("T")
R = TypeVar("R")

#: Folders of marks and of references (an empty object `.segments/<job>/<tag>/<segment>` for each
#: segment with blobs of a job), and keys of test writes.
DELETED = ".deleted"
REFERENCES = ".segments"
PROBE = ".probe"
CONDITIONS = ".conditions"
_NOTHING = b"midstream"
_NO_TAG = '"00000000000000000000000000000000"'
_JOB = re.compile(rb'"job":"([^"\\/]+)"')
#: Bytes of a part of an upload or a download, and the most parts that S3 accepts: an object has at
#: most 80 GiB.
PART = 8 << 20
MAX_PARTS = 10_000
#: The largest segment with several blobs, in bytes: erasing one blob reads the whole segment into
#: memory.
REWRITTEN = 16 << 20
#: The most parts of one object that are being uploaded, and that wait to be uploaded.
_UPLOADING = 4
_WAITING = 2
#: A read fetches at least this many bytes, so that a header or a small blob takes one request and
#: comes from one version of the object. A read that continues where the previous one ended fetches
#: a whole part.
_READ_AHEAD = 256 << 10
#: How often reading or erasing an object is tried while other processes change it.
_TRIES = 10
#: The most objects that S3 deletes with one request.
_DELETED_TOGETHER = 1000
#: How often a request is tried if the complete response is shorter than requested. (obstore itself
#: repeats requests whose response is cut off.)
_SHORT_TRIES = 3
#: Seconds for which the outcome of a test write is kept: of a successful one, of a failed one.
_GOOD_S = 10.0
_BAD_S = 2.0

_OPTIONS = ("endpoint", "region")


def open_store(uri: str) -> "S3Store":
    """Opens the store at `s3://bucket/prefix`; `endpoint` and `region` may be in the URI's query.

    Raises ValueError.
    """
    parts = urlsplit(uri)
    options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    if unknown := options.keys() - set(_OPTIONS):
        raise ValueError(
            f"{', '.join(sorted(unknown))}: unknown option of an s3:// URI; valid: "
            f"{', '.join(_OPTIONS)}"
        )
    if not parts.netloc or "@" in parts.netloc:
        raise ValueError("an s3:// URI names a bucket and no credentials: s3://bucket/prefix")
    return S3Store(
        S3Address(
            parts.netloc,
            parts.path.strip("/"),
            options.get("endpoint", ""),
            options.get("region", ""),
        )
    )


@dataclass(frozen=True)
class S3Store:
    """The store in the bucket and prefix of `address`."""

    address: S3Address

    @property
    def uri(self) -> str:
        """The store's URI, without credentials."""
        options = urlencode(
            [(name, value) for name in _OPTIONS if (value := getattr(self.address, name))]
        )
        return self.link("") + (f"?{options}" if options else "")

    @property
    def rewritten_bytes(self) -> int:
        return REWRITTEN

    def prepare(self) -> None:
        self.marks()

    def trouble(self) -> str:
        return _troubles.of(self)

    def unfit(self) -> str:
        """Test conditional writes and reads: a wrong ETag must be rejected, and the right one
        accepted.

        Returns why the server cannot be used; empty if it can.
        """
        key = check_key(f"{CONDITIONS}/{secrets.token_hex(8)}")
        s3 = client(self.address, quick=True)

        def obeyed(condition: Callable[[str], object], tag: str) -> bool:
            try:
                with counted("probe"), explained(self.address):
                    condition(tag)
            except Stale:
                return False
            except OSError as error:
                if error.errno != errno.ENOSYS:
                    raise
                # conditions are not supported: count it as a wrong ETag that was accepted
                return tag == _NO_TAG
            return True

        def write(tag: str) -> object:
            return obstore.put(s3, key, _NOTHING, use_multipart=False, mode={"e_tag": tag})

        def read(tag: str) -> object:
            return obstore.get(s3, key, options={"if_match": tag}).bytes()

        with counted("probe"), explained(self.address):
            tag = obstore.put(s3, key, _NOTHING, use_multipart=False)["e_tag"] or ""
        try:
            for what, condition in (("writes", write), ("reads", read)):
                if obeyed(condition, _NO_TAG) or not any(
                    obeyed(condition, form) for form in _forms(tag)
                ):
                    return (
                        f"{where(self.address)} has no conditional {what} (If-Match): without them "
                        "captures cannot be deleted safely"
                    )
        finally:
            with suppress(OSError), counted("probe"), explained(self.address):
                obstore.delete(s3, key)
        return ""

    def used(self) -> int:
        return sum(item["size"] for item in self.listed())

    def writer(self) -> "S3Writer":
        return S3Writer(self)

    def segment(self, key: str) -> "S3Segment":
        return S3Segment(self, key)

    def open(self, key: str, hold: bool = True) -> "S3Handle":
        return S3Handle(self, key)

    def stat(self, key: str) -> int:
        return self.head(key)[0]

    def children(self, folder: str = "") -> list[str]:
        result = self.ask(
            "list", lambda s3, _: obstore.list_with_delimiter(s3, folder or None), folder
        )
        keys = [
            *(f"{path}/" for path in result["common_prefixes"]),
            *(item["path"] for item in result["objects"]),
        ]
        return sorted(
            key for key in keys if key != folder and not key.removeprefix(folder).startswith(".")
        )

    def check(self, key: str) -> None:
        check_key(key)

    def link(self, key: str) -> str:
        return f"s3://{'/'.join(filter(None, (self.address.bucket, self.address.prefix, key)))}"

    # A link opens the whole object, so callers sign only objects of a single job; blobs in a
    # segment, which may be of several tenants, go through the API.
    def sign(self, key: str, seconds: int, endpoint: str = "") -> str:
        address = self.address._replace(endpoint=endpoint or self.address.endpoint)
        with explained(address, key):
            return obstore.sign(client(address), "GET", check_key(key), timedelta(seconds=seconds))

    def delete(self, key: str) -> None:
        check_key(key)
        if not key.endswith("/"):
            self.ask("delete", lambda s3, _: obstore.delete(s3, key), key)
            return
        paths = [item["path"] for item in self.listed(key)]
        for at in range(0, len(paths), _DELETED_TOGETHER):
            batch = paths[at : at + _DELETED_TOGETHER]
            self.ask(
                "delete",
                lambda s3, _, batch=batch: obstore.delete(s3, batch),  # type: ignore[misc]
                key,
            )

    # Replaced, because objects cannot be changed in place. A handle asks for the version that it
    # opened, and a small blob takes one request, so only readers of large ones can find it gone.
    def erase(self, key: str, ranges: Sequence[tuple[int, int]]) -> bool:
        """Replace the object by a copy with zeros in `ranges`. If another process changes it
        meanwhile, start again from the new version.
        """
        for _ in range(_TRIES):
            size, tag = self.head(key)
            content = bytearray(size)
            with suppress(Stale):
                self.fetch(key, tag, 0, memoryview(content))
                for offset, length in ranges:
                    content[offset : offset + length] = bytes(length)
                for form in _forms(tag):
                    with suppress(Stale):
                        self.put(key, content, mode={"e_tag": form})
                        return True
        raise OSError(errno.EBUSY, f"{self.link(key)} is being changed by other processes")

    def sealed(self, key: str) -> bool:
        return True

    # An empty object and not a tag: some servers have no tags, and tags cannot be listed.
    def mark(self, name: str) -> None:
        self.put(check_key(f"{DELETED}/{name}"), b"")

    def unmark(self, name: str) -> None:
        self.delete(f"{REFERENCES}/{name}/")
        self.delete(f"{DELETED}/{name}")

    def segments(self, job: str) -> list[str]:
        references = self.listed(check_key(f"{REFERENCES}/{job}"))
        paths = (item["path"].split("/")[-2:] for item in references)
        return sorted(f"{tag}/{SEGMENTS}/{name}" for tag, name in paths)

    def marked(self, name: str) -> bool:
        key = check_key(f"{DELETED}/{name}")
        try:
            self.ask("head", lambda s3, _: obstore.head(s3, key), key)
        except FileNotFoundError:
            return False
        return True

    def marks(self) -> list[str]:
        result = self.ask("list", lambda s3, _: obstore.list_with_delimiter(s3, DELETED))
        return sorted(item["path"].rpartition("/")[2] for item in result["objects"])

    def together(self, action: Callable[[T], R], items: Iterable[T]) -> list[R]:
        return together(action, items)

    def ask(self, operation: str, action: Callable[[Any, StoreCall], T], key: str = "") -> T:
        return ask(self.address, operation, action, key)

    def put(self, key: str, content: Buffer, **more: Any) -> str:
        """Upload an object, and return its ETag.

        Raises OSError, and Stale if the existing object does not have the ETag in `mode`.
        """

        def put(s3: Any, call: StoreCall) -> str:
            call.size = len(content)
            return obstore.put(s3, key, content, use_multipart=False, **more)["e_tag"] or ""

        return self.ask("put", put, key)

    def listed(self, folder: str = "") -> list[Any]:
        """Return all objects below a folder, or of the store, as obstore describes them."""
        return self.ask(
            "list",
            lambda s3, _: list(
                chain.from_iterable(obstore.list(s3, folder or None, chunk_size=1000))
            ),
            folder,
        )

    def head(self, key: str) -> tuple[int, str]:
        """Return size and ETag of an object. Raises OSError, ValueError."""
        try:
            result = self.ask("head", lambda s3, _: obstore.head(s3, check_key(key)), key)
        except OSError:
            # a response to HEAD has no reason: a missing bucket looks like a missing key, and a
            # wrong access key like any refusal; listing raises the actual error
            self.marks()
            raise
        return result["size"], result["e_tag"] or ""

    def fetch(self, key: str, tag: str, start: int, into: memoryview) -> None:
        """Fill `into` with the object's bytes from `start` on. Raises Stale if its ETag is not
        `tag`; OSError.
        """

        def part(at: int) -> None:
            stop = min(at + PART, len(into))
            options: Any = {"range": (start + at, start + stop)} | (
                {"if_match": tag} if tag else {}
            )
            for _ in range(_SHORT_TRIES):
                result = self.ask(
                    "get", lambda s3, call: _body(obstore.get(s3, key, options=options), call), key
                )
                if len(result) == stop - at:
                    into[at:stop] = memoryview(result)
                    return
            raise OSError(
                errno.EIO, f"{self.link(key)}: {len(result)} of {stop - at} bytes arrived"
            )

        _each(part, range(0, len(into), PART))


def _forms(tag: str) -> tuple[str, str]:
    """Return both forms of an ETag for a conditional write: with quotation marks, which HTTP
    requires, and without, which Ceph uses.
    """
    return tag, tag.strip('"')


def _body(result: Any, call: StoreCall) -> Any:
    content = result.bytes()
    call.size = len(content)
    return content


def _each(action: Callable[[T], object], items: Sequence[T]) -> None:
    """Run `action` on all items concurrently; on a single item, in this thread."""
    if len(items) == 1:
        action(items[0])
    else:
        together(action, items)


class S3Handle:
    """An object opened for reading: one version of it, fixed by the first read."""

    def __init__(self, store: S3Store, key: str) -> None:
        self._store = store
        self._key = check_key(key)
        self._start = 0
        self._ahead = memoryview(b"")
        self._begun = False
        self._look()

    def _look(self) -> None:
        """Get size, version and the first bytes, all in one request."""
        try:
            self.size, self._tag, content = self._store.ask("get", self._begin, self._key)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            # an empty object has no range
            self.size, self._tag = self._store.head(self._key)
            content = obstore.Bytes(b"")
        if len(content) == min(self.size, _READ_AHEAD):
            self._start = 0
            self._ahead = memoryview(content)

    def _begin(self, s3: Any, call: StoreCall) -> tuple[int, str, Any]:
        result = obstore.get(s3, self._key, options={"range": (0, _READ_AHEAD)})
        return result.meta["size"], result.meta["e_tag"] or "", _body(result, call)

    @property
    def stamp(self) -> str:
        return self._tag

    def read(self, start: int, count: int) -> bytes:
        count = min(count, self.size - start)
        if count <= 0:
            return b""
        if not (self._start <= start and start + count <= self._start + len(self._ahead)):
            sequential = self._begun and start == self._start + len(self._ahead)
            ahead = self._fetch(start, max(count, PART if sequential else _READ_AHEAD))
            self._start = start  # after the fetch, which may have begun anew
            self._ahead = ahead
        self._begun = True
        return bytes(self._ahead[start - self._start :][:count])

    def view(self) -> memoryview:
        """Return the whole object, in memory."""
        if len(self._ahead) != self.size:
            self._ahead = self._fetch(0, self.size)
            self._start = 0
        self._begun = True
        return self._ahead.toreadonly()

    def _fetch(self, start: int, count: int) -> memoryview:
        for _ in range(_TRIES):
            result = memoryview(bytearray(min(count, max(0, self.size - start))))
            try:
                self._store.fetch(self._key, self._tag, start, result)
            except Stale:
                if self._begun:
                    raise
                self._look()
            else:
                return result
        raise Stale(errno.ESTALE, "the object is being changed by other processes", self._key)

    def close(self) -> None:
        self._ahead = memoryview(b"")
        self._start = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _Dropped(Exception):
    """Makes obstore abort an upload, so that no object is created."""


# Up to a part is held; beyond that, an object takes about 60 MiB of memory regardless of its size.
# Parts that a killed process leaves are invisible, until a lifecycle rule removes them.
class _Upload:
    """An object that is being written: held in memory while it is smaller than a part, then
    uploaded in parts.
    """

    def __init__(self, store: S3Store, key: str) -> None:
        self._store = store
        self.key = check_key(key)
        self.size = 0
        self._held = bytearray()
        self._parts: queue.Queue[bytearray | Exception | None] = queue.Queue(_WAITING)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._tag = ""

    def write(self, buffers: Sequence[Buffer]) -> None:
        for buffer in buffers:
            rest = memoryview(buffer).cast("B")
            while len(rest):
                if len(self._held) == PART:
                    self._pass_on(self._held)
                    self._held = bytearray()
                taken = rest[: PART - len(self._held)]
                self._held += taken
                self.size += len(taken)
                rest = rest[len(taken) :]

    def complete(self) -> None:
        """Finish the upload: when this returns, the store has the object. Raises OSError."""
        if self._thread is None:
            self._tag = self._store.put(self.key, self._held)
            return
        self._pass_on(self._held)
        self._pass_on(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def confirm(self) -> None:
        """Compare size and ETag in the store with those of the upload. Raises NotInPlaceError."""
        try:
            head = self._store.head(self.key)
        except FileNotFoundError as error:
            raise NotInPlaceError(f"{self.key} was deleted while being written") from error
        size = head[0]
        tag = head[1].strip('"')  # Ceph sometimes omits the quotation marks
        uploaded = self._tag.strip('"')
        if size != self.size or (uploaded and tag and uploaded != tag):
            raise NotInPlaceError(f"{self.key} was replaced while being written")

    def drop(self) -> None:
        if self._thread is not None:
            with suppress(Exception):
                self._pass_on(_Dropped())
            self._thread.join()

    def _pass_on(self, part: bytearray | Exception | None) -> None:
        if self.size > PART * MAX_PARTS:
            raise OSError(errno.EFBIG, f"{self.key} is larger than {PART * MAX_PARTS >> 30} GiB")
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, name="midstream-s3-upload", daemon=True
            )
            self._thread.start()
        while self._thread.is_alive():
            with suppress(queue.Full):
                self._parts.put(part, timeout=0.2)
                return
        raise self._error or OSError(errno.EIO, f"the upload of {self.key} has ended")

    def _run(self) -> None:
        try:
            with counted("upload") as call, explained(self._store.address, self.key):
                put = obstore.put(
                    client(self._store.address, repeats=True),
                    self.key,
                    self._iterate(),
                    use_multipart=True,
                    chunk_size=PART,
                    max_concurrency=_UPLOADING,
                )
                call.size = self.size
            self._tag = put["e_tag"] or ""
        except BaseException as error:
            self._error = error.with_traceback(None)

    def _iterate(self) -> Iterator[bytearray]:
        """Yield the parts. An exception raised here makes obstore abort the upload, so that no
        parts are left.
        """
        while (part := self._parts.get()) is not None:
            if isinstance(part, Exception):
                raise part
            yield part


class S3Writer:
    """Uploads that are completed together in `commit`."""

    def __init__(self, store: S3Store) -> None:
        self._store = store
        self._uploads = dict[str, _Upload]()

    def append(self, key: str, buffers: Sequence[Buffer]) -> None:
        """Add bytes to an object; they are copied or uploaded when this returns."""
        if key not in self._uploads:
            self._uploads[key] = _Upload(self._store, key)
        self._uploads[key].write(buffers)

    def commit(self) -> None:
        """Complete the uploads, indices last: an index never describes an object that is
        missing.
        """
        indices = {index_of(key) for key in self._uploads}
        uploads = list(self._uploads.values())
        _each(_Upload.complete, [upload for upload in uploads if upload.key not in indices])
        crash_point("capture.renamed")
        _each(_Upload.complete, [upload for upload in uploads if upload.key in indices])
        # Only now may receipts leave: an object that was replaced or deleted meanwhile was not
        # written. A group takes three waves of requests (blobs, indices, this), regardless of its
        # size.
        _each(_Upload.confirm, [upload for upload in uploads if upload.size])
        self._uploads.clear()

    def abort(self) -> None:
        """Abort the uploads, and forget the outcome of the last test write: the store may be
        unreachable.
        """
        # Queued groups then wait for one test write, not each for its own retries.
        _troubles.forget(self._store)
        for upload in self._uploads.values():
            upload.drop()
        self._uploads.clear()


class S3Segment:
    """A segment in a bucket: takes a single group, and is complete after that."""

    def __init__(self, store: S3Store, key: str) -> None:
        # Not a conditional creation (`If-None-Match: *`): a request that is repeated because its
        # answer was lost would fail on its own object. Segments have the boot id in their names.
        with suppress(FileNotFoundError):
            store.stat(key)
            raise FileExistsError(errno.EEXIST, "there is such a segment", key)
        self._store = store
        self.key = key
        self.size = 0
        self.usable = True

    def append(self, data: Sequence[Buffer], index: bytes) -> None:
        if not self.usable:
            raise OSError(errno.EROFS, "the segment is complete", self.key)
        self.usable = False
        try:
            with committed(self._store) as writer:
                writer.append(self.key, data)
                tag, _, name = self.key.partition(f"/{SEGMENTS}/")
                for job in sorted(set(_JOB.findall(index))):
                    # before the index, so that a deletion finds every segment with blobs of the job
                    # Each group is a segment here, so a tag may have hundreds of thousands of
                    # indices; reading all of them, as on a disk, would take too long.
                    writer.append(f"{REFERENCES}/{job.decode()}/{tag}/{name}", [])
                writer.append(index_of(self.key), [index])
                self.size = sum(map(len, data))
        except BaseException:
            # the stored content is uncertain: no reader may find it
            for key in (index_of(self.key), self.key):
                with suppress(OSError):
                    self._store.delete(key)
            raise

    def close(self) -> None:
        self.usable = False


class _Troubles:
    """Recent outcomes of test writes, by store."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known = dict[S3Store, tuple[float, str]]()
        self._fit: set[S3Store] = set()

    def of(self, store: S3Store) -> str:
        with self._lock:
            due, result = self._known.get(store, (0.0, ""))
            if time.monotonic() >= due:
                result = self._look(store)
                self._known[store] = time.monotonic() + (_BAD_S if result else _GOOD_S), result
            return result

    def forget(self, store: S3Store) -> None:
        with self._lock:
            self._known.pop(store, None)

    def _look(self, store: S3Store) -> str:
        try:
            with counted("probe"), explained(store.address):
                obstore.put(client(store.address, quick=True), PROBE, _NOTHING, use_multipart=False)
            if store not in self._fit:
                if why := store.unfit():
                    return why
                self._fit.add(store)
        except OSError as error:
            full = disk_trouble(error)
            return (f"{full}: " if full else "") + f"{error.strerror}: nothing can be written"
        return ""


_troubles = _Troubles()
