"""Requests and responses of the API, shared by the blocking and the async client."""

import json
import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

import httpx2
import msgspec

from ...schemas.artifacts.probes import ProbeResult
from ...schemas.base.errors import (
    STATUS_OF_KIND,
    MidstreamError,
    Problem,
    Translated,
    error_of,
    invalid,
)
from ...schemas.base.records import Result, from_json, to_json
from ...schemas.base.version import __version__
from ...schemas.jobs.jobs import (
    PROBLEM_EVENT,
    TERMINAL,
    CaptureResults,
    Determinism,
    Event,
    JobView,
)
from ...schemas.jobs.openai import OpenAIRequest
from ...schemas.jobs.results import JobResult
from ...schemas.requests.specs import CaptureSpec, PatchSpec, SteeringSpec
from ...schemas.settings.secret_files import is_exposed
from ...schemas.settings.settings import Settings
from .. import values
from ..captures.reader import CaptureReader
from ..values import checked as checked, given as given

T = TypeVar("T")

VERSION_HEADER = "x-midstream-version"
JOB_HEADER = "x-midstream-job"
#: One long poll; shorter than what proxies commonly allow.
POLL_S = 25.0
#: Seconds that the client waits for a held response: somewhat more than the server's `max_wait_s`.
HELD_S = 660.0
#: Seconds for which a waiting client tolerates an API that does not answer (it may be restarting).
PATIENCE_S = 60.0
PAUSE_S = 0.5
#: Statuses after which a call that is safe to repeat is repeated.
RETRYABLE = frozenset({502, 503, 504})


class ServerUnreachable(MidstreamError):
    """No Midstream answers at the address: the server is down, or the address is wrong."""

    def __init__(self, detail: str, hint: str | None = None):
        super().__init__("unavailable", detail, hint=hint)

    def _render_traceback_(self) -> list[str]:
        """One line in a notebook: a traceback does not help when the server is down."""
        return [f"{type(self).__name__}: {self}"]


class ServerTimeout(ServerUnreachable):
    """The server did not answer in time: it is busy, or its process hangs."""


class VersionMismatch(MidstreamError):
    """The versions of client and server are incompatible."""

    def __init__(self, server: str, problem: str):
        super().__init__(
            "version_mismatch",
            f"client {__version__} and server {server} are incompatible: {problem}",
        )
        self.server = server


@dataclass(frozen=True)
class HttpCall:
    """One HTTP request, not yet sent."""

    method: str
    path: str
    body: Any = None
    params: dict[str, str | int | float] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 60.0  # seconds without data after which the call fails

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for `httpx2.Client.request`."""
        headers = dict(self.headers)
        content = None
        if self.body is not None:
            content = to_json(self.body)
            headers["content-type"] = "application/json"
        return {
            "method": self.method,
            "url": self.path,
            "content": content,
            "params": self.params,
            "headers": headers,
            "timeout": httpx2.Timeout(10.0, read=self.timeout),
        }


@dataclass(frozen=True, repr=False)
class Answer(Result):
    """The response to a completion or a chat, with Midstream's additions to OpenAI's fields."""

    job: str
    texts: list[str]  # one per prompt
    finish_reasons: list[str]
    capture_results: CaptureResults | None
    determinism: Determinism | None
    raw: dict[str, Any]  # the whole response, decoded
    # the scores, if the request named probes
    probes: list[ProbeResult] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The first prompt's text."""
        return self.texts[0]

    @property
    def rows(self) -> CaptureReader:
        """The captured rows inside the response: see `returned_rows`."""
        return returned_rows(self.capture_results)


#: A reference to a job: its id, or anything that a call returned about it.
JobLike = str | JobView | JobResult | CaptureResults | Answer


class ManifestEntry(msgspec.Struct):
    """A capture file in the response of `GET /v1/captures/{id}`: the fields that a reader needs."""

    name: str
    path: str
    bytes: int
    crc32: int
    offset: int = 0
    link: str | None = None


class ReadManifest(msgspec.Struct):
    """The response of `GET /v1/captures/{id}`: the fields that a reader needs."""

    status: str
    files: list[ManifestEntry] = []
    root: str | None = None
    detail: str = ""
    hook_names: dict[str, str] = {}


#: Field whose tensors are packed → its type.
_PACKED: dict[str, Any] = {
    "steering": list[SteeringSpec],
    "patch": list[PatchSpec],
    "capture": CaptureSpec,
}


def openai_body(kind: type[OpenAIRequest], fields: dict[str, Any]) -> dict[str, Any]:
    """Build the body of an OpenAI-style call; unused fields of Midstream are left out.

    Raises MidstreamError that names an invalid field, UnknownArgument for an unknown one.
    """
    present = given(**fields)
    values.known_keywords(present, kind)
    body: dict[str, Any] = values.plain(present, kind)
    for name, packed in _PACKED.items():
        if name in body:
            body[name] = checked(body[name], packed, name)
    return {
        name: value
        for name, value in body.items()
        if value is not False and not (name in ("steering", "patch") and not value)
    }


def headers(api_key: str | None) -> dict[str, str]:
    """Return the headers of every request.

    `api_key`: by default MIDSTREAM_API_KEY, or the contents of the file MIDSTREAM_API_KEY_FILE;
    empty: no key.

    Raises MidstreamError for an invalid key or an exposed file, OSError.
    """
    if api_key is None:
        api_key = os.environ.get("MIDSTREAM_API_KEY", "")
        file = os.environ.get("MIDSTREAM_API_KEY_FILE", "")
        if not api_key and file:
            if is_exposed(Path(file)):
                raise invalid(
                    "MIDSTREAM_API_KEY_FILE",
                    f"every account of this machine can read {file}",
                    hint="run chmod o-r on it",
                )
            api_key = Path(file).read_text().strip()
    if not (api_key.isascii() and api_key.isprintable()):
        raise invalid(
            "api_key",
            "is not printable ASCII",
            allowed="ms_<id>_<secret>, as `midstream create key` prints it",
        )
    return {"user-agent": f"midstream/{__version__}"} | (
        {"authorization": f"Bearer {api_key}"} if api_key else {}
    )


def id_of(job: JobLike) -> str:
    """Return the id of a job. Raises MidstreamError if `job` is no reference to a job."""
    result = values.job_id(job)
    if not isinstance(result, str) or not result:
        raise invalid(
            "job",
            f"{type(job).__name__} does not identify a job",
            allowed="a job's id, or a value that submit, run, completion or job returned",
        )
    return result


def path(*parts: str) -> str:
    """Return `/v1/<parts>`, each quoted, so that it stays one segment."""
    return "/".join(["/v1", *(quote(part, safe="") for part in parts)])


def job_path(job: JobLike, *parts: str) -> str:
    """Return `/v1/jobs/<id>/<parts>`."""
    return path("jobs", id_of(job), *parts)


def capture_path(job: JobLike, *parts: str) -> str:
    """Return `/v1/captures/<id>/<parts>`."""
    return path("captures", id_of(job), *parts)


def idempotency_key() -> str:
    return uuid.uuid4().hex


def submission(path: str, body: Any, key: str | None) -> HttpCall:
    """Return the call that submits a job. `key`: idempotency key; None: a new one."""
    headers = {"idempotency-key": key or idempotency_key(), "prefer": "respond-async"}
    return HttpCall("POST", path, body=body, headers=headers)


def unreachable(url: str, error: Exception) -> ServerUnreachable:
    """Return the error of a request that got no answer: the server is slow, or there is none."""
    if isinstance(error, httpx2.TimeoutException) and not isinstance(error, httpx2.ConnectTimeout):
        return ServerTimeout(
            f"the server at {url} did not answer in time ({type(error).__name__})",
            "it may be busy: try again, or see `midstream status`",
        )
    if "wrong version number" in str(error):
        hint = "the server speaks http: begin the URL with http://"
    elif urlsplit(url).port is None:
        hint = f"the URL names no port; the default of a server is {Settings().api_port}"
    else:
        hint = (
            "`midstream up` starts one; for one elsewhere, set MIDSTREAM_DATA_DIR or give its URL "
            "(--url; in Python, Client(URL))"
        )
    return ServerUnreachable(
        f"no Midstream server answers at {url} ({error or type(error).__name__})", hint
    )


def decode(response: httpx2.Response, kind: type[T]) -> T:
    """Return the body of a successful response as `kind`. Raises what `raise_problem` raises, and
    the error from `not_understood` if the body is invalid.
    """
    raise_problem(response)
    with Translated(
        (msgspec.ValidationError, msgspec.DecodeError),
        lambda error: not_understood(
            response,
            (f"the response from {response.request.url.path} is not a {kind.__name__}: {error}"),
        ),
    ):
        return from_json(response.content, kind)


class _Received(Problem, forbid_unknown_fields=False):
    """A problem document, of which unknown members are ignored, as RFC 9457 has clients do."""


def raise_problem(response: httpx2.Response) -> None:
    """Raise MidstreamError for an error response, with the kind, field and valid values of its
    problem document.
    """
    if response.status_code < 400:
        return
    try:
        problem = from_json(response.content, _Received)
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        text = response.text.strip().partition("\n")[0][:200]
        raise not_understood(response, f"status {response.status_code} with {text!r}") from error
    kind = problem.type.rpartition(":")[2]
    server = response.headers.get(VERSION_HEADER)
    if server != __version__ and (kind not in STATUS_OF_KIND or kind == "invalid_request"):
        # A server of another version may have other fields: without this hint, users would look for
        # a mistake in their request.
        raise VersionMismatch(
            server or "of unknown version",
            f"{problem.field + ': ' if problem.field else ''}{problem.detail}",
        )
    refused = error_of(problem)
    seconds = response.headers.get("retry-after", "")
    if seconds.isdecimal():
        refused.retry_after = float(seconds)
    raise refused


def not_understood(response: httpx2.Response, problem: str) -> MidstreamError:
    """Return the error for a response that cannot be read; it names both versions if they
    differ.
    """
    server = response.headers.get(VERSION_HEADER)
    if server is None:
        return MidstreamError(
            "unavailable", f"the server at {response.request.url} is not Midstream: {problem}"
        )
    if server != __version__:
        return VersionMismatch(server, problem)
    return MidstreamError("internal", problem)


class _Added(msgspec.Struct):
    """Midstream's additions to the fields of OpenAI-style responses."""

    capture_results: CaptureResults | None = None
    determinism: Determinism | None = None
    probes: list[ProbeResult] = []


def answer(response: httpx2.Response) -> Answer:
    """Parse an OpenAI-style response. Raises what `decode` raises."""
    raw = decode(response, dict[str, Any])
    with Translated(
        (KeyError, TypeError, msgspec.ValidationError),
        lambda error: not_understood(
            response,
            (f"the response from {response.request.url.path} has an unexpected shape: {error!r}"),
        ),
    ):
        added = msgspec.convert(raw, _Added)
        choices = sorted(raw["choices"], key=lambda choice: choice["index"])
        return Answer(
            job=response.headers.get(JOB_HEADER, ""),
            texts=[
                choice["message"]["content"] if "message" in choice else choice["text"]
                for choice in choices
            ],
            finish_reasons=[choice["finish_reason"] for choice in choices],
            capture_results=added.capture_results,
            determinism=added.determinism,
            raw=raw,
            probes=added.probes,
        )


def answer_from_result(result: JobResult) -> Answer:
    """Build the answer to a request that the server stopped holding, from the job's result."""
    captures = result.capture_results
    return Answer(
        job=result.id,
        texts=[output.text for output in result.outputs],
        finish_reasons=[output.finish_reason for output in result.outputs],
        capture_results=None if captures.status == "not_requested" else captures,
        determinism=result.determinism,
        raw=msgspec.to_builtins(result),
        probes=result.probes,
    )


def returned_rows(results: CaptureResults | None) -> CaptureReader:
    """Return a reader of the rows that the consumer `memory` returned for the user's capture.

    Raises MidstreamError: `not_found` if there are none, `capture_failed` with the reason when a
    rank could not return them.
    """
    reports = [report for report in results.consumers if report.name == "memory"] if results else []
    for report in reports:
        if not report.ok:
            raise MidstreamError(
                "capture_failed",
                f"the rows of prompt {report.request} could not be returned: {report.message}",
            )
    blobs = [report.rows for report in reports if report.rows]
    if not blobs:
        raise MidstreamError(
            "not_found",
            "the response contains no rows (captures: "
            f"{results.status if results else 'not_requested'})",
            hint='request them with "consumers": ["memory"]',
        )
    return CaptureReader.from_bytes(blobs).under(results.hook_names if results else {})


def is_over(view: JobView) -> bool:
    return view.state in TERMINAL


def event_of(sent: httpx2.ServerSentEvent) -> Event:
    """Return the event of a job that the server sent. Raises the MidstreamError with which it ended
    the stream.
    """
    if sent.event == PROBLEM_EVENT:
        raise error_of(from_json(sent.data, _Received))
    body = json.loads(sent.data)
    attempt = body.pop("attempt", 0)
    return msgspec.convert(
        {"event": sent.event, "data": body, "attempt": attempt, "id": sent.id}, Event
    )


def only_model(served: list[str]) -> str:
    """Return the model to use if the caller names none.

    Raises MidstreamError unless exactly one is served.
    """
    if not served:
        raise MidstreamError(
            "unavailable",
            "no model is loaded yet",
            field="model",
            hint="`midstream status` shows the workers",
        )
    if len(served) > 1:
        raise invalid("model", "is required: several models are served", allowed=", ".join(served))
    return served[0]


#: Kinds of errors that are temporary.
TRANSIENT = frozenset({"unavailable", "too_many_connections", "too_many_streams"})


class Patience:
    """Decides, after a failed poll, whether to try again: temporary errors are tolerated for a
    limited time.
    """

    def __init__(self, seconds: float = PATIENCE_S):
        self._seconds = seconds
        self._since: float | None = None

    def ok(self) -> None:
        self._since = None

    def check(self, error: MidstreamError) -> None:
        """Raise `error` if it is not temporary, or if errors have lasted too long."""
        if error.kind not in TRANSIENT:
            raise error
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > self._seconds:
            raise error from None
