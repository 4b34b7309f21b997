"""Who receives webhooks in the gate, is away for an hour, and counts what comes?

And who lets that hour pass in seconds?
"""

import json
import threading
import time
from collections import Counter, defaultdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: The receiver is away for this long, by the simulated clock, while about this many seconds pass.
DOWN_S = 3600.0
DOWN_REAL_S = 15.0
#: The simulated clock goes on in steps of so many seconds, which is less than a loan of a delivery
#: lasts.
STEP_S = 20.0
#: The whole ladder of retries, jitter included: what was not delivered by then never is.
LADDER_S = 4 * 24 * 3600.0


class Receiver:
    """`http://127.0.0.1:<port>/`.

    `got[webhook-id]`: how often it was accepted; `delivered[job]`: event → ids of its webhooks;
    `decided[webhook-id]`: the decision in it.
    """

    def __init__(self) -> None:
        self.got: Counter[str] = Counter()
        self.refused = 0  # attempts while it was away
        self.delivered: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        self.decided: dict[str, dict[str, Any]] = {}
        self.wrong: list[str] = []
        self.away = False
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="receiver", daemon=True
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}/hook"

    def __enter__(self) -> "Receiver":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _take(self, headers: Any, raw: bytes) -> int | None:
        """The status to answer; None: the connection is to be dropped."""
        with self._lock:
            if self.away:
                self.refused += 1
                return 503 if self.refused % 2 else None
            body = json.loads(raw)
            name = headers["webhook-id"]
            if not headers["webhook-signature"].startswith("v1,"):
                self.wrong.append(f"{name} is not signed")
            self.got[name] += 1
            self.delivered[body["data"]["id"]][body["type"]].add(name)
            if (decision := body["data"].get("decision")) is not None:
                self.decided[name] = decision
            return 204

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                status = receiver._take(
                    self.headers, self.rfile.read(int(self.headers["content-length"]))
                )
                if status is None:
                    self.close_connection = True
                    return
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """What it received is what it has counted."""

        return Handler


class Clock:
    """The senders' clock, ahead of the real one by what a file holds
    (`MIDSTREAM_FAULT=webhooks:clock=FILE`).
    """

    def __init__(self, file: Path):
        self.file = file
        self.ahead = 0.0
        file.write_text("0")

    @property
    def fault(self) -> str:
        return f"webhooks:clock={self.file}"

    def advance(self, seconds: float) -> None:
        self.ahead += seconds
        fresh = self.file.with_suffix(".new")
        fresh.write_text(str(self.ahead))
        fresh.rename(self.file)  # a reader never sees half of it

    def pass_hour(self, receiver: Receiver) -> None:
        """The receiver is away for an hour; returns when it is back, after some seconds."""
        receiver.away = True
        for _ in range(int(DOWN_S / STEP_S)):
            self.advance(STEP_S)
            time.sleep(DOWN_REAL_S * STEP_S / DOWN_S)
        receiver.away = False
