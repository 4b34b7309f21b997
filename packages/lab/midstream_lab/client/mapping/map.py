"""`map`: a request over any number of prompts, as jobs of many prompts each, with retries and a
cache that survives kills.
"""

from __future__ import annotations

import itertools
import re
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator, Mapping, Sized
from contextlib import aclosing, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Unpack

import msgspec
import numpy as np

from midstream.client import values
from midstream.client.captures.reader import CaptureReader
from midstream.client.sdk import jobs, wire
from midstream.client.sdk.answers import download
from midstream.client.sdk.calls import Awaits, Calls, M, stream
from midstream.client.sdk.captures import Captures
from midstream.client.sdk.fields import MapFields
from midstream.client.sdk.jobs import Jobs
from midstream.client.sdk.server import ServerCalls
from midstream.client.sdk.standing import ArtifactRef, standing
from midstream.client.sdk.transport import Transport
from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.base.limits import MAX_PROMPTS
from midstream.schemas.base.records import Result, to_json
from midstream.schemas.jobs.jobs import JobRequest, JobView, Output, State
from midstream.schemas.jobs.results import JobResult
from midstream.schemas.readings.readings import READINGS

from ..progress import mapped_bar
from . import key as map_key
from .cache import MapCache

#: Bytes of the prompts of one job, as JSON; a longer prompt is its own job. Far below the
#: server's `max_body_mib`, and few enough token ids for `MAX_JSON_VALUES`.
JOB_BYTES = 1 << 20
#: Ways in which a job fails that another worker, or another time, may not repeat.
AGAIN = frozenset(
    {
        "worker_lost",
        "engine_failed",
        "not_started_in_time",
        "receipts_timed_out",
        "not_found",
        "gone",
        "conflict",
    }
)
#: Seconds of one look at the oldest job while others run.
LOOK_S = 1.0
#: The longest pause before a refused request is repeated.
MAX_PAUSE_S = 60.0
_OF_PROMPT = re.compile(r"(?:prompts|messages)\[(\d+)\](.*)", re.DOTALL)


@dataclass(frozen=True, repr=False)
class Mapped(Result):
    """The result of one prompt."""

    index: int  # in the input
    prompt: Any  # as it was given
    result: JobResult  # of this prompt alone; its id is that of the job that computed it
    request: int  # number of the prompt in that job
    cached: bool  # it was there before
    rows: Path | None = None  # folder of its captured rows in the cache
    tag: str | None = None

    @property
    def output(self) -> Output:
        return self.result.outputs[0]

    @property
    def text(self) -> str:
        return self.output.text

    @property
    def reader(self) -> CaptureReader:
        """Its captured rows: from the cache (`keep_captures`), or those that the consumer `memory`
        returned; request `self.request`.

        Raises MidstreamError where they are only on the server: `client.capture(item.result.id)`
        reads them there.
        """
        results = self.result.capture_results
        if self.rows is None:
            return wire.returned_rows(results)
        return CaptureReader(download.downloaded(self.rows, self.request), tag=self.tag).under(
            results.hook_names
        )

    def array(self, layer: int, hook: str | None = None) -> np.ndarray:
        """`[positions, hidden]` float32, as `CaptureReader.array` of its `reader`."""
        with self.reader as reader:
            return reader.array(layer, hook, request=self.request)


@dataclass
class _Entry:
    index: int
    prompt: Any
    plain: Any  # as JSON has it
    size: int  # bytes of that
    key: str
    item: Mapped | None = None


@dataclass
class _Chunk:
    """The prompts of one job."""

    entries: list[_Entry]
    attempt: int = 0
    failures: int = 0
    job: str = ""
    token: str = field(default_factory=wire.idempotency_key)


@dataclass(frozen=True)
class _Plan:
    """Values that all jobs of a `map` share."""

    request: JobRequest  # without prompts
    base: bytes
    identity: str  # of the model
    names: dict[ArtifactRef, str]
    steering: int  # version of global steering


async def over(
    calls: Calls[Any],
    /,
    prompts: Iterable[Any],
    *,
    cache: Path | str | None = None,
    ordered: bool = True,
    job_prompts: int = 256,
    in_flight: int = 4,
    keep_captures: bool = False,
    attempts: int = 3,
    patience: float = 600.0,
    progress: bool = True,
    **fields: Unpack[MapFields],
) -> AsyncIterator[Mapped]:
    """Yield the result of each prompt of a dataset of any length, as jobs of `job_prompts` prompts
    with `in_flight` of them at a time.

    `prompts`: texts, lists of token ids, or conversations; a generator is read only as far as
    needed. `fields`: those of `submit`, the same for all. Results come in the order of the input,
    or with `ordered=False` as they are complete.

    `cache`: a folder in which results are kept, by the SHA-256 of model, prompt and request. A
    second call computes what is missing; so does one after the first was killed, which also
    finds the jobs that were running. The key covers: the name and the identity of the model;
    the prompt; every field of the request but handling (`priority`, `expires_in`, `callback_…`)
    and `metadata`; the content of what it names (modules, adapters, autoencoders, tuned lenses,
    probes, source runs); extensions; global steering, and the policies of all traffic.
    Every job must report the same, with or without a cache: otherwise `conflict` is raised. The
    versions of Midstream and vLLM are not covered. Equal prompts share one result.
    `keep_captures`: download the captured rows into the cache; without it, they stay on the
    server.

    A refusal that passes (429, 503 with Retry-After, no connection) is repeated for up to
    `patience` seconds without any progress; a job that fails in the service is
    submitted up to `attempts` times. Other errors are raised with the index of the prompt where
    the server names one; what was complete before is in the cache. If it is left early, jobs
    that run are cancelled, except with a `cache`, where the next call finds them.
    """
    if isinstance(prompts, str | bytes | Mapping):
        raise invalid(
            "prompts",
            f"is a {type(prompts).__name__}",
            allowed="an iterable of prompts, such as a list of texts",
        )
    for name, value, most in (
        ("job_prompts", job_prompts, MAX_PROMPTS),
        ("in_flight", in_flight, 64),
        ("attempts", attempts, 100),
    ):
        if not 1 <= value <= most:
            raise invalid(name, f"is {value}", allowed=f"1 to {most}")
    if keep_captures and (cache is None or not fields.get("capture")):
        raise invalid("keep_captures", "needs a cache and a capture", allowed="cache=…, capture=…")
    io = calls._io
    if "model" not in fields:
        fields["model"] = wire.only_model(await ServerCalls[Awaits](io).models())
    total = len(prompts) if isinstance(prompts, Sized) else None
    store = await io.work(MapCache, cache) if cache is not None else None
    try:
        mapping = _Mapping(
            calls=calls,
            plan=await _plan(io, dict(fields)),
            prompts=iter(prompts),
            cache=store,
            ordered=ordered,
            size=job_prompts,
            in_flight=in_flight,
            keep=keep_captures,
            attempts=attempts,
            patience=patience,
        )
        with mapped_bar(total) if progress else nullcontext() as show:
            async with aclosing(mapping.items()) as items:
                async for item in items:
                    if show is not None:
                        show()
                    yield item
    finally:
        if store is not None:
            store.close()


class Datasets(Calls[M]):
    """Requests over datasets."""

    map = stream(over)


async def _plan(io: Transport, fields: dict[str, Any]) -> _Plan:
    for name in ("prompts", "prompt", "messages"):
        if name in fields:
            raise invalid(name, "is the first argument of map", allowed="map(prompts, …)")
    request = map_key.checked_request(
        values.request(None, {**fields, "prompts": ["-"]}, JobRequest)
    )
    identity, names, steering = await standing(io, request)
    return _Plan(
        request,
        map_key.base(request, identity, names, steering.digest),
        identity,
        names,
        steering.version,
    )


@dataclass
class _Mapping:
    """One run of `map`."""

    calls: Calls[Any]
    plan: _Plan
    prompts: Iterator[Any]
    cache: MapCache | None
    ordered: bool
    size: int
    in_flight: int
    keep: bool
    attempts: int
    patience: float
    read: int = 0
    exhausted: bool = False
    chat: bool | None = None  # whether the prompts are conversations
    # read and not yet given out, in the order of the input
    window: deque[_Entry] = field(default_factory=deque)
    # key → those that wait for its result
    wanted: dict[str, list[_Entry]] = field(default_factory=dict)
    filling: list[_Entry] = field(default_factory=list)
    waiting: deque[_Chunk] = field(default_factory=deque)  # to be submitted
    flying: deque[_Chunk] = field(default_factory=deque)
    refused_since: float | None = None
    not_before: float = 0.0
    pause: float = wire.PAUSE_S

    def __post_init__(self) -> None:
        self.room = 2 * self.size * self.in_flight  # prompts that are held at a time

    async def items(self) -> AsyncGenerator[Mapped, None]:
        try:
            while True:
                await self._fill()
                for item in self._ready():
                    yield item
                if self.flying or self.waiting:
                    await self._land()
                elif self.exhausted and not self.window:
                    return
        finally:
            if self.cache is None:
                for chunk in self.flying:
                    with suppress(MidstreamError):
                        await Jobs[Awaits](self.calls._io).cancel(chunk.job)

    def _ready(self) -> Iterator[Mapped]:
        for _ in range(len(self.window)):
            entry = self.window.popleft()
            if entry.item is not None:
                yield entry.item
            elif self.ordered:
                self.window.appendleft(entry)
                return
            else:
                self.window.append(entry)

    async def _fill(self) -> None:
        """Read as many prompts as there is room for, and submit jobs of those that are not in the
        cache.
        """
        while (
            not self.exhausted
            and len(self.flying) + len(self.waiting) < self.in_flight
            and len(self.window) < self.room
        ):
            needed = min(self.size, self.room - len(self.window))
            entries = [self._entry(prompt) for prompt in itertools.islice(self.prompts, needed)]
            self.exhausted = len(entries) < needed
            results = (
                await self.calls._io.work(
                    self.cache.load, [item.key for item in entries], self.keep
                )
                if self.cache
                else {}
            )
            for entry in entries:
                self.window.append(entry)
                if entry.key in results:
                    result, rows = results[entry.key]
                    entry.item = self._mapped(entry, result, rows, True)
                elif entry.key in self.wanted:
                    self.wanted[entry.key].append(entry)
                else:
                    self.wanted[entry.key] = [entry]
                    self._add(entry)
        if self.filling and not self.waiting and (self.exhausted or len(self.window) >= self.room):
            self._close_chunk()
        while (
            self.waiting
            and len(self.flying) < self.in_flight
            and time.monotonic() >= self.not_before
        ):
            await self._launch(self.waiting.popleft())

    def _entry(self, prompt: Any) -> _Entry:
        number = self.read
        self.read += 1
        is_chat = (
            isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)
        )
        if self.chat not in (None, is_chat):
            raise invalid(
                f"prompts[{number}]",
                "conversations and other prompts are mixed",
                hint="give one of the two",
            )
        self.chat = is_chat
        with Translated(
            (TypeError, ValueError),
            lambda error: invalid(
                f"prompts[{number}]",
                f"is not a prompt: {error}",
                allowed="a text, token ids, or a conversation",
            ),
        ):
            plain = (
                prompt if isinstance(prompt, str) or is_chat else [int(token) for token in prompt]
            )
            encoded = to_json(plain)
        key = map_key.of_prompt(self.plan.base, encoded) if self.cache else str(number)
        return _Entry(number, prompt, plain, len(encoded), key)

    def _add(self, entry: _Entry) -> None:
        if self.filling and sum(item.size for item in self.filling) + entry.size > JOB_BYTES:
            self._close_chunk()
        self.filling.append(entry)
        if len(self.filling) >= self.size:
            self._close_chunk()

    def _close_chunk(self) -> None:
        self.waiting.append(_Chunk(self.filling))
        self.filling = []

    async def _launch(self, chunk: _Chunk) -> None:
        prompts = [entry.plain for entry in chunk.entries]
        body = msgspec.structs.replace(
            self.plan.request,
            **{"prompts": None, "messages": prompts} if self.chat else {"prompts": prompts},
        )
        try:
            view = await self._submitted(chunk, body)
            while wire.is_over(view) and view.state != State.SUCCEEDED:  # of a previous run
                chunk.attempt += 1
                view = await self._submitted(chunk, body)
        except MidstreamError as error:
            if error.kind == "payload_too_large" and len(chunk.entries) > 1:
                half = len(chunk.entries) // 2
                self.size = max(1, min(self.size, half))
                self.waiting.extendleft(
                    [_Chunk(chunk.entries[half:]), _Chunk(chunk.entries[:half])]
                )
            elif _passes(error):
                self.waiting.appendleft(chunk)
                self._hold(error)
            else:
                raise _located(error, chunk) from None
        else:
            chunk.job = view.id
            self.flying.append(chunk)
            self._answered()

    async def _submitted(self, chunk: _Chunk, body: JobRequest) -> JobView:
        """The job of this attempt: a new one, or with a cache that of a run that was killed."""
        keys = [entry.key for entry in chunk.entries]
        token = (
            f"map-{map_key.of_job(self.plan.base, keys, chunk.attempt)}"
            if self.cache
            else f"map-{chunk.token}-{chunk.attempt}"
        )
        return await self.calls._ask(wire.submission("/v1/jobs", body, token), JobView)

    def _answered(self) -> None:
        self.refused_since = None
        self.pause = wire.PAUSE_S

    def _hold(self, error: MidstreamError) -> None:
        """Submit nothing for a while. Raises `error` after `patience` seconds of this."""
        now = time.monotonic()
        self.refused_since = self.refused_since or now
        if now - self.refused_since > self.patience:
            raise error
        self.not_before = now + min(error.retry_after or self.pause, MAX_PAUSE_S)
        self.pause = min(2 * self.pause, MAX_PAUSE_S)

    async def _land(self) -> None:
        """Wait until a job is over, or for a second if others may be."""
        if not self.flying:
            await self.calls._io.sleep(max(0.0, self.not_before - time.monotonic()))
            return
        alone = len(self.flying) == 1 and not self.waiting
        for number, chunk in enumerate(list(self.flying)):
            seconds = wire.POLL_S if alone else LOOK_S
            if number > 0:  # after the wait for the first
                seconds = 0.0
            try:
                view = await self.calls._ask(jobs.poll(chunk.job, "", seconds), JobView)
                if not wire.is_over(view):
                    continue
                self.flying.remove(chunk)
                try:
                    await self._collect(chunk, view)
                except MidstreamError as error:
                    if _passes(error):
                        self.flying.appendleft(chunk)
                    raise
            except MidstreamError as error:
                if _passes(error):
                    self._hold(error)
                    await self.calls._io.sleep(max(0.0, self.not_before - time.monotonic()))
                    return
                self._again(chunk, error)
            self._answered()

    def _again(self, chunk: _Chunk, error: MidstreamError) -> None:
        """Submit a chunk whose job failed once more. Raises `error` where that would not help."""
        with suppress(ValueError):
            self.flying.remove(chunk)
        chunk.attempt += 1
        chunk.failures += 1
        if error.kind not in AGAIN or chunk.failures >= self.attempts:
            raise _located(error, chunk) from None
        self.waiting.appendleft(chunk)

    async def _collect(self, chunk: _Chunk, view: JobView) -> None:
        """Keep the results of a job that is over, and hand them to those that wait."""
        if view.state == State.CANCELLED:
            raise _located(MidstreamError("internal", f"job {view.id} was cancelled"), chunk)
        result = await Jobs[Awaits](self.calls._io)._result(view.id)
        map_key.check(view, self.plan.identity, self.plan.names, self.plan.steering)
        results = {
            entry.key: sliced(result, number, len(chunk.entries))
            for number, entry in enumerate(chunk.entries)
        }
        rows = await self._rows(chunk, view) if self.keep else None
        if self.cache is not None:
            await self.calls._io.work(self.cache.store, results, rows)
        for entry in chunk.entries:
            for item in self.wanted.pop(entry.key):
                item.item = self._mapped(item, results[entry.key], rows, False)

    async def _rows(self, chunk: _Chunk, view: JobView) -> Path:
        assert self.cache is not None, "captures are kept only in a cache"
        with self.cache.downloads() as folder:
            (await Captures[Awaits](self.calls._io)._open(view.id, folder, None, False)).close()
            name = map_key.of_job(self.plan.base, [entry.key for entry in chunk.entries])
            return await self.calls._io.work(self.cache.keep, folder, name)

    def _mapped(self, entry: _Entry, result: JobResult, rows: Path | None, cached: bool) -> Mapped:
        capture = self.plan.request.capture
        return Mapped(
            index=entry.index,
            prompt=entry.prompt,
            result=result.as_asked(),
            request=result.outputs[0].index,
            cached=cached,
            rows=rows if self.keep else None,
            tag=capture.tag if capture is not None else None,
        )


def sliced(result: JobResult, number: int, prompts: int) -> JobResult:
    """Return the part of a job's result that is about prompt `number` of `prompts`; `index` and
    `request` in it remain the job's.
    """

    def own(values: list[Any] | None) -> list[Any] | None:
        """Return one prompt's share of a list that has equally many items for each prompt."""
        item = len(values or []) // prompts
        return None if values is None else values[number * item : (number + 1) * item]

    captures = result.capture_results
    determinism = result.determinism
    files = [file for file in captures.files if file.request == number]
    own_captures = msgspec.structs.replace(
        captures,
        files=files,
        consumers=[report for report in captures.consumers if report.request == number],
        bytes=sum(file.bytes for file in files),
        rows=sum(file.rows for file in files),
    )
    if determinism is not None:
        stages = [
            msgspec.structs.replace(
                stage, ranks=[report for report in stage.ranks if report.request == number]
            )
            for stage in determinism.stages
        ]
        determinism = msgspec.structs.replace(determinism, stages=stages)
    return msgspec.structs.replace(
        result,
        outputs=[output for output in result.outputs if output.index == number],
        capture_results=own_captures,
        determinism=determinism,
        probes=[probe for probe in result.probes if probe.request == number],
        **{field: own(getattr(result, field)) for field in READINGS},
    )


def _passes(error: MidstreamError) -> bool:
    """Return whether the same request may be accepted later."""
    return error.retry_after is not None or error.kind in ("unavailable", "overloaded")


def _located(error: MidstreamError, chunk: _Chunk) -> MidstreamError:
    """The error with the place in the input instead of that in the job."""
    match = _OF_PROMPT.fullmatch(error.field or "")
    if match is None or int(match[1]) >= len(chunk.entries):
        error.add_note(
            f"in a job of prompts {chunk.entries[0].index} to {chunk.entries[-1].index} of "
            "the input"
        )
        return error
    return error.at(f"prompts[{chunk.entries[int(match[1])].index}]{match[2]}")
