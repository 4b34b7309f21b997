"""An HTTP server that answers what a test says, for the client to talk to."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from midstream import __version__
from midstream.client.sdk import wire

Reply = tuple[int, dict[str, str], bytes]


class Requests(list[str]):
    """What came, one line each: method, path, and what a request said of its place in a
    sequence.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bodies: list[bytes] = []
        self.authorizations: list[str | None] = []


@contextmanager
def server(*replies: Reply) -> Iterator[tuple[str, Requests]]:
    """An HTTP server that gives these answers in turn (the last one for ever); its URL and the
    requests it saw.
    """
    left = list(replies)
    seen = Requests()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.bodies.append(self.rfile.read(int(self.headers.get("content-length") or 0)))
            seen.authorizations.append(self.headers.get("authorization"))
            token = self.headers.get("last-event-id") or self.headers.get("idempotency-key") or ""
            seen.append(f"{self.command} {self.path} {token}".strip())
            status, headers, body = left.pop(0) if len(left) > 1 else left[0]
            self.send_response(status)
            for name, value in {"content-length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_PUT = do_DELETE = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with running(Handler) as url:
        yield url, seen


@contextmanager
def running(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server of this process; its requests have a thread each."""
    http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{http.server_port}"
    finally:
        http.shutdown()
        thread.join()
        http.server_close()


def reply(
    value: object, status: int = 200, version: str | None = __version__, **headers: str
) -> Reply:
    return (
        status,
        {**({wire.VERSION_HEADER: version} if version else {}), **headers},
        wire.to_json(value),
    )
