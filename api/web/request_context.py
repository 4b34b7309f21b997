"""The call that is being answered, for handlers and error answers."""

from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from litestar import Request

from ...broker.telemetry.traces import TraceSpan
from ...schemas.base.records import from_json, to_json
from ...schemas.jobs.job_requests import MAX_KEPT_BODY

AnyRequest = Request[Any, Any, Any]

#: Methods that change something and are always traced. Other calls are traced only if their caller
#: traces them.
TRACED = frozenset({"POST", "PUT", "DELETE", "PATCH"})


class HandedOver(Exception):
    """The call is answered by the process's twin; nothing has been changed by it so far."""


@dataclass
class ApiCall:
    """The call that is being answered."""

    span: TraceSpan
    began: float  # by `time.perf_counter`
    method: str
    request_id: str = ""
    # body to store with the job: as received, if it is small, plus what the URL adds
    body: bytes = b""
    large: bool = False  # whether its body is large: see `JsonRequest.computed`
    has_twin: bool = False  # whether another process may answer it
    # pieces of the body as received, as long as the twin may answer the call
    received: Sequence[bytes] = ()
    refused: str = ""  # the kind of its refusal, if a metric counts that
    released: bool = False  # whether it was held, and its job has reached what it waits for
    job: str = ""  # the id under which a job is being accepted
    url: str = ""  # where the job is found
    accepted: bool = False  # whether the ledger has confirmed it
    # what the call holds until its answer has ended, or its client has left
    held: ExitStack = field(default_factory=ExitStack)
    written: bool = False  # whether all that the answer says is known to survive a kill of Redis


CURRENT: ContextVar[ApiCall | None] = ContextVar("midstream_call", default=None)


def hand_over() -> None:
    """Leave the current call to the twin, if there is one and the call has changed nothing yet.

    Raises HandedOver.
    """
    call = CURRENT.get()
    if call is not None and call.received:
        raise HandedOver


def keep_call() -> None:
    """Note that this process answers the call from here on."""
    if (call := CURRENT.get()) is not None:
        call.received = ()


def traceparent() -> str:
    """Return the `traceparent` for calls that this one causes; empty without tracing."""
    call = CURRENT.get()
    return call.span.traceparent if call is not None else ""


def keep_steering(entries: Sequence[dict[str, Any]]) -> None:
    """Add the URL's entries to `steering` in the stored body: a repeat then needs only the body."""
    if (call := CURRENT.get()) is not None and call.body and entries:
        body = from_json(call.body, dict[str, Any])
        raw = to_json(body | {"steering": [*body.get("steering", []), *entries]})
        call.body = raw if len(raw) <= MAX_KEPT_BODY else b""


def awaits_log() -> bool:
    """Return whether the answer must wait for Redis's log: the call may have made a change that is
    not known to be written.
    """
    call = CURRENT.get()
    return call is not None and call.method in TRACED and not call.written


def accepting(job_id: str, url: str) -> None:
    """Note that the job may be in the ledger from here on, even if the call fails."""
    if (call := CURRENT.get()) is not None:
        call.job = job_id
        call.url = url


def accepted(job_id: str, url: str) -> None:
    """Note that the job is in the ledger."""
    if (call := CURRENT.get()) is not None:
        call.job = job_id
        call.url = url
        call.accepted = True
