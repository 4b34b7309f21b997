"""Errors and their wire format: RFC 9457 problem details with the field at fault."""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import ClassVar, Generic, NamedTuple, TypeVar

import msgspec

from .limits import MAX_DETAIL, MAX_SHOWN
from .records import Record

#: Kind of error → HTTP status. A problem's `type` is `urn:midstream:<kind>`.
STATUS_OF_KIND: dict[str, int] = {
    "invalid_request": 400,  # the body or a parameter is wrong; `field` says which
    # the job was accepted for a larger `max_model_len` than that of the worker that runs it
    "prompt_too_long": 400,
    "unauthorized": 401,
    "cross_site": 403,  # a page of another site sent the request
    "forbidden": 403,  # the key lacks the required scope
    "not_found": 404,
    "method_not_allowed": 405,
    "request_timeout": 408,  # the head or the body of the request arrived too slowly
    "conflict": 409,  # the job's state does not allow it
    # the job, run or harvest belongs to a model of another identity than the one that is served
    "model_changed": 409,
    "gone": 410,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
    "misdirected": 421,  # the name in the header `Host` is not one of the API's
    "head_too_large": 431,  # request line and headers
    "idempotency_mismatch": 422,  # the Idempotency-Key was used with another body
    "internal": 500,
    "capture_failed": 500,  # a rank could not capture or persist the requested rows
    "reading_failed": 500,  # a rank could not compute a requested reading of captured rows
    "capture_damaged": 500,  # bytes of a capture file are not those that were written
    "intervention_failed": 500,  # a rank could not apply the requested steering or patches
    "edit_too_large": 422,  # an edit exceeded its limit, which says `then: fail`
    "probe_failed": 500,  # a rank could not score a token for a probe
    "ranks_disagree": 500,  # ranks of one pipeline stage applied different actions
    "engine_failed": 500,
    "worker_lost": 500,  # every attempt ended with the worker's death
    "not_installed": 501,  # no package that is installed here knows the kind of the job
    "version_mismatch": 500,  # two parts of Midstream run different versions; the detail names both
    "unavailable": 503,
    # the gradient worker cannot compute gradients of this model, or has too little memory for them
    "gradients_refused": 422,
    # a sweep's two prompts differ too little to compute the recovered share of the difference
    "useless_baseline": 422,
    "too_many_cells": 429,  # limit on the cells of waiting and running sweeps
    "rate_limited": 429,  # the tenant's limit on requests or tokens per minute
    "too_many_jobs": 429,  # the tenant's limit on jobs in flight
    "too_many_harvests": 429,  # the tenant's limit on harvests that have not ended
    "too_many_connections": 429,  # the tenant's limit on open requests
    "too_many_streams": 429,  # the tenant's limit on open event streams, or on opening them
    "too_many_sessions": 429,  # the key's limit on sessions of the page
    "too_many_webhooks": 429,  # the tenant's limit on webhooks that are not delivered
    "capture_limit": 429,  # the tenant's limit on the size of captures and harvests
    "module_limit": 429,  # the tenant's limit on the number or size of named modules
    "overloaded": 503,  # the queue or Redis is nearly full: nothing was accepted
    "not_started_in_time": 504,  # no worker started the job within its `expires_in`
    "quota_exceeded": 507,  # the quota of the artifact store is used up
    "receipts_timed_out": 504,  # not every rank reported in time
}


class Problem(Record, omit_defaults=True):
    """RFC 9457 problem details; `field` is a JSON-pointer-like path, such as `capture.layers`.

    `allowed`: the valid values of the field. `hint`: what to do instead.
    """

    type: str
    title: str
    status: int
    detail: str
    field: str | None = None
    instance: str | None = None
    allowed: str | None = None
    hint: str | None = None


E = TypeVar("E", bound=Exception)


@dataclass(frozen=True)
class Translated(Generic[E]):
    """A context that raises another error for errors of `kinds`: `make` returns it, and its cause
    is the first unless `hidden`.
    """

    kinds: type[E] | tuple[type[E], ...]
    make: Callable[[E], Exception]
    hidden: bool = False

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, self.kinds):
            raise self.make(error) from (None if self.hidden else error)


class MidstreamError(Exception):
    """A failure with a kind from `STATUS_OF_KIND`; sent over HTTP and in a job's `error`."""

    def __init__(
        self,
        kind: str,
        detail: str,
        *,
        field: str | None = None,
        allowed: str | None = None,
        hint: str | None = None,
        retry_after: float | None = None,
    ):
        """`allowed`: the valid values. `hint`: advice, such as the name that was probably meant.
        `retry_after`: seconds after which a retry would be accepted; None: unknown.
        """
        super().__init__(detail if field is None else f"{field}: {detail}")
        self.kind = kind
        self.detail = detail
        self.field = field
        self.allowed = allowed
        self.hint = hint
        self.retry_after = retry_after

    def __str__(self) -> str:
        """Return `in_one_line`: the same text in Python, on the command line and in logs."""
        return in_one_line(self)

    def at(self, field: str | None) -> "MidstreamError":
        """Return the same error of another field."""
        return MidstreamError(
            self.kind,
            self.detail,
            field=field,
            allowed=self.allowed,
            hint=self.hint,
            retry_after=self.retry_after,
        )

    @property
    def status(self) -> int:
        return STATUS_OF_KIND[self.kind]

    def problem(self, instance: str | None = None) -> Problem:
        """Return the problem document; it can be encoded even if it quotes invalid Unicode of a
        client, a file or a folder.
        """
        return Problem(
            type=f"urn:midstream:{self.kind}",
            title=self.kind.replace("_", " ").capitalize(),
            status=self.status,
            detail=_encodable(self.detail),
            field=self.field and _encodable(self.field),
            allowed=self.allowed and _encodable(self.allowed),
            hint=self.hint and _encodable(self.hint),
            instance=instance and _encodable(instance),
        )


class KindError(MidstreamError):
    """An error of a class that has one kind, and names one field or none."""

    KIND: ClassVar[str]
    FIELD: ClassVar[str | None] = None

    def __init__(self, detail: str) -> None:
        super().__init__(self.KIND, detail, field=self.FIELD)


def _encodable(text: str) -> str:
    """Escape lone surrogates, which UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()


def in_one_line(error: Problem | MidstreamError) -> str:
    """Return the field, the detail, the advice and the valid values."""
    where = "" if error.field is None else f"{error.field}: "
    hint = f"; {error.hint}" if error.hint else ""
    allowed = f" (allowed: {error.allowed})" if error.allowed else ""
    return f"{where}{error.detail}{hint}{allowed}"


def error_of(problem: Problem) -> MidstreamError:
    """Return the error that a problem document describes; a kind of a newer version is
    `internal`.
    """
    kind = problem.type.rpartition(":")[2]
    return MidstreamError(
        kind if kind in STATUS_OF_KIND else "internal",
        problem.detail,
        field=problem.field,
        allowed=problem.allowed,
        hint=problem.hint,
    )


def invalid(
    field: str, detail: str, allowed: str | None = None, hint: str | None = None
) -> MidstreamError:
    """Return the error for invalid input: status 400, with the field's name."""
    return MidstreamError("invalid_request", detail, field=field, allowed=allowed, hint=hint)


class Excluded(NamedTuple):
    """A value of a field that is not valid in a request: when, and why."""

    field: str
    when: object  # true or not empty: it is refused
    why: str
    allowed: str | None = None
    hint: str | None = None


def check_excluded(table: Iterable[Excluded]) -> None:
    """Raises a 400 for the first of these that applies."""
    for row in table:
        if row.when:
            raise invalid(row.field, row.why, row.allowed, row.hint)


def refuse(reasons: Mapping[str, object]) -> None:
    """Raises ValueError with the first of these reasons that applies. For the fields of a record
    together: the API answers 400.
    """
    for why, applies in reasons.items():
        if applies:
            raise ValueError(why)


def suggestion(word: str, names: Iterable[str]) -> str | None:
    """Return a `did you mean` hint with the closest name; None if no name is close to `word`."""
    close_matches = get_close_matches(word[:MAX_SHOWN], list(names), n=1)
    return f"did you mean {close_matches[0]!r}?" if close_matches else None


def unknown(
    thing: str,
    name: str | None,
    model: str,
    names: Iterable[str],
    *,
    field: str = "name",
    kind: str = "not_found",
) -> MidstreamError:
    """Return the error for a name that a model does not have; lists the names that it has."""
    names = list(names)
    return MidstreamError(
        kind,
        f"unknown {thing} {name!r} of model {model!r}",
        field=field,
        allowed=", ".join(names) or None,
        hint=suggestion(name or "", names) if names else f"no {thing} exists yet",
    )


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """Shorten a client's text for an error: return at most `most` characters, with an ellipsis."""
    return text if len(text) <= most else f"{text[: most - 1]}…"


#: The detail from `misfit` for an unknown field.
NO_FIELD = "unknown field"

#: msgspec writes "… - at `$.capture.layers`", or "… - at `key` in `$.capture.hooks`"; at the top
#: level it writes no path.
_PATH = re.compile(r"^(?P<detail>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>.*)`)?$", re.DOTALL)
#: These name a field that is not part of the path.
_NAMED = re.compile(
    r"^Object (?:contains unknown|missing required) field `(?P<name>.*)`$", re.DOTALL
)


def misfit(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return (detail, field path) of a validation error: `$.capture.layers` becomes
    `capture.layers`; the path is empty for the whole object.
    """
    text = str(error)
    if len(text) > 2 * MAX_DETAIL:  # msgspec quotes names of any length; the path comes last
        text = f"{text[:MAX_DETAIL]}…{text[-MAX_DETAIL:]}"
    match = _PATH.match(text)
    detail, path = (match["detail"], match["path"] or "") if match else (text, "")
    if named := _NAMED.match(detail):
        path = f"{path}.{named['name']}" if path else named["name"]
        detail = NO_FIELD if "unknown" in detail else "is required"
    return detail, path
