"""The call that is being answered, for handlers and error answers."""

from collections.abc import Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from litestar import Request

from ...broker.telemetry.traces import TraceSpan
from ...schemas.base.records import JsonObject, from_json, to_json
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
    audit: Any = None  # the entry of the audit log that the call will make, see `web.audit`
    written: bool = False  # whether all that the answer says is known to survive a kill of Redis

    def keep(self) -> None:
        """Note that this process answers the call from here on."""
        self.received = ()

    def submits(self, job: str, url: str, accepted: bool = False) -> None:
        """Note the job, which may be in the ledger from here on, even if the call fails."""
        self.job = job
        self.url = url
        self.accepted = accepted


CURRENT: ContextVar[ApiCall | None] = ContextVar("midstream_call", default=None)


def current() -> ApiCall:
    """Return the call that is being answered; where there is none, a new one that nothing reads."""
    return CURRENT.get() or ApiCall(TraceSpan(""), 0.0, "")


def hand_over() -> None:
    """Leave the current call to the twin, if there is one and the call has changed nothing yet.

    Raises HandedOver.
    """
    if current().received:
        raise HandedOver


def keep_steering(entries: Sequence[JsonObject]) -> None:
    """Add the URL's entries to `steering` in the stored body: a repeat then needs only the body."""
    call = current()
    if call.body and entries:
        body = from_json(call.body, JsonObject)
        raw = to_json(body | {"steering": [*body.get("steering", []), *entries]})
        call.body = raw if len(raw) <= MAX_KEPT_BODY else b""


def awaits_log() -> bool:
    """Return whether the answer must wait for Redis's log: the call may have made a change that is
    not known to be written.
    """
    call = current()
    return call.method in TRACED and not call.written
