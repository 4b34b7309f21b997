"""The Python clients: `Client` blocks, `AsyncClient` awaits; both have the same calls."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ...schemas.captures import CapturePage
from ...schemas.errors import MidstreamError
from ...schemas.jobs import Event, JobPage, JobRequest, JobResult, JobView
from ...schemas.openai import ChatRequest, CompletionRequest
from .. import notebook
from ..captures.reader import CaptureReader
from ..captures.row_matrix import Rows, matrix
from ..images import with_images
from . import discovery, download, wire
from . import jobs as calls
from .attention import AsyncAttentionCalls, AttentionCalls
from .features import AsyncFeatureCalls, FeatureCalls
from .harvests import AsyncHarvestCalls, HarvestCalls
from .keys import AsyncKeyCalls, KeyCalls
from .lens import AsyncLensCalls, LensCalls
from .loras import AsyncLoraCalls, LoraCalls
from .probes import AsyncProbeCalls, ProbeCalls
from .progress import prompts_bar
from .saes import AsyncSaeCalls, SaeCalls
from .service import AsyncServiceCalls, ServiceCalls
from .source_runs import AsyncRunCalls, RunCalls
from .steering import AsyncSteeringCalls, SteeringCalls
from .sweeps import AsyncSweepCalls, SweepCalls
from .tokens import AsyncTokenCalls, TokenCalls
from .tuned_lenses import AsyncTunedLensCalls, TunedLensCalls
from .webhooks import AsyncWebhookCalls, WebhookCalls
from .wire import Answer, Call, Capture, JobLike, Patch, Steering


class Client(
    AttentionCalls,
    SteeringCalls,
    LoraCalls,
    SaeCalls,
    LensCalls,
    TunedLensCalls,
    ProbeCalls,
    FeatureCalls,
    RunCalls,
    SweepCalls,
    HarvestCalls,
    KeyCalls,
    WebhookCalls,
    ServiceCalls,
    TokenCalls,
):
    """The blocking client. `url`: where the API is; by default that of the running stack, found as the commands find it
    (`client.sdk.discovery`). `api_key`: else that of MIDSTREAM_API_KEY.

    Every call raises MidstreamError for what the server refuses or cannot do (with its `kind` and `field`), VersionMismatch
    when the two versions do not understand each other, and ServerUnreachable when no server answers.
    """

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url, api_key = discovery.address(url, api_key)
        notebook.install()
        self._http = httpx.Client(base_url=self.url, headers=wire.headers(api_key), limits=httpx.Limits(max_connections=256))

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def submit(self, request: JobRequest | None = None, *, idempotency_key: str | None = None, **fields: Any) -> JobView:
        """Submit a job, by struct or by its fields (`model=…, prompts=[…], capture={…}, steering=[…], patch=[…]`); returns at once.

        Safe to retry: a unique key makes a repeated submission return the same job. `model` may be omitted while one is served.
        """
        try:
            call = calls.submission(request, idempotency_key, fields)
        except MidstreamError as error:
            if request is not None or "model" in fields or error.field != "model":
                raise
            call = calls.submission(None, idempotency_key, {"model": wire.only_model(self.models()), **fields})
        return wire.decode(self._send_patiently(call), JobView)

    def job(self, job_id: JobLike) -> JobView:
        return wire.decode(self._send(Call("GET", wire.job_path(job_id))), JobView)

    def jobs(self, *, state: str | None = None, model: str | None = None, limit: int | None = None, cursor: str | None = None) -> JobPage:
        """One page of jobs, newest first; `next` of the page is the next `cursor`."""
        return wire.decode(self._send(calls.page_of_jobs(state, model, limit, cursor)), JobPage)

    def wait(self, job_id: JobLike, timeout: float | None = None) -> JobView:
        """The job once it is over, however it ended. Raises TimeoutError after `timeout` seconds; survives an API restart."""
        job_id, deadline = wire.id_of(job_id), None if timeout is None else time.monotonic() + timeout
        etag, state, patience = "", "queued", calls.Patience()
        while True:
            left = wire.POLL_S if deadline is None else min(wire.POLL_S, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"job {job_id} is still {state} after {timeout} s")
            try:
                response = self._send(calls.poll(job_id, etag, left))
                if response.status_code != 304:
                    view = wire.decode(response, JobView)
                    if wire.is_over(view):
                        return view
                    etag, state = response.headers.get("etag", ""), view.state
                patience.ok()
            except MidstreamError as error:
                patience.check(error)
                time.sleep(wire.PAUSE_S)

    def result(self, job_id: JobLike) -> JobResult:
        """The result of a job that succeeded; raises what went wrong of one that failed, `conflict` of one not over yet."""
        return wire.decode(self._send(Call("GET", wire.job_path(job_id, "result"))), JobResult)

    def run(self, request: JobRequest | None = None, *, timeout: float | None = None, progress: bool = True, **fields: Any) -> JobResult:
        """Submit, wait, and return the result: every requested capture is durable then.

        On a terminal and in a notebook a bar counts the prompts, once the job has run for a second; `progress=False` leaves it out.
        """
        view = self.submit(request, **fields)
        with prompts_bar(view.prompts) if progress else nullcontext() as show:
            if show is not None:
                threading.Thread(target=self._follow, args=(view.id, show), daemon=True).start()
            self.wait(view.id, timeout)
        return self.result(view.id)

    def _follow(self, job_id: str, show: Callable[[Event], None]) -> None:
        """Passes events to a progress bar. Errors are dropped: the call that waits for the job raises them."""
        with suppress(MidstreamError, RuntimeError):  # RuntimeError: the client was closed
            for event in self.events(job_id):
                show(event)

    def events(self, job_id: JobLike, after: str = "") -> Iterator[Event]:
        """The job's events until it is over; after a lost connection it resumes behind the last one seen."""
        parser, patience = wire.EventParser(after), calls.Patience()
        while True:
            try:
                with self._http.stream(**calls.events_stream(job_id, parser.last_id)) as response:
                    if response.status_code >= 400:
                        response.read()
                        wire.raise_problem(response)
                    if response.status_code == 204:  # over, and nothing more to tell
                        return
                    for line in response.iter_lines():
                        patience.ok()
                        event = parser.feed(line)
                        if event is not None:
                            yield event
                            if event.event == "done":
                                return
            except httpx.TransportError as error:
                patience.check(wire.unreachable(self.url, error))
            except MidstreamError as error:
                patience.check(error)
            time.sleep(wire.PAUSE_S)

    def cancel(self, job_id: JobLike) -> JobView:
        """Ask for cancellation; raises `conflict` when the job is over."""
        return wire.decode(self._send(Call("POST", wire.job_path(job_id, "cancel"))), JobView)

    def models(self) -> list[str]:
        """Names of the models that are served."""
        return [entry["id"] for entry in wire.decode(self._send(Call("GET", "/v1/models")), dict[str, Any])["data"]]

    def ready(self) -> bool:
        """Whether a live worker serves a model. An unreachable server counts as not ready and raises nothing."""
        try:
            return self._send(Call("GET", "/readyz", timeout=5.0)).status_code == 200
        except MidstreamError:
            return False

    def completion(
        self,
        model: str,
        prompt: str | list[str] | list[int] | list[list[int]],
        *,
        steering: Steering | Sequence[Steering] = (),
        patch: Patch | Sequence[Patch] = (),
        capture: Capture | None = None,
        capture_wait: bool = False,
        **openai: Any,
    ) -> Answer:
        """`POST /v1/completions` with OpenAI's fields (`max_tokens`, `temperature`, …) and ours."""
        ours = {"steering": steering, "patch": patch, "capture": capture, "capture_wait": capture_wait}
        body = wire.openai_body(CompletionRequest, {"model": model, "prompt": prompt, **openai, **ours})
        return self._held("/v1/completions", body)

    def chat(
        self,
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
        """`POST /v1/chat/completions` with OpenAI's fields and ours.

        `images`: paths of PNG or JPEG files, their bytes, or images of Pillow; they come before the text of the last user message.
        """
        ours = {"steering": steering, "patch": patch, "capture": capture, "capture_wait": capture_wait}
        body = wire.openai_body(ChatRequest, {"model": model, "messages": with_images(messages, images), **openai, **ours})
        return self._held("/v1/chat/completions", body)

    def capture(self, job_id: JobLike, folder: Path | str | None = None, tag: str | None = None, *, partial: bool = False) -> CaptureReader:
        """The captured rows of a job, given by id, result or answer: read in place on the server's machine, else downloaded and checked.

        `folder`: where to keep a download; by default a folder that is gone when the program ends. `tag`: by default that of
        the job's own capture; what the operator captures of every request has another. `partial`: whatever is there of a
        capture that is `pending`, `error` or `timed_out`, which otherwise raises `conflict`, `capture_failed` or `receipts_timed_out`.
        The reader's `status` and `detail` are the server's; `gaps()` lists what is missing; `tokens()` uses the server's tokenizer.
        """
        reader = self._open_capture(job_id, folder, tag, partial)
        reader.read_tokens = lambda ids: self.detokenize(self.job(job_id).model, ids).token_strs
        return reader

    def matrix(self, jobs: Iterable[JobLike], layer: int, hook: str | None = None, rows: Rows = "last") -> np.ndarray:
        """float32 `[samples, hidden]` over all requests of several jobs, as `midstream.matrix` makes it of their captures."""
        return matrix([self.capture(job) for job in jobs], layer, hook, rows)

    def _open_capture(self, job_id: JobLike, folder: Path | str | None, tag: str | None, partial: bool) -> CaptureReader:
        job_id = wire.id_of(job_id)
        manifest = wire.decode(self._send(Call("GET", wire.capture_path(job_id))), wire.Manifest)
        download.check(manifest, job_id, partial)
        found = download.in_place(manifest, job_id) if folder is None else None
        if found:
            return download.reader(manifest, job_id, found, tag, partial)
        target = download.target_folder(folder)
        paths = []
        for file in manifest.files:
            if (path := download.from_link(target, job_id, file)) is not None:
                paths.append(path)
                continue
            with self._http.stream("GET", wire.capture_path(job_id, "files", file.name)) as response:
                if response.status_code >= 400:
                    response.read()
                    wire.raise_problem(response)
                paths.append(download.save(target, job_id, file, response.iter_bytes()))
        return download.reader(manifest, job_id, paths, tag, partial)

    def captures(self, *, tag: str | None = None, limit: int | None = None, cursor: str | None = None) -> CapturePage:
        """One page of stored captures, newest first; `next` of the page is the next `cursor`."""
        return wire.decode(self._send(calls.page_of_captures(tag, limit, cursor)), CapturePage)

    def delete_capture(self, job_id: JobLike) -> None:
        """Delete a job's capture files. Raises `gone` when they were deleted before, `conflict` while the job runs."""
        wire.raise_problem(self._send(Call("DELETE", wire.capture_path(job_id))))

    def _held(self, path: str, body: dict[str, Any]) -> Answer:
        response = self._send(Call("POST", path, body=body, timeout=wire.HELD_S))
        if response.status_code != 202:
            return wire.answer(response)
        view = wire.decode(response, JobView)
        self.wait(view.id)
        return wire.answer_from_result(self.result(view.id))

    def _send(self, call: Call) -> httpx.Response:
        try:
            return self._http.request(**call.arguments())
        except httpx.TransportError as error:
            raise wire.unreachable(self.url, error) from None

    def _send_patiently(self, call: Call) -> httpx.Response:
        """For calls that are safe to repeat: retried for a few seconds while the server does not answer."""
        patience = calls.Patience(seconds=5.0)
        while True:
            try:
                response = self._send(call)
                if response.status_code not in wire.RETRYABLE:
                    return response
                wire.raise_problem(response)
            except MidstreamError as error:
                patience.check(error)
                time.sleep(wire.PAUSE_S)


class AsyncClient(
    AsyncAttentionCalls,
    AsyncSteeringCalls,
    AsyncLoraCalls,
    AsyncSaeCalls,
    AsyncLensCalls,
    AsyncTunedLensCalls,
    AsyncProbeCalls,
    AsyncFeatureCalls,
    AsyncRunCalls,
    AsyncSweepCalls,
    AsyncHarvestCalls,
    AsyncKeyCalls,
    AsyncWebhookCalls,
    AsyncServiceCalls,
    AsyncTokenCalls,
):
    """The awaiting client: the calls of `Client`, as coroutines. Raises the same."""

    def __init__(self, url: str | None = None, api_key: str | None = None):
        self.url, api_key = discovery.address(url, api_key)
        notebook.install()
        limits = httpx.Limits(max_connections=4096, max_keepalive_connections=256)
        self._http = httpx.AsyncClient(base_url=self.url, headers=wire.headers(api_key), limits=limits)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def submit(self, request: JobRequest | None = None, *, idempotency_key: str | None = None, **fields: Any) -> JobView:
        try:
            call = calls.submission(request, idempotency_key, fields)
        except MidstreamError as error:
            if request is not None or "model" in fields or error.field != "model":
                raise
            call = calls.submission(None, idempotency_key, {"model": wire.only_model(await self.models()), **fields})
        return wire.decode(await self._send_patiently(call), JobView)

    async def job(self, job_id: JobLike) -> JobView:
        return wire.decode(await self._send(Call("GET", wire.job_path(job_id))), JobView)

    async def jobs(
        self, *, state: str | None = None, model: str | None = None, limit: int | None = None, cursor: str | None = None
    ) -> JobPage:
        return wire.decode(await self._send(calls.page_of_jobs(state, model, limit, cursor)), JobPage)

    async def wait(self, job_id: JobLike, timeout: float | None = None) -> JobView:
        job_id, deadline = wire.id_of(job_id), None if timeout is None else time.monotonic() + timeout
        etag, state, patience = "", "queued", calls.Patience()
        while True:
            left = wire.POLL_S if deadline is None else min(wire.POLL_S, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"job {job_id} is still {state} after {timeout} s")
            try:
                response = await self._send(calls.poll(job_id, etag, left))
                if response.status_code != 304:
                    view = wire.decode(response, JobView)
                    if wire.is_over(view):
                        return view
                    etag, state = response.headers.get("etag", ""), view.state
                patience.ok()
            except MidstreamError as error:
                patience.check(error)
                await asyncio.sleep(wire.PAUSE_S)

    async def result(self, job_id: JobLike) -> JobResult:
        return wire.decode(await self._send(Call("GET", wire.job_path(job_id, "result"))), JobResult)

    async def run(
        self, request: JobRequest | None = None, *, timeout: float | None = None, progress: bool = True, **fields: Any
    ) -> JobResult:
        view = await self.submit(request, **fields)
        with prompts_bar(view.prompts) if progress else nullcontext() as show:
            following = None if show is None else asyncio.create_task(self._follow(view.id, show))
            try:
                await self.wait(view.id, timeout)
            finally:
                if following is not None:
                    following.cancel()
        return await self.result(view.id)

    async def _follow(self, job_id: str, show: Callable[[Event], None]) -> None:
        with suppress(MidstreamError):
            async for event in self.events(job_id):
                show(event)

    async def events(self, job_id: JobLike, after: str = "") -> AsyncIterator[Event]:
        parser, patience = wire.EventParser(after), calls.Patience()
        while True:
            try:
                async with self._http.stream(**calls.events_stream(job_id, parser.last_id)) as response:
                    if response.status_code >= 400:
                        await response.aread()
                        wire.raise_problem(response)
                    if response.status_code == 204:  # over, and nothing more to tell
                        return
                    async for line in response.aiter_lines():
                        patience.ok()
                        event = parser.feed(line)
                        if event is not None:
                            yield event
                            if event.event == "done":
                                return
            except httpx.TransportError as error:
                patience.check(wire.unreachable(self.url, error))
            except MidstreamError as error:
                patience.check(error)
            await asyncio.sleep(wire.PAUSE_S)

    async def cancel(self, job_id: JobLike) -> JobView:
        return wire.decode(await self._send(Call("POST", wire.job_path(job_id, "cancel"))), JobView)

    async def models(self) -> list[str]:
        return [entry["id"] for entry in wire.decode(await self._send(Call("GET", "/v1/models")), dict[str, Any])["data"]]

    async def ready(self) -> bool:
        try:
            return (await self._send(Call("GET", "/readyz", timeout=5.0))).status_code == 200
        except MidstreamError:
            return False

    async def completion(
        self,
        model: str,
        prompt: str | list[str] | list[int] | list[list[int]],
        *,
        steering: Steering | Sequence[Steering] = (),
        patch: Patch | Sequence[Patch] = (),
        capture: Capture | None = None,
        capture_wait: bool = False,
        **openai: Any,
    ) -> Answer:
        ours = {"steering": steering, "patch": patch, "capture": capture, "capture_wait": capture_wait}
        body = wire.openai_body(CompletionRequest, {"model": model, "prompt": prompt, **openai, **ours})
        return await self._held("/v1/completions", body)

    async def chat(
        self,
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
        ours = {"steering": steering, "patch": patch, "capture": capture, "capture_wait": capture_wait}
        body = wire.openai_body(ChatRequest, {"model": model, "messages": with_images(messages, images), **openai, **ours})
        return await self._held("/v1/chat/completions", body)

    async def capture(
        self, job_id: JobLike, folder: Path | str | None = None, tag: str | None = None, *, partial: bool = False
    ) -> CaptureReader:
        """As `Client.capture`; how tokens read is fetched with it, so that the reader's `tokens()` need not wait."""
        job_id = wire.id_of(job_id)
        reader = await self._open_capture(job_id, folder, tag, partial)
        known = sorted({token for request in reader.requests() for token in reader.token_ids(request)})
        words = dict(zip(known, (await self.detokenize((await self.job(job_id)).model, known)).token_strs, strict=True))
        reader.read_tokens = lambda ids: [words[token] for token in ids]
        return reader

    async def matrix(self, jobs: Iterable[JobLike], layer: int, hook: str | None = None, rows: Rows = "last") -> np.ndarray:
        """As `Client.matrix`."""
        return matrix([await self.capture(job) for job in jobs], layer, hook, rows)

    async def _open_capture(self, job_id: JobLike, folder: Path | str | None, tag: str | None, partial: bool) -> CaptureReader:
        job_id = wire.id_of(job_id)
        manifest = wire.decode(await self._send(Call("GET", wire.capture_path(job_id))), wire.Manifest)
        download.check(manifest, job_id, partial)
        found = download.in_place(manifest, job_id) if folder is None else None
        if found:
            return download.reader(manifest, job_id, found, tag, partial)
        target = download.target_folder(folder)
        paths = []
        for file in manifest.files:
            if (path := await asyncio.to_thread(download.from_link, target, job_id, file)) is not None:
                paths.append(path)
                continue
            response = await self._send(Call("GET", wire.capture_path(job_id, "files", file.name)))
            wire.raise_problem(response)
            paths.append(await asyncio.to_thread(download.save, target, job_id, file, [response.content]))
        return download.reader(manifest, job_id, paths, tag, partial)

    async def captures(self, *, tag: str | None = None, limit: int | None = None, cursor: str | None = None) -> CapturePage:
        return wire.decode(await self._send(calls.page_of_captures(tag, limit, cursor)), CapturePage)

    async def delete_capture(self, job_id: JobLike) -> None:
        wire.raise_problem(await self._send(Call("DELETE", wire.capture_path(job_id))))

    async def _held(self, path: str, body: dict[str, Any]) -> Answer:
        response = await self._send(Call("POST", path, body=body, timeout=wire.HELD_S))
        if response.status_code != 202:
            return wire.answer(response)
        view = wire.decode(response, JobView)
        await self.wait(view.id)
        return wire.answer_from_result(await self.result(view.id))

    async def _send(self, call: Call) -> httpx.Response:
        try:
            return await self._http.request(**call.arguments())
        except httpx.TransportError as error:
            raise wire.unreachable(self.url, error) from None

    async def _send_patiently(self, call: Call) -> httpx.Response:
        patience = calls.Patience(seconds=5.0)
        while True:
            try:
                response = await self._send(call)
                if response.status_code not in wire.RETRYABLE:
                    return response
                wire.raise_problem(response)
            except MidstreamError as error:
                patience.check(error)
                await asyncio.sleep(wire.PAUSE_S)
