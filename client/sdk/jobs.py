"""HTTP requests of the calls on jobs and captures, and retries while the server does not answer."""

import time
from typing import Any

import httpx

from ...schemas.errors import MidstreamError
from ...schemas.jobs import JobRequest
from .wire import PATIENCE_S, Call, JobLike, idempotency_key, job_path, job_request


def submission(request: JobRequest | None, key: str | None, fields: dict[str, Any]) -> Call:
    headers = {"idempotency-key": key or idempotency_key(), "prefer": "respond-async"}
    return Call("POST", "/v1/jobs", body=job_request(request, fields), headers=headers)


def page_of_jobs(state: str | None, model: str | None, limit: int | None, cursor: str | None) -> Call:
    given = {"state": state, "model": model, "limit": limit, "cursor": cursor}
    return Call("GET", "/v1/jobs", params={name: value for name, value in given.items() if value is not None})


def page_of_captures(tag: str | None, limit: int | None, cursor: str | None) -> Call:
    given = {"tag": tag, "limit": limit, "cursor": cursor}
    return Call("GET", "/v1/captures", params={name: value for name, value in given.items() if value is not None})


def poll(job_id: JobLike, version: str, seconds: float) -> Call:
    headers = {"if-none-match": version} if version else {}
    return Call("GET", job_path(job_id), params={"wait": round(seconds, 3)}, headers=headers, timeout=seconds + 30)


def events_stream(job_id: JobLike, after: str) -> dict[str, Any]:
    headers = {"accept": "text/event-stream", **({"last-event-id": after} if after else {})}
    # The server sends a comment every 15 s: silence for longer means that the connection is dead.
    return {"method": "GET", "url": job_path(job_id, "events"), "headers": headers, "timeout": httpx.Timeout(10.0, read=45.0)}


class Patience:
    """Decides, after a failed poll, whether to try again; an API that restarts is waited for, one that is gone is not."""

    def __init__(self, seconds: float = PATIENCE_S):
        self._seconds = seconds
        self._since: float | None = None

    def ok(self) -> None:
        self._since = None

    def check(self, error: MidstreamError) -> None:
        """Raises `error` when it is not of the passing kind, or has lasted too long."""
        if error.kind != "unavailable":
            raise error
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > self._seconds:
            raise error from None
