"""Calls on jobs and models: submit, follow, wait, results, tokens, and OpenAI-style completions."""

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, nullcontext
from typing import Any
from urllib.parse import quote

import httpx2

from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import Event, JobPage, JobRequest, JobResult, JobView
from ...schemas.jobs.openai import ChatRequest, CompletionRequest
from ...schemas.prompts.tokens import Detokenized, DetokenizeRequest, Tokenized
from ..images import with_images
from . import wire
from .answers.progress import prompts_bar
from .calls import Calls, call, stream
from .wire import Answer, Call, Capture, JobLike, Patch, Steering


def submission(request: JobRequest | None, key: str | None, fields: dict[str, Any]) -> Call:
    headers = {"idempotency-key": key or wire.idempotency_key(), "prefer": "respond-async"}
    return Call("POST", "/v1/jobs", body=wire.job_request(request, fields), headers=headers)


def poll(job_id: JobLike, version: str, seconds: float) -> Call:
    headers = {"if-none-match": version} if version else {}
    return Call(
        "GET",
        wire.job_path(job_id),
        params={"wait": round(seconds, 3)},
        headers=headers,
        timeout=seconds + 30,
    )


class JobCalls(Calls):
    @call
    async def submit(
        self,
        /,
        request: JobRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Any,
    ) -> JobView:
        """Submit a job, by struct or by its fields (`model=…, prompts=[…], capture={…},
        steering=[…], patch=[…]`); returns immediately.

        Safe to retry: a unique key makes a repeated submission return the same job. `model` may be
        omitted if the server serves only one.
        """
        try:
            call = submission(request, idempotency_key, fields)
        except MidstreamError as error:
            if request is not None or "model" in fields or error.field != "model":
                raise
            call = submission(
                None, idempotency_key, {"model": wire.only_model(await self.models()), **fields}
            )
        return await self._ask_patiently(call, JobView)

    @call
    async def job(self, job_id: JobLike) -> JobView:
        """Return the job's current state, without waiting. Raises `not_found`."""
        return await self._ask(Call("GET", wire.job_path(job_id)), JobView)

    @call
    async def jobs(
        self,
        *,
        state: str | None = None,
        model: str | None = None,
        limit: int | None = None,
        cursor: str | None = None,
    ) -> JobPage:
        """Return one page of jobs, newest first; its `next` is the `cursor` of the next page."""
        return await self._ask(
            Call(
                "GET",
                "/v1/jobs",
                params=wire.given(state=state, model=model, limit=limit, cursor=cursor),
            ),
            JobPage,
        )

    @call
    async def wait(self, job_id: JobLike, timeout: float | None = None) -> JobView:
        """Wait until the job has ended, in any state, and return it.

        Raises TimeoutError after `timeout` seconds; survives an API restart.
        """
        job_id, deadline = (
            wire.id_of(job_id),
            None if timeout is None else time.monotonic() + timeout,
        )
        etag, state, patience = "", "queued", wire.Patience()
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
                    etag, state = response.headers.get("etag", ""), view.state
                patience.ok()
            except MidstreamError as error:
                patience.check(error)
                await self._io.sleep(wire.PAUSE_S)

    @call
    async def result(self, job_id: JobLike) -> JobResult:
        """Return the result of a job that succeeded. Raises the job's error if it failed, and
        `conflict` if it has not ended.
        """
        return await self._ask(Call("GET", wire.job_path(job_id, "result")), JobResult)

    @call
    async def run(
        self,
        /,
        request: JobRequest | None = None,
        *,
        timeout: float | None = None,
        progress: bool = True,
        **fields: Any,
    ) -> JobResult:
        """Submit, wait, and return the result; by then, every requested capture is durable.

        On a terminal and in a notebook, a progress bar counts prompts once the job has run for a
        second; `progress=False` hides it.
        """
        view = await self.submit(request, **fields)
        with prompts_bar(view.prompts) if progress else nullcontext() as show:
            async with (
                nullcontext() if show is None else self._io.beside(self._follow(view.id, show))
            ):
                await self.wait(view.id, timeout)
        return await self.result(view.id)

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
        parser, patience = wire.EventParser(after), wire.Patience()
        timeout = httpx2.Timeout(10.0, read=45.0)
        while True:
            try:
                seen = {"last-event-id": parser.last_id} if parser.last_id else {}
                async with self._io.stream(
                    method="GET",
                    url=wire.job_path(job_id, "events"),
                    headers={"accept": "text/event-stream"} | seen,
                    timeout=timeout,
                ) as streamed:
                    if streamed.response.status_code >= 400:
                        wire.raise_problem(await streamed.read())
                    if streamed.response.status_code == 204:  # the job has ended: no more events
                        return
                    async with aclosing(streamed.lines()) as lines:
                        async for line in lines:
                            patience.ok()
                            event = parser.feed(line)
                            if event is not None:
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
        return await self._ask(Call("POST", wire.job_path(job_id, "cancel")), JobView)

    @call
    async def models(self) -> list[str]:
        """Return the names of the served models."""
        return [
            entry["id"]
            for entry in (await self._ask(Call("GET", "/v1/models"), dict[str, Any]))["data"]
        ]

    @call
    async def model(self, name: str) -> dict[str, Any]:
        """Return the facts of one model, as `GET /v1/models/{name}` gives them. Raises
        `not_found`.
        """
        return await self._ask(Call("GET", f"/v1/models/{quote(name, safe='')}"), dict[str, Any])

    @call
    async def ready(self) -> bool:
        """Return whether a live worker serves a model.

        An unreachable server counts as not ready and raises nothing.
        """
        try:
            return (await self._send(Call("GET", "/readyz", timeout=5.0))).status_code == 200
        except MidstreamError:
            return False

    @call
    async def tokenize(
        self,
        model: str,
        prompt: str | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        add_special_tokens: bool = True,
    ) -> Tokenized:
        """Return the token ids that a job would have for a text or a conversation, and the text of
        each token (`token_strs`).
        """
        chat = None if messages is None else list(messages)
        body = {
            "model": model,
            "add_special_tokens": add_special_tokens,
            **wire.given(prompt=prompt, messages=chat),
        }
        return await self._ask(Call("POST", "/v1/tokenize", body=body), Tokenized)

    @call
    async def detokenize(self, model: str, tokens: Sequence[int]) -> Detokenized:
        """Return the text of token ids (`prompt`), with special tokens, and the text of each token
        (`token_strs`).
        """
        body = DetokenizeRequest(model=model, tokens=[int(token) for token in tokens])
        return await self._ask(Call("POST", "/v1/detokenize", body=body), Detokenized)

    @call
    async def completion(
        self,
        /,
        model: str,
        prompt: str | list[str] | list[int] | list[list[int]],
        *,
        steering: Steering | Sequence[Steering] = (),
        patch: Patch | Sequence[Patch] = (),
        capture: Capture | None = None,
        capture_wait: bool = False,
        **openai: Any,
    ) -> Answer:
        """Call `POST /v1/completions` with OpenAI's and Midstream's fields."""
        fields = {
            "model": model,
            "prompt": prompt,
            **openai,
            "steering": steering,
            "patch": patch,
            "capture": capture,
            "capture_wait": capture_wait,
        }
        return await self._held("/v1/completions", wire.openai_body(CompletionRequest, fields))

    @call
    async def chat(
        self,
        /,
        model: str,
        messages: Sequence[dict[str, Any]],
        *,
        images: Sequence[Any] = (),
        steering: Steering | Sequence[Steering] = (),
        patch: Patch | Sequence[Patch] = (),
        capture: Capture | None = None,
        capture_wait: bool = False,
        **openai: Any,
    ) -> Answer:
        """Call `POST /v1/chat/completions` with OpenAI's and Midstream's fields.

        `images`: paths of PNG or JPEG files, their bytes, or Pillow images; they are placed before
        the text of the last user message.
        """
        fields = {
            "model": model,
            "messages": with_images(messages, images),
            **openai,
            "steering": steering,
            "patch": patch,
            "capture": capture,
            "capture_wait": capture_wait,
        }
        return await self._held("/v1/chat/completions", wire.openai_body(ChatRequest, fields))

    async def _held(self, path: str, body: dict[str, Any]) -> Answer:
        """Return the answer to a held request. If the server stops holding it, wait for its job,
        and return the answer from the job's result.
        """
        response = await self._send(Call("POST", path, body=body, timeout=wire.HELD_S))
        if response.status_code != 202:
            return wire.answer(response)
        view = wire.decode(response, JobView)
        await self.wait(view.id)
        return wire.answer_from_result(await self.result(view.id))
