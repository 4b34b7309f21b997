"""HTTP request of a webhook: signed, to a checked address, without redirects, bounded in time and
size.
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

import httpcore

from ...schemas.base.version import __version__
from .targets import Address, refusal, url_fault

SECRET_PREFIX = "whsec_"
USER_AGENT = f"midstream/{__version__} (webhooks)"
#: Bytes of an answer's body that are read: so few that its connection may be used again, never to
#: be looked at.
BODY_CAP = 16 * 1024
#: Seconds that reading them may take once the status is known.
DRAIN_S = 1.0
#: Seconds for which an idle connection is kept, and how many.
KEEPALIVE_S, KEPT = 20.0, 64
#: Names looked up concurrently: more than one tenant may send to concurrently, whose name servers
#: may all be slow. A lookup cannot be given up, so it may outlast the attempt that asked for it.
RESOLVER_THREADS = 256

#: (host, port) → all addresses of the name. Raises OSError.
Resolver = Callable[[str, int], Awaitable[Sequence[str]]]


class TargetRefused(Exception):
    """An address that may not be called; says which and why."""


class NoAnswer(Exception):
    """The receiver did not answer; says how that showed."""


class Answer(NamedTuple):
    status: int
    retry_after: str | None  # the header, as it came


def signature(secrets: Iterable[str], message_id: str, timestamp: int, body: bytes) -> str:
    """The header `webhook-signature`: one `v1,…` per secret (`whsec_` and base64), HMAC-SHA256 as
    Standard Webhooks 1.0 has it.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    keys = [base64.b64decode(secret.removeprefix(SECRET_PREFIX)) for secret in secrets]
    return " ".join(
        "v1," + base64.b64encode(hmac.digest(key, signed, hashlib.sha256)).decode() for key in keys
    )


class CheckedBackend(httpcore.AsyncNetworkBackend):
    """Opens connections to addresses that were checked, and looks each name up once: between check
    and connection it cannot change.
    """

    def __init__(self, allow_private: bool, resolve: Resolver) -> None:
        self._allow_private = allow_private
        self._resolve = resolve
        self._backend = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        """Raises TargetRefused when any address of the host is refused, httpcore.ConnectError when
        none answers.
        """
        addresses = await self._addresses(host, port)
        for address in addresses:
            # one is enough: a name with both public and private addresses is not a valid receiver
            if why := refusal(address, self._allow_private):
                # The receiver's owner reads this, so it must not reveal addresses of our network.
                raise TargetRefused(
                    f"{host} resolves to an address that is {why}"
                    if host != str(address)
                    else f"{host} is {why}"
                )
        failure: Exception = httpcore.ConnectError(f"{host} has no address")
        for address in addresses:
            try:
                return await self._backend.connect_tcp(
                    str(address), port, timeout, local_address, socket_options
                )
            except (httpcore.ConnectError, httpcore.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _addresses(self, host: str, port: int) -> list[Address]:
        try:
            return [ip_address(host)]
        except ValueError:
            pass
        try:
            return [ip_address(result) for result in await self._resolve(host, port)]
        except (OSError, UnicodeError) as error:
            raise httpcore.ConnectError(f"cannot resolve {host}: {error}") from error


class Poster:
    """Posts webhooks over kept connections.

    Belongs to the event loop it is used on; end it with `close()`.

    `resolve`: the name lookup, replaced in tests.
    """

    def __init__(
        self, allow_private: bool, timeout_s: float, resolve: Resolver | None = None
    ) -> None:
        self._allow_private = allow_private
        self._timeout_s = timeout_s
        self._threads = ThreadPoolExecutor(RESOLVER_THREADS, thread_name_prefix="webhook-names")
        self._pool = httpcore.AsyncConnectionPool(
            ssl_context=_tls(),
            max_connections=None,  # the sender says how many
            max_keepalive_connections=KEPT,
            keepalive_expiry=KEEPALIVE_S,
            network_backend=CheckedBackend(allow_private, resolve or self._look_up),
        )

    async def close(self) -> None:
        await self._pool.aclose()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def post(
        self, url: str, message_id: str, timestamp: int, body: bytes, secrets: Iterable[str]
    ) -> Answer:
        """One attempt.

        Raises TargetRefused, and NoAnswer for everything that is no HTTP answer within the time.
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
            httpcore.NetworkError,
            httpcore.TimeoutException,
            httpcore.ProtocolError,
            ssl.SSLError,
            OSError,
        ) as error:
            raise NoAnswer(_why(error)) from error

    async def _post(self, url: str, headers: list[tuple[str, str]], body: bytes) -> Answer:
        async with self._pool.stream("POST", url, headers=headers, content=body) as response:
            answer = Answer(response.status, _header(response.headers, b"retry-after"))
            try:
                async with asyncio.timeout(DRAIN_S):
                    size = 0
                    async for part in response.aiter_stream():
                        size += len(part)
                        if size > BODY_CAP:
                            break
            except (
                TimeoutError,
                httpcore.NetworkError,
                httpcore.TimeoutException,
                httpcore.ProtocolError,
            ):
                # the status is the answer; what follows it is of no interest, and its connection is
                # closed
                pass
            return answer

    async def _look_up(self, host: str, port: int) -> Sequence[str]:
        loop = asyncio.get_running_loop()
        threads = await loop.run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return list(dict.fromkeys(str(address[0]) for *_, address in threads))


def _why(error: BaseException) -> str:
    """In the library's words, and in those of what lies below."""
    root: BaseException = error
    while (cause := root.__cause__ or root.__context__) is not None:
        root = cause
    known, deeper = str(error) or type(error).__name__, str(root)
    return known if deeper in known else f"{known}: {deeper}"


def _header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> str | None:
    return next((value.decode("latin-1") for key, value in headers if key.lower() == name), None)


def _tls() -> ssl.SSLContext:
    """The machine's authorities (also those of SSL_CERT_FILE) and the ones that come with the HTTP
    library.
    """
    return httpcore.default_ssl_context()
