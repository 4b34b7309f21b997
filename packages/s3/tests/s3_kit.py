"""An S3 server for tests: moto behind a proxy that checks signatures as S3 does and injects faults.

TEST_S3=host:port: another server, which has the user below (docs/machines.md says what was
tried).

moto accepts any credentials and any time, does not compare bodies with their hashes, and may let
another write come between the check of a condition and the write that it was for. The proxy checks
the signature of headers and of presigned links (with botocore's implementation), their expiry, the
clock, and the SHA-256 of the body, answers with S3's own codes, and lets one conditional request
through at a time.
"""

import asyncio
import hashlib
import hmac
import os
import re
import secrets
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit
from urllib.request import Request, urlopen
from weakref import WeakSet

ACCESS_KEY = "AKIDTESTS"
SECRET_KEY = "not-a-secret-but-long-enough"
REGION = "us-east-1"
#: Seconds by which a request's time may differ from the server's.
SKEW_S = 900


@dataclass
class Fault:
    """What happens to the next `times` requests whose `METHOD /path?query` matches.

    `503`, `403 CODE`: that answer; `slow`: after `seconds`; `cut`: the connection ends in the
    middle of the request's body; `lost`: it is done, and the answer never comes; `half`: the answer
    ends in the middle of its body; `short`: it is short and says so; `flip`: a byte of the
    request's body changes on its way; `deaf`: its conditions are ignored; `ceph`: an ETag in its
    condition must have no quotation marks, as in versions of Ceph.
    """

    kind: str
    when: str = ""
    times: int = 1 << 30
    seconds: float = 0.0
    seen: int = 0


class Refused(Exception):
    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status = status
        self.code = code


@dataclass
class FaultProxy:
    upstream: str  # host:port
    faults: list[Fault] = field(default_factory=list)
    keys: dict[str, str] = field(default_factory=lambda: {ACCESS_KEY: SECRET_KEY})
    # of temporary keys: session token, and when both expire
    tokens: dict[str, tuple[str, float]] = field(default_factory=dict)
    clock: float = 0.0  # seconds by which this server is ahead
    seen: list[str] = field(default_factory=list)  # of every request: `METHOD /path?query`
    port: int = 0
    host: str = "127.0.0.1"

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        """Again on the same port, after `stop`."""
        ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, args=(ready,), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join()

    def fault(self, kind: str, when: str = "", **more: Any) -> Fault:
        self.faults.append(Fault(kind, when, **more))
        return self.faults[-1]

    def count(self, pattern: str) -> int:
        return sum(re.search(pattern, line) is not None for line in self.seen)

    def _run(self, ready: threading.Event) -> None:
        async def serve() -> None:
            self._end = asyncio.Event()
            self._condition = asyncio.Lock()
            writers: WeakSet[asyncio.StreamWriter] = WeakSet()
            serving = set()

            def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
                # here: a task that is cancelled before it begins closes nothing
                writers.add(writer)
                task = asyncio.create_task(self._serve(reader, writer))
                serving.add(task)
                task.add_done_callback(serving.discard)

            server = await asyncio.start_server(accept, self.host, self.port, limit=1 << 20)
            self.port = server.sockets[0].getsockname()[1]
            ready.set()
            await self._end.wait()
            server.close()
            served = asyncio.all_tasks() - {asyncio.current_task()}
            for task in served:
                task.cancel()
            await asyncio.gather(*served, return_exceptions=True)
            for writer in writers:
                # a socket that stays open is an answer that never comes, not a server that is away
                writer.transport.abort()
            await asyncio.sleep(0)  # now they are closed

        self._loop.run_until_complete(serve())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
        method, target, _ = first.split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in lines)
        }
        self.seen.append(f"{method} {target}")
        fault = next(
            (
                each
                for each in self.faults
                if each.times > 0 and re.search(each.when, self.seen[-1])
            ),
            None,
        )
        if fault is not None:
            fault.times -= 1
            fault.seen += 1
            await asyncio.sleep(fault.seconds)
        kind = fault.kind if fault else ""
        length = int(headers.get("content-length", 0))
        if kind == "cut":
            await reader.readexactly(length // 2)
            writer.transport.abort()
            return
        body = await reader.readexactly(length)
        if kind == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        try:
            if kind[:3].isdigit():
                raise Refused(int(kind[:3]), kind[4:] or "SlowDown")
            self._check(method, target, headers, body)
        except Refused as error:
            told = (
                b""
                if method == "HEAD"
                else f"<?xml version='1.0'?><Error><Code>{error.code}</Code></Error>".encode()
            )
            writer.write(
                (
                    f"HTTP/1.1 {error.status} X\r\nConnection: close\r\nContent-Length: "
                    f"{len(told)}\r\n\r\n"
                ).encode()
                + told
            )
            await writer.drain()
            return
        if kind == "deaf":
            headers = {name: value for name, value in headers.items() if name != "if-match"}
        if kind == "ceph" and headers.get("if-match", "").startswith('"'):
            headers["if-match"] = '"another"'
        async with (
            self._condition if headers.keys() & {"if-match", "if-none-match"} else nullcontext()
        ):
            answer = await self._forward(method, target, headers, body)
        if kind == "lost":
            writer.transport.abort()
            return
        if kind in ("half", "short"):
            top, _, rest = answer.partition(b"\r\n\r\n")
            rest = rest[: len(rest) // 2]
            if kind == "short":
                top = re.sub(rb"(?i)content-length: \d+", b"Content-Length: %d" % len(rest), top)
            answer = top + b"\r\n\r\n" + rest
        writer.write(answer)
        await writer.drain()

    async def _forward(
        self, method: str, target: str, headers: dict[str, str], body: bytes
    ) -> bytes:
        host, _, port = self.upstream.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        kept = {
            name: value for name, value in headers.items() if name not in ("connection", "expect")
        }
        lines = [
            f"{method} {target} HTTP/1.1",
            *(f"{name}: {value}" for name, value in kept.items()),
            "connection: close",
        ]
        writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        try:
            return await reader.read()
        finally:
            writer.close()

    def _check(self, method: str, target: str, headers: dict[str, str], body: bytes) -> None:
        """Raises Refused as S3 does."""
        query = {
            name: values[0]
            for name, values in parse_qs(urlsplit(target).query, keep_blank_values=True).items()
        }
        if "X-Amz-Signature" in query:
            credential = query["X-Amz-Credential"]
            signed = query["X-Amz-SignedHeaders"]
            signature = query["X-Amz-Signature"]
            stamp = query["X-Amz-Date"]
            allowed = float(query["X-Amz-Expires"])
            if not -SKEW_S < self._age(stamp) < allowed:
                raise Refused(403, "AccessDenied")
        else:
            parts = dict(re.findall(r"(\w+)=([^, ]+)", headers.get("authorization", "")))
            if not parts.keys() >= {"Credential", "SignedHeaders", "Signature"}:
                raise Refused(403, "AccessDenied")
            credential = parts["Credential"]
            signed = parts["SignedHeaders"]
            signature = parts["Signature"]
            stamp = headers["x-amz-date"]
            if abs(self._age(stamp)) > SKEW_S:
                raise Refused(403, "RequestTimeTooSkewed")
            if headers["x-amz-content-sha256"] != hashlib.sha256(body).hexdigest():
                raise Refused(400, "XAmzContentSHA256Mismatch")
        key, day, region, service, _ = credential.split("/")
        if key not in self.keys:
            raise Refused(403, "InvalidAccessKeyId")
        computed = self._signature(
            method, target, headers, signed, stamp=stamp, key=key, region=region
        )
        if not hmac.compare_digest(computed, signature):
            raise Refused(403, "SignatureDoesNotMatch")
        token, until = self.tokens.get(key, ("", float("inf")))
        if headers.get("x-amz-security-token", query.get("X-Amz-Security-Token", "")) != token:
            raise Refused(400, "InvalidToken")
        if time.time() >= until:
            raise Refused(400, "ExpiredToken")
        if (region, service, day) != (REGION, "s3", stamp[:8]):
            raise Refused(400, "AuthorizationHeaderMalformed")

    def _age(self, stamp: str) -> float:
        return (
            time.time()
            + self.clock
            - datetime.strptime(stamp, "%Y%m%dT%H%M%SZ").replace(tzinfo=UTC).timestamp()
        )

    def _signature(
        self,
        method: str,
        target: str,
        headers: dict[str, str],
        signed: str,
        stamp: str,
        key: str,
        region: str,
    ) -> str:
        from botocore.auth import S3SigV4Auth
        from botocore.awsrequest import AWSRequest
        from botocore.credentials import Credentials

        parts = urlsplit(target)
        query = [
            (name, value)
            for name, value in parse_qsl(parts.query, keep_blank_values=True)
            if name != "X-Amz-Signature"
        ]
        url = f"http://{headers['host']}{parts.path}" + (f"?{urlencode(query)}" if query else "")
        request = AWSRequest(method, url, {name: headers[name] for name in signed.split(";")})
        if "x-amz-content-sha256" not in headers:
            request.headers["X-Amz-Content-SHA256"] = "UNSIGNED-PAYLOAD"
        request.context["timestamp"] = stamp
        auth = S3SigV4Auth(Credentials(key, self.keys[key]), "s3", region)
        canonical = auth.canonical_request(request)
        if "x-amz-content-sha256" not in headers:  # of a presigned link only the host is signed
            canonical = re.sub(r"x-amz-content-sha256:[^\n]*\n", "", canonical).replace(
                ";x-amz-content-sha256", ""
            )
        return auth.signature(auth.string_to_sign(request, canonical), request)


@cache
def moto() -> str:
    """host:port of a moto server in this process, for its whole life; or of the one that `TEST_S3`
    names.
    """
    if given := os.environ.get("TEST_S3"):
        return given
    from moto.moto_server.werkzeug_app import create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    class Silent(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any) -> None: ...

    server = make_server(
        "127.0.0.1", 0, create_backend_app("s3"), threaded=True, request_handler=Silent
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return f"127.0.0.1:{server.server_port}"


@contextmanager
def s3_server() -> Iterator[FaultProxy]:
    proxy = FaultProxy(moto())
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()


def new_bucket(name: str = "") -> str:
    name = name or f"test-{secrets.token_hex(6)}"
    make_bucket(moto(), name)
    return name


def make_bucket(address: str, name: str) -> None:
    """`address`: host:port."""
    if "TEST_S3" in os.environ:
        import boto3

        key = {
            "aws_access_key_id": ACCESS_KEY,
            "aws_secret_access_key": SECRET_KEY,
            "region_name": REGION,
        }
        boto3.client("s3", endpoint_url=f"http://{address}", **key).create_bucket(Bucket=name)
        return
    urlopen(Request(f"http://{address}/{name}", method="PUT")).close()


def uri(proxy: FaultProxy, bucket: str = "", prefix: str = "kept/here") -> str:
    options = urlencode({"endpoint": proxy.url, "region": REGION})
    return f"s3://{bucket or new_bucket()}/{prefix}?{options}"


def keys(store: Any) -> list[str]:
    """The keys of all objects of the store, of those that it does not list too."""
    import obstore

    from midstream_s3.client import client

    return sorted(each["path"] for batch in obstore.list(client(store.address)) for each in batch)


#: What processes that use the server have in their environment.
ENVIRONMENT = {
    "MIDSTREAM_ARTIFACT_ACCESS_KEY": ACCESS_KEY,
    "MIDSTREAM_ARTIFACT_SECRET_KEY": SECRET_KEY,
}
