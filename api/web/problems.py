"""Error responses: RFC 9457 problem details that name the field, never a traceback."""

import logging
import math
import secrets
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any

import msgspec
from litestar import Response
from litestar.exceptions import HTTPException, ValidationException
from litestar.status_codes import HTTP_500_INTERNAL_SERVER_ERROR
from redis.exceptions import RedisError

from ...broker.redis_service import availability
from ...schemas.base.errors import (
    STATUS_OF_KIND,
    MidstreamError,
    Problem,
    in_one_line,
    shortened,
    suggestion,
)
from ...schemas.base.json_bounds import TooManyValues
from ...schemas.base.limits import MAX_DETAIL
from ...schemas.base.records import to_json
from ...schemas.base.version import __version__
from ...schemas.jobs.openai import OpenAIError, OpenAIProblem
from ...schemas.service.choices import refusal
from ...storage.disk import disk_trouble
from .request_context import AnyRequest, current

log = logging.getLogger("midstream.api")

MEDIA_TYPE = "application/problem+json"
JOB_HEADER = "x-midstream-job"
#: What policies decided on an answer, as far as they are told.
VERDICT_HEADER = "x-midstream-policies"

OPENAI_PATHS = frozenset({"/v1/completions", "/v1/chat/completions", "/v1/models"})
#: Paths of OpenAI's API that are not served → what to do.
UNSERVED = {
    "/v1/responses": "use /v1/chat/completions or /v1/completions",
    "/v1/embeddings": "capture rows: POST /v1/jobs with the field capture",
    "/v1/audio/speech": "the paths are listed at /schema",  # not /v1/audit, which is near
}
#: A call that is not served → what to call instead.
INSTEAD = {("DELETE", "/v1/jobs"): "POST /v1/jobs/ID/cancel cancels a job"}
#: Kinds of errors of requests that reach no handler: the client may be OpenAI's.
UNROUTED = frozenset({"not_found", "method_not_allowed"})

#: Kind → after how many seconds a client may try again.
RETRY_AFTER_S = {
    "unavailable": 1,
    "too_many_cells": 10,
    "too_many_jobs": 5,
    "too_many_harvests": 60,
    "too_many_sessions": 60,
    "too_many_webhooks": 60,
    "capture_limit": 60,
    "rate_limited": 5,
    "overloaded": 5,
}

#: Kind → extra headers of its responses (RFC 6750).
HEADERS_OF: dict[str, dict[str, str]] = {
    "unauthorized": {"WWW-Authenticate": 'Bearer realm="midstream"'},
    "forbidden": {"WWW-Authenticate": 'Bearer realm="midstream", error="insufficient_scope"'},
}

#: Kinds that a metric counts as refusals: a tenant's limit, a quota, or a full service.
REFUSALS = frozenset(
    {kind for kind, status in STATUS_OF_KIND.items() if status in (429, 507)} | {"overloaded"}
)

#: nginx's status for a client that left before its answer; never received, counted in metrics.
CLIENT_GONE = 499

_KIND_OF_STATUS = {
    status: kind
    for kind, status in STATUS_OF_KIND.items()
    if status < HTTP_500_INTERNAL_SERVER_ERROR and status != 422
}


class ClientGone(Exception):
    """The client closed its connection while we worked or waited for it. Its job continues."""


#: Exceptions that decoding an invalid body raises.
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TooManyValues)


def malformed(error: Exception, kind: Any = Any) -> MidstreamError:
    """Turn an exception of `UNREADABLE` into a 400 with the field's path: `$.capture.layers`
    becomes `capture.layers`. `kind`: the type that the body does not fit.
    """
    if isinstance(error, msgspec.ValidationError):
        return refusal(error, kind)
    if isinstance(error, TooManyValues):
        return MidstreamError(
            "invalid_request",
            f"the body: {error}",
            hint="send fewer values, and large vectors as a safetensors file",
        )
    if isinstance(error, UnicodeDecodeError):
        return MidstreamError(
            "invalid_request",
            f"the body is not UTF-8: {error.reason} 0x{error.object[error.start]:02x}",
        )
    if isinstance(error, RecursionError):
        return MidstreamError("invalid_request", "the body nests objects or arrays too deeply")
    return MidstreamError(
        "invalid_request",
        f"the body is not JSON: {error}",
        hint="names and texts stand in double quotes",
    )


def bounded(problem: Problem) -> Problem:
    """Shorten long parts of the problem that the client sent: names of unknown fields, paths,
    values.
    """
    return msgspec.structs.replace(
        problem,
        detail=shortened(problem.detail, MAX_DETAIL),
        field=problem.field and shortened(problem.field),
        instance=problem.instance and shortened(problem.instance),
    )


def openai_error(problem: Problem) -> OpenAIError:
    """Return the problem in OpenAI's format."""
    kind = problem.type.rpartition(":")[2]
    return OpenAIError(message=in_one_line(problem), type=kind, code=kind, param=problem.field)


def answer(
    request: AnyRequest,
    problem: Problem,
    headers: dict[str, str] | None = None,
    openai: bool = False,
) -> Response[Any]:
    """Answer with the problem and its status; with `openai`, and at the OpenAI-style endpoints,
    also in OpenAI's format, as the member `error`.
    """
    if problem.status < HTTP_500_INTERNAL_SERVER_ERROR:
        problem = bounded(problem)
    kind = problem.type.rpartition(":")[2]
    headers = {**HEADERS_OF.get(kind, {}), **(headers or {})}
    if kind in REFUSALS:
        current().refused = kind
    if seconds := RETRY_AFTER_S.get(kind):
        headers.setdefault("Retry-After", str(seconds))
    return Response(
        body_of(problem, request.url.path, openai),
        status_code=problem.status,
        media_type=MEDIA_TYPE,
        headers=headers,
    )


def body_of(problem: Problem, path: str, openai: bool = False) -> bytes:
    """Return the body that answers with the problem at `path`."""
    if openai or path in OPENAI_PATHS:
        return to_json(
            OpenAIProblem(**msgspec.structs.asdict(problem), error=openai_error(problem))
        )
    return to_json(problem)


def closing_headers(body: bytes) -> list[tuple[bytes, bytes]]:
    """Return the headers of a problem in this body after which the connection is closed."""
    return [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(body)).encode()),
        (b"x-midstream-version", __version__.encode()),
        (b"retry-after", b"1"),
        (b"connection", b"close"),
    ]


def with_job(problem: Problem) -> tuple[Problem, dict[str, str]]:
    """Add the job that the call has begun, if any, to `unavailable`, so that it can be looked
    up.
    """
    call = current()
    if not call.job:
        return problem, {}
    known = (
        f"job {call.job} was accepted"
        if call.accepted
        else f"job {call.job} may have been accepted"
    )
    detail = (
        f"{problem.detail}; {known}: look it up, or repeat the call with the same Idempotency-Key"
    )
    return msgspec.structs.replace(problem, detail=detail, instance=call.url), {
        "Location": call.url,
        JOB_HEADER: call.job,
    }


def on_midstream_error(request: AnyRequest, error: MidstreamError) -> Response[bytes]:
    headers = (
        {}
        if error.retry_after is None
        else {"Retry-After": str(max(1, math.ceil(error.retry_after)))}
    )
    problem = error.problem(instance=request.url.path)
    if error.kind == "unavailable":
        problem, more = with_job(problem)
        headers |= more
    return answer(request, problem, headers)


def on_http_error(request: AnyRequest, error: HTTPException) -> Response[bytes]:
    """Answer Litestar's own errors: no such route, wrong method, parameters that do not convert."""
    if error.status_code >= HTTP_500_INTERNAL_SERVER_ERROR:
        return on_any_error(request, error)
    kind = _KIND_OF_STATUS.get(error.status_code, "invalid_request")
    problem = MidstreamError(kind, error.detail or kind.replace("_", " "))
    if kind == "not_found":
        path = shortened(request.url.path)
        # only the paths of calls: the pages and their files match anything
        served = (
            route.path_format
            for route in request.app.routes
            if not route.path_format.startswith(("/page/", "/docs/", "/schema/"))
        )
        hint = UNSERVED.get(path) or nearest(path, served)
        problem = MidstreamError(kind, f"no such path: {path}", hint=hint)
    elif kind == "method_not_allowed":
        problem = MidstreamError(
            kind,
            f"{request.method} is not supported at {shortened(request.url.path)}",
            allowed=(error.headers or {}).get("allow"),
            hint=INSTEAD.get((request.method, request.url.path.rpartition("/")[0])),
        )
    elif isinstance(error, ValidationException):
        problem = _parameter(request, error)
    return answer(
        request,
        problem.problem(instance=request.url.path),
        dict(error.headers or {}),
        openai=kind in UNROUTED,
    )


def nearest(path: str, served: Iterable[str]) -> str:
    """Return a hint with the served path that is closest to `path`: parameters such as `{name}`
    stand for any segment of it.
    """
    parts = path.split("/")

    def filled(known: str) -> str:
        steps = known.split("/")
        if len(steps) != len(parts):
            return known
        pairs = zip(steps, parts, strict=True)
        return "/".join(part if step.startswith("{") else step for step, part in pairs)

    def first(known: str) -> str:
        return next((step for step in known.split("/") if step not in ("", "v1")), "")

    # what a parameter stands for would make paths of other things look alike
    known = [(first(route), filled(route)) for route in served]
    similar = get_close_matches(first(path), {name for name, _ in known}, n=len(known))
    near = (whole for name, whole in known if name in similar)
    return suggestion(path, near) or "the paths are listed at /schema"


def _parameter(request: AnyRequest, error: ValidationException) -> MidstreamError:
    """Describe the first parameter that did not convert; a missing body counts as one."""
    first = error.extra[0] if isinstance(error.extra, list) and error.extra else {}
    name = first.get("key", "")
    message = first.get("message", error.detail)
    if name == "data" or "`data`" in message:
        return MidstreamError("invalid_request", "the body is empty: a JSON object is expected")
    message = shortened(message)
    if not name:
        return MidstreamError("invalid_request", message)
    handler = request.route_handler
    signatures = [handler.parsed_fn_signature]
    signatures += [each.parsed_fn_signature for each in handler.resolve_dependencies().values()]
    parameter = next(
        (each.parameters[name] for each in signatures if name in each.parameters), None
    )
    # Litestar reserves some names, so the handler's may not be the public one
    public = getattr(parameter.kwarg_definition, "name", None) if parameter else None
    kind = parameter.annotation if parameter else Any
    return refusal(msgspec.ValidationError(message), kind, public or name)


def on_client_gone(request: AnyRequest, error: ClientGone) -> Response[bytes]:
    return Response(b"", status_code=CLIENT_GONE, media_type=MEDIA_TYPE)


def on_any_error(request: AnyRequest, error: Exception) -> Response[bytes]:
    """Log an internal error with its traceback under a number; answer with only the number."""
    number = secrets.token_hex(4)
    log.error("failure %s at %s %s", number, request.method, request.url.path, exc_info=error)
    problem = MidstreamError(
        "internal", f"the server failed on this request; see its log under {number}"
    )
    return answer(request, problem.problem(instance=request.url.path))


def on_os_error(request: AnyRequest, error: OSError) -> Response[bytes]:
    """Answer 503 for a full or read-only disk, which is temporary: the client may retry."""
    if trouble := disk_trouble(error):
        return on_midstream_error(
            request,
            MidstreamError(
                "unavailable", f"{trouble}: {error.filename or 'a folder'} cannot be written"
            ),
        )
    return on_any_error(request, error)


def on_redis_error(request: AnyRequest, error: RedisError) -> Response[bytes]:
    """Answer 503 for a Redis that cannot be used now, whichever call of it met that."""
    if availability.is_redis_unavailable(error):
        return on_midstream_error(
            request, MidstreamError("unavailable", availability.detail_of(error))
        )
    return on_any_error(request, error)


HANDLERS: dict[Any, Any] = {
    MidstreamError: on_midstream_error,
    OSError: on_os_error,
    RedisError: on_redis_error,
    HTTPException: on_http_error,
    ClientGone: on_client_gone,
    Exception: on_any_error,
}
