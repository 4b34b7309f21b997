"""Tracing across processes: OpenTelemetry spans over OTLP/HTTP, joined into one trace by W3C
traceparents.

The submission's span goes into `Job.trace`; each component that works on the job makes a child span
and passes its own traceparent on (`RankSpec.trace`, `Receipt.trace`). Without `otel_endpoint`
nothing is imported or recorded, but a client's traceparent is still passed on.
"""

import re
import time
from typing import Any, Literal

from ...schemas.base.errors import Translated
from ...schemas.base.version import __version__
from ...schemas.settings.settings import Settings, SettingsError

#: `00-<trace id>-<span id>-<flags>`; all-zero ids are invalid (W3C Trace Context, level 1).
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
#: Seconds between two exports of spans.
SEND_EVERY_S = 1.0
#: Seconds to wait for a collector's answer.
PATIENCE_S = 3.0
_NS = 1_000_000_000

SpanRole = Literal["internal", "server", "consumer"]
AttributeValue = str | int | float | bool


def valid(traceparent: str | None) -> str:
    """Return the traceparent to pass on; empty if it is invalid."""
    text = (traceparent or "").strip().lower()
    return text if _TRACEPARENT.fullmatch(text) else ""


def trace_id(traceparent: str) -> str | None:
    """Return the trace id of a traceparent, 32 hex digits; None if it is empty."""
    return traceparent[3:35] or None


class TraceSpan:
    """A span, recorded or not.

    `traceparent` is for its children: its own, or its parent's if it is not recorded.
    """

    def __init__(self, traceparent: str, recorded: Any = None) -> None:
        self.traceparent = traceparent
        self._recorded = recorded

    def note(self, **attributes: AttributeValue) -> None:
        if self._recorded is not None:
            self._recorded.set_attributes(_named(attributes))

    def rename(self, name: str) -> None:
        if self._recorded is not None:
            self._recorded.update_name(name)

    def event(self, name: str) -> None:
        """Add an event at the current time."""
        if self._recorded is not None:
            self._recorded.add_event(name)

    def fail(self, why: str) -> None:
        if self._recorded is not None:
            from opentelemetry.trace import Status, StatusCode

            self._recorded.set_status(Status(StatusCode.ERROR, why))

    def end(self, at: float | None = None) -> None:
        """End the span `at` (seconds since the epoch; default: now)."""
        if self._recorded is not None:
            self._recorded.end(None if at is None else int(at * _NS))


_provider: Any = None  # while spans are recorded


def setup(settings: Settings, process: str) -> None:
    """Record spans of this process from now on, if `otel_endpoint` is set.

    Raises SettingsError when that is impossible.
    """
    global _provider
    if not settings.otel_endpoint:
        return
    with Translated(
        ModuleNotFoundError,
        lambda error: SettingsError(
            f"otel_endpoint is set, but OpenTelemetry is not installed ({error}): install "
            "the `otel` extra"
        ),
    ):
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    names = {
        "service.name": f"midstream-{process}",
        "service.namespace": "midstream",
        "service.version": __version__,
    }
    if settings.worker_id:
        names["service.instance.id"] = settings.worker_id
    exporter = OTLPSpanExporter(
        endpoint=f"{settings.otel_endpoint.rstrip('/')}/v1/traces", timeout=PATIENCE_S
    )
    provider = TracerProvider(resource=Resource.create(names))
    provider.add_span_processor(
        BatchSpanProcessor(exporter, schedule_delay_millis=SEND_EVERY_S * 1000)
    )
    _provider = provider


def close() -> None:
    """Send the remaining spans; for processes that do not end in the usual way."""
    global _provider
    if _provider is not None:
        _provider.shutdown()
        _provider = None


def enabled() -> bool:
    return _provider is not None


def begin(
    name: str,
    parent: str,
    *,
    root: bool = False,
    kind: SpanRole = "internal",
    at: float | None = None,
    **attributes: AttributeValue,
) -> TraceSpan:
    """Begin a child span of `parent` (a traceparent), `at` (seconds since the epoch; default: now).

    `root`: without a parent, the span begins a trace. Without a parent and `root`, nothing is
    recorded: work that was not traced from its beginning is not traced at all.
    """
    if _provider is None or not (parent or root):
        return TraceSpan(parent)
    from opentelemetry.trace import SpanKind

    span = _provider.get_tracer("midstream", __version__).start_span(
        name,
        context=_context(parent),
        kind=SpanKind[kind.upper()],
        attributes=_named(attributes),
        start_time=int((time.time() if at is None else at) * _NS),
    )
    span_context = span.get_span_context()
    ids = f"{span_context.trace_id:032x}-{span_context.span_id:016x}"
    return TraceSpan(f"00-{ids}-{span_context.trace_flags:02x}", span)


def record(name: str, parent: str, start: float, end: float, **attributes: AttributeValue) -> None:
    """Record a span that has ended; `start` and `end` in seconds since the epoch.

    Clocks of machines differ: an `end` before `start` is replaced by `start`.
    """
    span = begin(name, parent, at=start)
    span.note(**attributes)
    span.end(max(start, end))


def _context(parent: str) -> Any:
    from opentelemetry.context import Context
    from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

    if (match := _TRACEPARENT.fullmatch(parent)) is None:
        return Context()
    span_context = SpanContext(
        int(match[1], 16),
        int(match[2], 16),
        is_remote=True,
        trace_flags=TraceFlags(int(match[3], 16)),
    )
    return set_span_in_context(NonRecordingSpan(span_context), Context())


def _named(attributes: dict[str, AttributeValue]) -> dict[str, AttributeValue]:
    return {f"midstream.{name}": value for name, value in attributes.items()}
