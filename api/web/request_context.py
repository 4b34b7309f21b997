"""The call that is being answered: what handlers and error answers need to know of it."""

from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ...broker.ops.traces import Span
from ...schemas.base.records import from_json, to_json
from ...schemas.jobs.job_requests import MAX_KEPT_BODY

#: Methods that change something and are always traced. Other calls are traced only if their caller
#: traces them.
TRACED = frozenset({"POST", "PUT", "DELETE", "PATCH"})


@dataclass
class Call:
    """The call that is being answered."""

    span: Span
    began: float  # as `time.perf_counter` has it
    method: str
    # what is kept next to its job: as it came, if it is small, with what its URL adds
    body: bytes = b""
    job: str = ""  # the id under which a job is being accepted
    url: str = ""  # where the job is found
    accepted: bool = False  # whether the ledger has confirmed it
    # what the call holds until its answer has ended, or its client has left
    held: ExitStack = field(default_factory=ExitStack)
    written: bool = False  # whether all that the answer says is known to survive a kill of Redis


CURRENT: ContextVar[Call | None] = ContextVar("midstream_call", default=None)


def traceparent() -> str:
    """Headers for the calls that this one causes; empty without tracing."""
    call = CURRENT.get()
    return call.span.traceparent if call is not None else ""


def keep_steering(entries: Sequence[dict[str, Any]]) -> None:
    """Note that the URL adds these entries to the body's `steering`: the body that is kept has
    them, and can be sent alone.
    """
    if (call := CURRENT.get()) is not None and call.body and entries:
        body = from_json(call.body, dict[str, Any])
        raw = to_json(body | {"steering": [*body.get("steering", []), *entries]})
        call.body = raw if len(raw) <= MAX_KEPT_BODY else b""


def awaits_log() -> bool:
    """Return whether the answer may confirm a change that Redis has not written to its log."""
    call = CURRENT.get()
    return call is not None and call.method in TRACED and not call.written


def accepting(job_id: str, url: str) -> None:
    """Note that the job may be in the ledger from here on, even if the call fails."""
    if (call := CURRENT.get()) is not None:
        call.job, call.url = job_id, url


def accepted(job_id: str, url: str) -> None:
    """Note that the job is in the ledger."""
    if (call := CURRENT.get()) is not None:
        call.job, call.url, call.accepted = job_id, url, True
