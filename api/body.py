"""How is a request's body read? Bounded before it is buffered, and decoded strictly into the handler's type.

It is JSON, or a file where a route takes one.
"""

import hashlib
from typing import Any

import anyio
import anyio.to_thread
import msgspec
from litestar import Request
from litestar.exceptions import InternalServerException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge

from ..schemas.base import from_json
from ..schemas.errors import MidstreamError, invalid
from ..schemas.keys import scoped
from . import problems
from .auth import caller_of

#: A client that sends too much hears of it only once it has stopped sending; we read this many times the limit for it.
DRAIN_FACTOR = 4
DRAIN_S = 5.0

MAX_KEY_LENGTH = 255

#: Media types of safetensors files, for the routes that take one.
FILE_TYPES = ("application/vnd.safetensors", "application/octet-stream")


class JsonRequest(Request[Any, Any, Any]):
    """Litestar's request with our reading of the body. (Litestar itself would convert loosely, `"1"` to 1.)"""

    _more = True  # whether more of the body is to come

    async def body(self) -> bytes:
        receive = self.receive

        async def noting() -> Any:
            message = await receive()
            self._more = message["type"] == "http.request" and message.get("more_body", False)
            return message

        self.receive = noting
        try:
            return await super().body()
        except RequestEntityTooLarge as error:
            limit = self.route_handler.resolve_request_max_body_size() or 0
            await self._drain(limit * DRAIN_FACTOR)
            raise MidstreamError(
                "payload_too_large", "the body is too large", allowed=f"at most {limit} bytes (MIDSTREAM_MAX_BODY_MIB)"
            ) from error
        except InternalServerException as error:  # how Litestar says that the client left in the middle
            raise problems.ClientGone from error
        finally:
            self.receive = receive

    async def json(self) -> Any:
        media, _ = self.content_type
        read_file = self.route_handler.opt.get("file")  # what makes a file the same as JSON, off the event loop
        if read_file and media in FILE_TYPES:
            return await anyio.to_thread.run_sync(read_file, await self.body())
        if media != "application/json":
            allowed = ", ".join(("application/json", *(FILE_TYPES if read_file else ())))
            raise MidstreamError(
                "unsupported_media_type", f"the body is {media or 'of unnamed type'}", field="Content-Type", allowed=allowed
            )
        wanted = self.route_handler.parsed_data_field
        try:
            return from_json(await self.body(), wanted.annotation if wanted else Any)
        except msgspec.DecodeError as error:
            raise problems.malformed(error) from error

    async def _drain(self, most: int) -> None:
        """Throw away what is still being sent, up to `most` bytes and a few seconds."""
        if "expect" in self.headers:  # this client asks before it sends
            return
        with anyio.move_on_after(DRAIN_S):
            while self._more and most > 0:
                message = await self.receive()
                if message["type"] != "http.request":
                    return
                most -= len(message["body"])

    async def idempotency(self, key: str | None) -> tuple[str, str] | None:
        """The `Idempotency-Key`, as it is kept for the caller's tenant, and the SHA-256 of what was asked under it.

        None without a key. Raises a 400 naming it.
        """
        if key is None:
            return None
        if not 0 < len(key) <= MAX_KEY_LENGTH or not (key.isascii() and key.isprintable()):
            raise invalid("Idempotency-Key", "is not 1 to 255 printable ASCII characters")
        asked = hashlib.sha256(self.url.path.encode() + b"\0")
        asked.update(await self.body())
        return scoped(caller_of(self).tenant, key), asked.hexdigest()
