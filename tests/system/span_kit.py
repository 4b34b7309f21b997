"""A collector of OpenTelemetry's spans."""

import gzip
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Span(NamedTuple):
    service: str
    name: str
    trace: str
    id: str
    parent: str  # empty: the first of its trace
    start: float  # seconds since the epoch
    end: float
    attributes: dict[str, Any]
    failed: bool


class Collector:
    """`with Collector() as collector`; `url` is what `otel_endpoint` takes."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self._came = threading.Condition()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                if self.headers.get("content-encoding") == "gzip":
                    raw = gzip.decompress(raw)
                assert self.path == "/v1/traces", self.path
                collector.take(raw)
                body = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Collector":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def take(self, raw: bytes) -> None:
        request = ExportTraceServiceRequest.FromString(raw)
        with self._came:
            for of_process in request.resource_spans:
                service = next(
                    each.value.string_value
                    for each in of_process.resource.attributes
                    if each.key == "service.name"
                )
                for scope in of_process.scope_spans:
                    self.spans += [_span(service, span) for span in scope.spans]
            self._came.notify_all()

    def trace(self, trace: str, names: set[str], seconds: float = 60.0) -> list[Span]:
        """The spans of a trace, by their start, once there is one of each of `names`."""
        deadline = time.monotonic() + seconds
        with self._came:
            while True:
                found = sorted(
                    (span for span in self.spans if span.trace == trace),
                    key=lambda span: span.start,
                )
                missing = names - {span.name for span in found}
                if not missing:
                    return found
                left = deadline - time.monotonic()
                assert left > 0, (
                    f"no span {missing} came; there are {[span.name for span in found]}"
                )
                self._came.wait(left)


def _span(service: str, span: Any) -> Span:
    attributes = {
        each.key.removeprefix("midstream."): getattr(each.value, each.value.WhichOneof("value"))
        for each in span.attributes
    }
    return Span(
        service=service,
        name=span.name,
        trace=span.trace_id.hex(),
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        start=span.start_time_unix_nano / 1e9,
        end=span.end_time_unix_nano / 1e9,
        attributes=attributes,
        failed=span.status.code == 2,
    )
