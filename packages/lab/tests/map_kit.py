"""A server that accepts jobs of `map` and answers as a test says, and keeps count of what it
computed.
"""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any
from urllib.parse import unquote

from http_kit import running
from job_kit import job_result, job_view

from midstream import __version__
from midstream.client.sdk import wire
from midstream.schemas.base.errors import MidstreamError, Problem
from midstream.schemas.jobs.jobs import JobView, State
from midstream.schemas.jobs.results import JobResult


@dataclass
class Jobs:
    """`refusals`: of the next submissions, each with seconds of Retry-After.

    `failures`: errors of the next jobs. `biggest`: prompts.
    """

    refusals: list[tuple[MidstreamError, int | None]] = field(default_factory=list)
    failures: list[Problem] = field(default_factory=list)
    biggest: int = 4096
    name: str = "job_{}"
    modules: dict[str, str] = field(default_factory=dict)  # as jobs report them
    identity: str = "checkpoint"  # of the model
    version: int = 0  # of global steering
    steering: str = ""  # of global steering
    slow: set[int] = field(default_factory=set)  # numbers of jobs that run until `slow` is emptied
    bodies: list[dict[str, Any]] = field(default_factory=list)
    submitted: int = 0
    cancelled: list[str] = field(default_factory=list)
    running: int = 0
    most: int = 0  # at a time
    by_key: dict[str, str] = field(default_factory=dict)
    jobs: dict[str, dict[str, Any]] = field(default_factory=dict)
    errors: dict[str, Problem] = field(default_factory=dict)

    @property
    def computed(self) -> Counter[str]:
        """How often each prompt was accepted."""
        return Counter(
            str(prompt)
            for body in self.jobs.values()
            for prompt in body["prompts"] or body["messages"]
        )

    def answer(self, method: str, path: str, key: str, body: bytes) -> tuple[int, Any, int | None]:
        """Status, body, Retry-After."""
        parts = [unquote(part) for part in path.partition("?")[0].strip("/").split("/")]
        if method == "POST" and parts[-1] == "jobs":
            return self._submit(key, json.loads(body))
        if parts[1] == "models":
            return 200, {"id": "m", "identity": self.identity, "extensions": []}, None
        if parts[1:] == ["artifacts", "policies"]:
            return 200, {"policies": []}, None
        if parts[1:3] == ["steering", "global"]:
            view = {
                "model": "m",
                "version": 0,
                "digest": self.steering,
                "entries": [],
                "changed": 0.0,
            }
            return 200, view, None
        if parts[1:3] == ["artifacts", "modules"]:
            module = {
                "name": parts[3],
                "model": "m",
                "digest": "first",
                "entries": [],
                "bytes": 0,
                "created": 0.0,
            }
            return 200, module, None
        if parts[-1] == "cancel":
            self.cancelled.append(parts[2])
            return 200, self._view(parts[2], State.CANCELLED), None
        job = parts[2]
        number = list(self.jobs).index(job)
        if parts[-1] == "result":
            self.running -= 1
            if job in self.errors:
                return self.errors[job].status, self.errors[job], None
            return 200, self._result(job), None
        state = State.FAILED if job in self.errors else State.SUCCEEDED
        if number in self.slow:
            state = State.RUNNING
        return 200, self._view(job, state), None

    def _submit(self, key: str, body: dict[str, Any]) -> tuple[int, Any, int | None]:
        self.submitted += 1
        self.bodies.append(body)
        if self.refusals:
            error, seconds = self.refusals.pop(0)
            return error.status, error.problem(), seconds
        if len(body.get("prompts") or body.get("messages")) > self.biggest:
            return 413, MidstreamError("payload_too_large", "the body is too large").problem(), None
        if key not in self.by_key:
            job = self.name.format(len(self.jobs))
            self.by_key[key] = job
            self.jobs[job] = {"prompts": None, "messages": None} | body
            if self.failures:
                self.errors[job] = self.failures.pop(0)
            self.running += 1
            self.most = max(self.most, self.running)
        job = self.by_key[key]
        return (
            202,
            self._view(
                job, State.FAILED if job in self.errors and self.running == 0 else State.QUEUED
            ),
            None,
        )

    def _view(self, job: str, state: State) -> JobView:
        facts = {
            "modules": self.modules,
            "identity": self.identity,
            "global_version": self.version,
        }
        return job_view(id=job, state=state, error=self.errors.get(job), **facts)

    def _result(self, job: str) -> JobResult:
        prompts = self.jobs[job]["prompts"] or self.jobs[job]["messages"]
        return job_result(*(f"<{prompt}>" for prompt in prompts), id=job)


@contextmanager
def serving(jobs: Jobs) -> Iterator[str]:
    """The URL."""
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # else each answer waits 40 ms for an acknowledgement

        def do_GET(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            with lock:
                status, answer, seconds = jobs.answer(
                    self.command, self.path, self.headers.get("idempotency-key") or "", body
                )
            content = wire.to_json(answer)
            self.send_response(status)
            known = {wire.VERSION_HEADER: __version__, "content-length": str(len(content))}
            for name, value in {
                **known,
                **({"retry-after": str(seconds)} if seconds is not None else {}),
            }.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET

        def log_message(self, *arguments: object) -> None:
            pass

    with running(Handler) as url:
        yield url
