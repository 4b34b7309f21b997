"""A receiver of webhooks on loopback for tests: it answers as it is told, and keeps what it got."""

import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

from standardwebhooks.webhooks import Webhook
from wait_kit import wait_until

from midstream.schemas.access.webhooks import HookBody
from midstream.schemas.base.records import from_json


class Got(NamedTuple):
    path: str
    headers: dict[str, str]  # names in lower case
    raw: bytes

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def body(self) -> HookBody:
        return from_json(self.raw, HookBody)

    def verify(self, secret: str) -> None:
        """By an implementation that is not ours. Raises WebhookVerificationError."""
        Webhook(secret).verify(self.raw, self.headers)


#: What to answer: status, headers, body. A sequence is gone through; its last one stays.
Reply = tuple[int, dict[str, str], bytes]
OK: Reply = (204, {}, b"")


class Receiver:
    """`replies` by path; without one, 204. `on_call` runs before the answer is sent."""

    def __init__(self) -> None:
        self.got: list[Got] = []
        self.replies: dict[str, list[Reply]] = {}
        self.on_call: Callable[[Got], None] = lambda got: None
        self._lock = threading.Lock()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                got = Got(
                    self.path, {key.lower(): value for key, value in self.headers.items()}, raw
                )
                with receiver._lock:
                    receiver.got.append(got)
                    script = receiver.replies.get(self.path, [OK])
                    status, headers, body = script.pop(0) if len(script) > 1 else script[0]
                receiver.on_call(got)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST

            def log_message(self, *_: object) -> None:
                """Says nothing."""

        class Server(ThreadingHTTPServer):
            request_queue_size = 128

            def handle_error(self, *_: object) -> None:
                """A client that breaks off is what some tests are about."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.port = self._server.server_port
        self._thread = threading.Thread(
            target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True
        )
        self._thread.start()

    def secure(self, certificate: Path, key: Path) -> None:
        """From now on over TLS."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(certificate, key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)

    def url(self, path: str = "/hook", host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    def at(self, path: str) -> list[Got]:
        return [got for got in list(self.got) if got.path == path]

    def wait(self, count: int, path: str = "/hook", timeout: float = 60.0) -> list[Got]:
        """At least `count` calls of `path`."""
        wait_until(lambda: len(self.at(path)) >= count, timeout)
        return self.at(path)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextmanager
def receiving() -> Iterator[Receiver]:
    with closing(Receiver()) as receiver:
        yield receiver
