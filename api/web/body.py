"""Request bodies: bounded and counted while they arrive, before anything is decoded, then decoded
strictly into the handler's type.

JSON of at most `max_body_mib`; or, where a route takes one, a file of at most `max_file_mib`, which
is written to disk as it arrives.
"""

import errno
import hashlib
import tempfile
from collections.abc import AsyncGenerator, Callable, Coroutine
from pathlib import Path
from typing import IO, Any, NamedTuple, TypeVar, cast

import anyio
import anyio.to_thread
from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from ...schemas.access.keys import scoped
from ...schemas.base.errors import MidstreamError, Translated, invalid
from ...schemas.base.json_bounds import JsonCounter, TooManyValues
from ...schemas.base.limits import MAX_IDEMPOTENCY_KEY
from ...schemas.base.records import from_json
from ...schemas.jobs.job_requests import MAX_KEPT_BODY, Idempotency
from ...schemas.settings.settings import Settings
from . import problems
from .aside import aside, call_aside
from .auth import caller_of
from .pace import PACE
from .request_context import HandedOver, current

#: A client that sends too much reads the error only after it stops sending, so up to this many
#: times the limit is read and discarded.
DRAIN_FACTOR = 4
DRAIN_S = 5.0

#: Bytes and items of JSON (texts, objects, lists) that are decoded and resolved in the event loop
#: that answers calls; of larger bodies, `aside` does both.
INLINE_BYTES = 1 << 18
INLINE_ITEMS = 1 << 9
#: Bytes per write of a file to disk.
PIECE = 1 << 20

#: Media types of safetensors files, for the routes that take one.
FILE_TYPES = ("application/vnd.safetensors", "application/octet-stream")


T = TypeVar("T")


class BodyForms(NamedTuple):
    """Says what a route takes as its body."""

    json: Any  # the type of a JSON body
    file: Callable[[bytes], Any] | None = None  # decodes a file, off the event loop; None: no files


def _temporary(data_dir: Path) -> IO[bytes]:
    """Create a file without a name, removed when the request or the process ends."""
    folder = data_dir / "uploads"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return tempfile.TemporaryFile(dir=folder)


def _content(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()


class JsonRequest(Request[Any, Any, Any]):
    """Litestar's request with our reading of the body.

    (Litestar itself would convert loosely: `"1"` to 1.)
    """

    _more = True  # whether more of the body is to come
    _large = False  # whether what the body takes is computed aside
    _request_hash = ""  # SHA-256 of path and body, if the client sent an Idempotency-Key

    @property
    def _takes(self) -> BodyForms:
        """Return what the route takes; `opt["body"]` returns it by the path's parameters."""
        if (by_path := self.route_handler.opt.get("body")) is not None:
            return cast(BodyForms, by_path(self.path_params))
        data = self.route_handler.parsed_data_field
        return BodyForms(data.annotation if data else Any)

    @property
    def _file_decoder(self) -> Callable[[bytes], Any] | None:
        """The route's decoder, if the body is a file."""
        return self._takes.file if self.content_type[0] in FILE_TYPES else None

    async def body(self) -> bytes:
        encoding = self.headers.get("content-encoding", "identity")
        if encoding != "identity":  # a small compressed body may expand to a huge one
            raise MidstreamError(
                "unsupported_media_type",
                f"the body is compressed ({encoding[:40]})",
                field="Content-Encoding",
                allowed="an uncompressed body",
            )
        if self._file_decoder:
            # Litestar checks for a body before it calls `json`, which reads the file
            return b"file"
        receive = self.receive
        limit = self.route_handler.resolve_request_max_body_size() or 0

        async def noting() -> Any:
            message = await receive()
            self._more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        self.receive = noting
        try:
            return await super().body()
        except RequestEntityTooLarge as error:
            narrowed = limit < self.app.state.context.settings.tuning.max_body_mib << 20
            raise await self._too_large(limit, "" if narrowed else "max_body_mib") from error
        except TooManyValues as error:
            await self._drain(limit)
            raise problems.malformed(error) from error
        except InternalServerException as error:
            # Litestar raises this if the client leaves in the middle
            raise problems.ClientGone from error
        finally:
            self.receive = receive

    async def stream(self) -> AsyncGenerator[bytes, None]:
        """Yield the pieces of the body as they arrive.

        Raises TooManyValues, and HandedOver at the end of a large body if this process has a twin,
        which counts its values.
        """
        call = current()
        counter = JsonCounter()
        pieces = []
        size = 0
        async for piece in super().stream():
            size += len(piece)
            if size > INLINE_BYTES and call.has_twin:
                await PACE.wait(len(piece))
            else:
                counter.feed(piece)
            pieces.append(piece)
            yield piece
        self._large = size > INLINE_BYTES or counter.items > INLINE_ITEMS
        if self._large and call.has_twin:
            call.received = pieces
            raise HandedOver

    async def json(self) -> Any:
        media, _ = self.content_type
        if read_file := self._file_decoder:
            return await self._read_file(read_file)
        if media != "application/json":
            raise MidstreamError(
                "unsupported_media_type",
                f"the body has content type {media}" if media else "the body has no content type",
                field="Content-Type",
                allowed=", ".join(("application/json", *(FILE_TYPES if self._takes.file else ()))),
            )
        kind = self._takes.json
        body = await self.body()
        if "idempotency-key" in self.headers:
            query = f"?{self.url.query}" if self.url.query else ""
            request = hashlib.sha256(f"{self.url.path}{query}".encode() + b"\0")
            request.update(body)
            self._request_hash = request.hexdigest()
        call = current()
        call.large = self._large
        call.body = body if len(body) <= MAX_KEPT_BODY else b""
        call.received = [body] if call.has_twin else []
        # free it: it may be large, and its decoded form is larger
        self._body = self._connection_state.body = b""
        with Translated(problems.UNREADABLE, lambda error: problems.malformed(error, kind)):
            return await self.computed(from_json, body, kind)

    async def resolved(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what `work` returns, which takes as long as the body is large."""
        return await (aside(work) if self._large else work)

    async def computed(self, work: Callable[..., T], *args: Any) -> T:
        """Return `work(*args)`, which takes as long as the body is large."""
        return await call_aside(work, *args) if self._large else work(*args)

    async def _read_file(self, read: Callable[[bytes], Any]) -> Any:
        """Return what `read` returns for the body.

        Raises `payload_too_large`, and `unavailable` when the disk is full.
        """
        settings: Settings = self.app.state.context.settings
        try:
            with await anyio.to_thread.run_sync(_temporary, Path(settings.data_dir)) as file:
                await self._save(file, settings.tuning.max_file_mib << 20)
                return await anyio.to_thread.run_sync(lambda: read(_content(file)))
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            detail = "disk full" if full else f"the file cannot be stored: {error.strerror}"
            raise MidstreamError("unavailable", detail) from error

    async def _save(self, file: IO[bytes], limit: int) -> None:
        announced = self.content_length
        if announced is not None and announced > limit:
            raise await self._too_large(limit, "max_file_mib")
        piece = bytearray()
        size = 0
        while self._more:
            message = await self.receive()
            if message["type"] != "http.request":
                raise problems.ClientGone
            self._more = message.get("more_body", False)
            piece += message["body"]
            if size + len(piece) > limit:
                raise await self._too_large(limit, "max_file_mib")
            if len(piece) >= PIECE or not self._more:
                size += len(piece)
                await anyio.to_thread.run_sync(file.write, bytes(piece))
                piece.clear()

    async def _too_large(self, limit: int, setting: str) -> MidstreamError:
        await self._drain(limit * DRAIN_FACTOR)
        allowed = f"at most {limit} bytes" + (f" (MIDSTREAM_{setting.upper()})" if setting else "")
        return MidstreamError("payload_too_large", "the body is too large", allowed=allowed)

    async def _drain(self, most: int) -> None:
        """Discard what is still being sent, up to `most` bytes and a few seconds."""
        if "expect" in self.headers:  # this client has not sent it yet
            return
        with anyio.move_on_after(DRAIN_S):
            while self._more and most > 0:
                message = await self.receive()
                if message["type"] != "http.request":
                    return
                most -= len(message["body"])

    def idempotency(self, key: str | None) -> Idempotency | None:
        """Return what repeats of the request have in common; None without a key. Raises a 400
        naming the key.
        """
        if key is None:
            return None
        if not 0 < len(key) <= MAX_IDEMPOTENCY_KEY or not (key.isascii() and key.isprintable()):
            raise invalid(
                "Idempotency-Key", f"is not 1 to {MAX_IDEMPOTENCY_KEY} printable ASCII characters"
            )
        # else different bodies would count as the same
        assert self._request_hash, "a route with an Idempotency-Key takes JSON"
        return scoped(caller_of(self).tenant, key), self._request_hash
