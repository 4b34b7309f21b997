"""Sends a webhook's HTTP request: signed, to a checked address, without redirects, bounded in time
and size.
"""

import asyncio
import base64
import hashlib
import hmac
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

import httpcore2

from midstream.schemas.base.errors import Translated
from midstream.schemas.base.version import __version__

from .targets import IPAddress, refusal, url_fault

SECRET_PREFIX = "whsec_"
USER_AGENT = f"midstream/{__version__} (webhooks)"
#: Bytes of a response's body that are read and ignored, so that its connection can be used again.
BODY_CAP = 16 * 1024
#: Seconds that reading the body may take once the status is known.
DRAIN_S = 1.0
#: Seconds for which an idle connection is kept.
KEEPALIVE_S = 20.0
#: Idle connections that are kept.
KEPT = 64
#: Maximum number of concurrent name lookups. It exceeds the concurrent deliveries of one tenant,
#: whose receivers may all have slow name servers: a lookup cannot be cancelled, and may outlast its
#: attempt.
RESOLVER_THREADS = 256

#: (host, port) → all addresses of the name. Raises OSError.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class TargetRefused(Exception):
    """The address may not be called; the message has the reason."""


class NoAnswer(Exception):
    """The receiver did not answer; the message has the symptom."""


class ReceiverAnswer(NamedTuple):
    status: int
    retry_after: str | None  # the header, as it came


# Not `standardwebhooks`, which signs with one secret: during a rotation two sign.
def signature(secrets: Iterable[str], message_id: str, timestamp: int, body: bytes) -> str:
    """Return the header `webhook-signature`: one `v1,…` per secret (`whsec_` and base64),
    HMAC-SHA256 by Standard Webhooks 1.0.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    keys = [base64.b64decode(secret.removeprefix(SECRET_PREFIX)) for secret in secrets]
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys
    )


class CheckedBackend(httpcore2.AsyncNetworkBackend):
    """Opens connections to checked addresses; looks each name up once, so that its addresses cannot
    change between check and connection.
    """

    def __init__(self, allow_private: bool, resolve: Resolver) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._backend = httpcore2.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """Connect to the host. Raises TargetRefused if any of its addresses is refused,
        httpcore2.ConnectError if none answers.
        """
        addresses = await self._addresses(host, port)
        for address in addresses:
            # one refused address is enough: a valid receiver's name has only public addresses
            if why := refusal(address, self._allow_private):
                # The receiver's owner reads this: it must not reveal addresses of this network.
                raise TargetRefused(
                    f"{host} resolves to an address that is {why}"
                    if host != str(address)
                    else f"{host} is {why}"
                )
        failure: Exception = httpcore2.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._backend.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _addresses(self, host: str, port: int) -> list[IPAddress]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass
        with Translated(
            (OSError, UnicodeError),
            lambda error: httpcore2.ConnectError(f"cannot resolve {host}: {error}"),
        ):
            return [ip_address(result) for result in await self._resolve(host, port)]


class Poster:
    """Posts webhooks over pooled connections.

    Belongs to the event loop on which it is used; end it with `close()`. `resolve`: the name
    lookup, replaced in tests.
    """

    def __init__(
        self, allow_private: bool, timeout_s: float, resolve: Resolver | None = None
    ) -> None:
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="webhook-names")
        self._pool = httpcore2.AsyncConnectionPool(
            # trusts the system's certificate authorities, or those of SSL_CERT_FILE or SSL_CERT_DIR
            ssl_context=httpcore2.default_ssl_context(),
            max_connections=None,  # the sender limits them
            max_keepalive_connections=KEPT,
            keepalive_expiry=KEEPALIVE_S,
            network_backend=CheckedBackend(allow_private, resolve or self._look_up),
        )

    async def close(self) -> None:
        await self._pool.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def post(
        self, url: str, message_id: str, timestamp: int, body: bytes, secrets: Iterable[str]
    ) -> ReceiverAnswer:
        """Make one attempt.

        Raises TargetRefused, or NoAnswer if no HTTP response arrives within the timeout.
        """
        if fault := url_fault(url, self._allow_private):
            raise TargetRefused(fault)
        headers = [
            ("host", urlsplit(url).netloc),
            ("user-agent", USER_AGENT),
            ("accept", "*/*"),
            ("content-type", "application/json"),
            ("webhook-id", message_id),
            ("webhook-timestamp", str(timestamp)),
            ("webhook-signature", signature(secrets, message_id, timestamp, body)),
        ]
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._post(url, headers, body)
        except TimeoutError as error:
            raise NoAnswer(f"no answer within {self._timeout_s:g} s") from error
        except (
            httpcore2.NetworkError,
            httpcore2.TimeoutException,
            httpcore2.ProtocolError,
            ssl.SSLError,
            OSError,
        ) as error:
            raise NoAnswer(_why(error)) from error

    async def _post(self, url: str, headers: list[tuple[str, str]], body: bytes) -> ReceiverAnswer:
        async with self._pool.stream("POST", url, headers=headers, content=body) as response:
            answer = ReceiverAnswer(response.status, _header(response.headers, b"retry-after"))
            try:
                async with asyncio.timeout(DRAIN_S):
                    size = 0
                    async for part in response.aiter_stream():
                        size += len(part)
                        if size > BODY_CAP:
                            break
            except (
                TimeoutError,
                httpcore2.NetworkError,
                httpcore2.TimeoutException,
                httpcore2.ProtocolError,
            ):
                pass  # the status is the answer; the connection is closed
            return answer

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        results = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in results))


def _why(error: BaseException) -> str:
    """Return the error's message, with that of its root cause."""
    root: BaseException = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    message = str(error) or type(error).__name__
    detail = str(root)
    return message if detail in message else f"{message}: {detail}"


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)
