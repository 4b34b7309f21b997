"""Calls on jobs: submit, follow, wait, results; OpenAI-style completions, chats."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing, nullcontext
from typing import Any, Unpack

import httpx2

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import Event, JobPage, JobPlan, JobRequest, JobView
from ...schemas.jobs.openai import ChatRequest, CompletionRequest, OpenAIRequest
from ...schemas.jobs.results import JobResult
from ..images import with_images
from . import wire
from .answers.progress import prompts_bar
from .calls import Awaits, Calls, M, call, stream
from .fields import Chat, ChatFields, CompletionFields, JobFields, PromptInput
from .wire import Answer, HttpCall, JobLike


def poll(job_id: JobLike, version: str, seconds: float) -> HttpCall:
    return HttpCall(
        "GET",
        wire.job_path(job_id),
        params={"wait": round(seconds, 3)},
        headers={"if-none-match": version} if version else {},
        timeout=seconds + 30,
    )


class Jobs(Calls[M]):
    """Jobs, from submission to result. `events` resumes after a lost connection."""

    @call
    async def submit(
        self,
        /,
        request: JobRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[JobFields],
    ) -> JobView:
        """Submit a job, by struct or by its fields (`model=…, prompts=[…], capture={…},
        steering=[…], patch=[…]`); returns immediately.

        Safe to retry: a unique key makes a repeated submission return the same job. `model` may be
        omitted if the server serves only one.
        """
        return await self._submit(
            "/v1/jobs", await self._body(request, dict(fields), JobRequest), idempotency_key
        )

    @call
    async def plan(
        self, /, request: JobRequest | None = None, **fields: Unpack[JobFields]
    ) -> JobPlan:
        """Return how many tokens the prompts of a job have and how many layers it would compute,
        without running it. Arguments and errors as for `submit`.
        """
        body = await self._body(request, dict(fields), JobRequest)
        return await self._ask(
            HttpCall("POST", "/v1/jobs", body=body, params={"dry_run": "true"}), JobPlan
        )

    @call
    async def get(self, job_id: JobLike) -> JobView:
        """Return the job's current state, without waiting. Raises `not_found`."""
        return await self._get(wire.job_path(job_id), JobView)

    @call
    async def list(
        self,
        *,
        state: str | None = None,
        model: str | None = None,
        policy: str | None = None,
        flagged: bool | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> JobPage:
        """Return one page of jobs, newest first; its `next` is the `cursor` of the next page.

        `policy`: only jobs that triggered this policy (`triggered` says whether it acted).
        `flagged`: only jobs that a probe or a policy flagged, or no others.
        """
        query = {
            "state": state,
            "model": model,
            "policy": policy,
            "flagged": flagged,
            "limit": limit,
            "cursor": cursor,
        }
        return await self._get("/v1/jobs", JobPage, **query)

    @call
    async def wait(self, job_id: JobLike, timeout: float | None = None) -> JobView:
        """Wait until the job has ended, in any state, and return it.

        Raises TimeoutError after `timeout` seconds; survives an API restart.
        """
        job_id = wire.id_of(job_id)
        deadline = None if timeout is None else time.monotonic() + timeout
        etag = ""
        state = "queued"
        patience = wire.Patience()
        while True:
            remaining = (
                wire.POLL_S if deadline is None else min(wire.POLL_S, deadline - time.monotonic())
            )
            if remaining <= 0:
                raise TimeoutError(f"job {job_id} is still {state} after {timeout} s")
            try:
                response = await self._send(poll(job_id, etag, remaining))
                if response.status_code != 304:
                    view = wire.decode(response, JobView)
                    if wire.is_over(view):
                        return view
                    etag = response.headers.get("etag", "")
                    state = view.state
                patience.ok()
            except MidstreamError as error:
                patience.check(error)
                await self._io.sleep(wire.PAUSE_S)

    @call
    async def result(self, job_id: JobLike) -> JobResult:
        """Return the result of a job that succeeded. Raises the job's error if it failed, and
        `conflict` if it has not ended.
        """
        return (await self._result(job_id)).as_asked()

    async def _result(self, job_id: JobLike) -> JobResult:
        """Return the result as the server has it."""
        return await self._get(wire.job_path(job_id, "result"), JobResult)

    @call
    async def run(
        self,
        /,
        request: JobRequest | None = None,
        *,
        timeout: float | None = None,
        progress: bool = True,
        **fields: Unpack[JobFields],
    ) -> JobResult:
        """Submit, wait, and return the result; by then, every requested capture is durable.

        On a terminal and in a notebook, a progress bar counts prompts once the job has run for a
        second; `progress=False` hides it.
        """
        return await self._watched(await self.submit(request, **fields), progress, timeout)

    async def _watched(
        self, view: JobView, progress: bool, timeout: float | None = None
    ) -> JobResult:
        """Wait until the job has ended, beside a bar of its prompts, and return its result."""
        with prompts_bar(view.prompts) if progress else nullcontext() as show:
            async with (
                nullcontext() if show is None else self._io.beside(self._follow(view.id, show))
            ):
                await self.wait(view.id, timeout)
        return await self.result(view.id)

    async def _ended(self, job_id: JobLike) -> JobResult:
        """Wait until the job has ended, and return its result. Raises what `result` raises."""
        await self.wait(job_id)
        return await self.result(job_id)

    async def _follow(self, job_id: str, show: Callable[[Event], None]) -> None:
        """Pass the job's events to a progress bar."""
        async for event in self.events(job_id):
            show(event)

    @stream
    async def events(self, job_id: JobLike, after: str = "") -> AsyncIterator[Event]:
        """Yield the job's events until it has ended; after a lost connection, resume after the last
        event received.
        """
        # The server sends a comment every 15 s: silence for longer means that the connection is
        # dead.
        seen = after
        patience = wire.Patience()
        timeout = httpx2.Timeout(10.0, read=45.0)
        while True:
            try:
                resumed = {"last-event-id": seen} if seen else {}
                async with self._io.stream(
                    method="GET",
                    url=wire.job_path(job_id, "events"),
                    headers={"accept": "text/event-stream"} | resumed,
                    timeout=timeout,
                ) as response:
                    wire.raise_problem(response)
                    if response.status_code == 204:  # the job has ended: no more events
                        return
                    async with aclosing(self._io.events(response)) as events:
                        async for sent in events:
                            patience.ok()
                            if not sent.data:  # when to connect again, which begins a stream
                                continue
                            event = wire.event_of(sent)
                            seen = event.id
                            yield event
                            if event.event == "done":
                                return
            except httpx2.TransportError as error:
                patience.check(wire.unreachable(self._io.url, error))
            except MidstreamError as error:
                patience.check(error)
                await self._io.sleep(error.retry_after or 0.0)
            await self._io.sleep(wire.PAUSE_S)

    @call
    async def cancel(self, job_id: JobLike) -> JobView:
        """Request cancellation; raises `conflict` if the job has ended."""
        return await self._ask(HttpCall("POST", wire.job_path(job_id, "cancel")), JobView)


class Completions(Calls[M]):
    """OpenAI-style calls."""

    @call
    async def completion(
        self,
        /,
        model: str,
        prompt: PromptInput | Sequence[PromptInput],
        **fields: Unpack[CompletionFields],
    ) -> Answer:
        """Call `POST /v1/completions` with OpenAI's and Midstream's fields."""
        return await self._held(
            "/v1/completions", CompletionRequest, {**fields, "model": model, "prompt": prompt}
        )

    @call
    async def chat(
        self,
        /,
        model: str,
        messages: Chat,
        *,
        images: Sequence[Any] = (),
        **fields: Unpack[ChatFields],
    ) -> Answer:
        """Call `POST /v1/chat/completions` with OpenAI's and Midstream's fields.

        `images`: paths of PNG or JPEG files, their bytes, or Pillow images; they are placed before
        the text of the last user message.
        """
        return await self._held(
            "/v1/chat/completions",
            ChatRequest,
            {**fields, "model": model, "messages": with_images(messages, images)},
        )

    async def _held(self, path: str, kind: type[OpenAIRequest], fields: dict[str, Any]) -> Answer:
        """Return the answer to a held request. If the server stops holding it, wait for its job,
        and return the answer from the job's result.
        """
        body = wire.openai_body(kind, fields)
        response = await self._send(HttpCall("POST", path, body=body, timeout=wire.HELD_S))
        if response.status_code != 202:
            return wire.answer(response)
        jobs = Jobs[Awaits](self._io)
        view = wire.decode(response, JobView)
        return wire.answer_from_result(await jobs._ended(view.id))
