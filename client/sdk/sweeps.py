"""Calls on sweeps, of both clients: submit, follow cell by cell, get the grid.

A sweep is a job: `job`, `wait`, `cancel` and `events` of the clients hold for it, too.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

import httpx
import msgspec

from ...schemas.errors import MidstreamError
from ...schemas.jobs import Event, JobResult, JobView
from ...schemas.sweeps import Metric, SweepCell, SweepPair, SweepRequest, SweepResult, SweepStart, SweepSummary
from .. import values
from . import wire
from .wire import Call, JobLike

#: An event that only sweeps have.
SweepEvent = SweepStart | SweepCell | SweepSummary
Progress = Callable[[SweepEvent], None]

_KINDS: dict[str, type[SweepStart] | type[SweepCell] | type[SweepSummary]] = {
    "start": SweepStart, "cell": SweepCell, "summary": SweepSummary,
}  # fmt: skip


def sweep_request(request: SweepRequest | None, fields: dict[str, Any]) -> SweepRequest:
    """The body of a sweep from a struct or from keyword arguments; raises MidstreamError naming the field.

    An ablation without a metric asks for the metric that its pairs allow: `recovered` needs two prompts.
    """
    made = values.request(request, fields, SweepRequest)
    if request is not None or made.ablation is None or "metric" in fields:
        return made
    return msgspec.structs.replace(made, metric=_ablation_metric(made.pairs))


def _ablation_metric(pairs: Sequence[SweepPair]) -> Metric:
    if any(pair.answer is None for pair in pairs):
        return "kl"
    return "logprob" if any(pair.foil is None for pair in pairs) else "logit_diff"


def sweep_event(event: Event) -> SweepEvent | None:
    """The event of a sweep; None for an event that all jobs have."""
    if event.event not in _KINDS:
        return None
    try:
        return msgspec.convert(event.data, _KINDS[event.event])
    except msgspec.ValidationError as error:
        raise MidstreamError("version_mismatch", f"the server's event {event.event} cannot be read: {error}") from error


def _submission(request: SweepRequest | None, key: str | None, fields: dict[str, Any]) -> Call:
    headers = {"idempotency-key": key or wire.idempotency_key(), "prefer": "respond-async"}
    return Call("POST", "/v1/sweeps", body=sweep_request(request, fields), headers=headers)


def _grid(result: JobResult) -> SweepResult:
    if result.sweep is None:
        raise MidstreamError("not_found", f"job {result.id} is not a sweep")
    return result.sweep


def _stopped(interrupt: BaseException, job_id: JobLike, error: MidstreamError | None) -> None:
    """The message for a user who interrupts the wait for a sweep."""
    sweep = f"sweep {wire.id_of(job_id)}"
    interrupt.add_note(f"{sweep} was cancelled" if error is None else f"{sweep} could not be cancelled: {error}")


class SweepCalls(ABC):
    """Of the blocking client."""

    @abstractmethod
    def _send_patiently(self, call: Call) -> httpx.Response: ...
    @abstractmethod
    def events(self, job_id: JobLike, after: str = "") -> Iterator[Event]: ...
    @abstractmethod
    def wait(self, job_id: JobLike, timeout: float | None = None) -> JobView: ...
    @abstractmethod
    def result(self, job_id: JobLike) -> JobResult: ...
    @abstractmethod
    def cancel(self, job_id: JobLike) -> JobView: ...

    def submit_sweep(self, request: SweepRequest | None = None, *, idempotency_key: str | None = None, **fields: Any) -> JobView:
        """Submit a sweep, by struct or by its fields (`model=…, pairs=[…], hooks=[…]`); returns at once. Safe to repeat."""
        return wire.decode(self._send_patiently(_submission(request, idempotency_key, fields)), JobView)

    def sweep(self, request: SweepRequest | None = None, *, progress: Progress | None = None, **fields: Any) -> SweepResult:
        """Submit a sweep, wait, and return its grids. `progress` is called with every event; interrupting the wait cancels the sweep."""
        return self.sweep_result(self.submit_sweep(request, **fields).id, progress, cancel=True)

    def sweep_result(self, job_id: JobLike, progress: Progress | None = None, *, cancel: bool = False) -> SweepResult:
        """The grids of a sweep once it is over; raises what went wrong of one that failed, `not_found` of another job.

        `cancel`: who interrupts the wait cancels the sweep.
        """
        try:
            if progress is not None:
                for each in self.sweep_events(job_id):
                    progress(each)
            self.wait(job_id)
            return _grid(self.result(job_id))
        except KeyboardInterrupt as interrupt:
            if cancel:
                try:
                    self.cancel(job_id)
                    _stopped(interrupt, job_id, None)
                except MidstreamError as error:
                    _stopped(interrupt, job_id, error)
            raise

    def sweep_events(self, job_id: JobLike, after: str = "") -> Iterator[SweepEvent]:
        """The events of a sweep, from its beginning (or behind the event `after`) to its end; outlives lost connections."""
        return (each for event in self.events(job_id, after) if (each := sweep_event(event)) is not None)


class AsyncSweepCalls(ABC):
    """Of the awaiting client: the same, as coroutines; `progress` is called, not awaited."""

    @abstractmethod
    async def _send_patiently(self, call: Call) -> httpx.Response: ...
    @abstractmethod
    def events(self, job_id: JobLike, after: str = "") -> AsyncIterator[Event]: ...
    @abstractmethod
    async def wait(self, job_id: JobLike, timeout: float | None = None) -> JobView: ...
    @abstractmethod
    async def result(self, job_id: JobLike) -> JobResult: ...
    @abstractmethod
    async def cancel(self, job_id: JobLike) -> JobView: ...

    async def submit_sweep(self, request: SweepRequest | None = None, *, idempotency_key: str | None = None, **fields: Any) -> JobView:
        return wire.decode(await self._send_patiently(_submission(request, idempotency_key, fields)), JobView)

    async def sweep(self, request: SweepRequest | None = None, *, progress: Progress | None = None, **fields: Any) -> SweepResult:
        return await self.sweep_result((await self.submit_sweep(request, **fields)).id, progress, cancel=True)

    async def sweep_result(self, job_id: JobLike, progress: Progress | None = None, *, cancel: bool = False) -> SweepResult:
        try:
            if progress is not None:
                async for each in self.sweep_events(job_id):
                    progress(each)
            await self.wait(job_id)
            return _grid(await self.result(job_id))
        except asyncio.CancelledError as interrupt:
            if cancel:
                try:
                    await self.cancel(job_id)
                    _stopped(interrupt, job_id, None)
                except MidstreamError as error:
                    _stopped(interrupt, job_id, error)
            raise

    async def sweep_events(self, job_id: JobLike, after: str = "") -> AsyncIterator[SweepEvent]:
        async for event in self.events(job_id, after):
            each = sweep_event(event)
            if each is not None:
                yield each
