"""Calls on sweeps and attributions: submit, follow cell by cell, get the grid.

Both are jobs, so the calls on jobs also work on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, Unpack

import msgspec

from midstream.client import values
from midstream.client.sdk import wire
from midstream.client.sdk.calls import Awaits, Calls, M, call, stream
from midstream.client.sdk.jobs import Jobs
from midstream.client.sdk.wire import JobLike
from midstream.schemas.base.errors import MidstreamError, Translated, invalid
from midstream.schemas.jobs.jobs import Event, JobView
from midstream.schemas.jobs.results import JobResult

from ..records.attributions import AttributionRequest, EstimatedPair
from ..records.sweeps import (
    TEXTS,
    Metric,
    SweepCell,
    SweepPair,
    SweepRequest,
    SweepResult,
    SweepStart,
    SweepSummary,
)
from .attribution import Attribution, attribution_of
from .fields import AttributeFields, SweepFields
from .progress import (
    OnSweepEvent as OnSweepEvent,
    SweepEvent as SweepEvent,
)

R = TypeVar("R", bound=SweepRequest)

_KINDS: dict[str, type[SweepEvent]] = {
    "start": SweepStart, "estimate": EstimatedPair, "cell": SweepCell, "summary": SweepSummary,
}  # fmt: skip


def sweep_request(request: R | None, fields: dict[str, Any], kind: type[R]) -> R:
    """Build the body of a sweep, or of an attribution, from a struct or from keyword arguments.
    Raises MidstreamError naming the field.

    An ablation has one prompt, but the default metric `recovered` needs two: without a metric, an
    ablation gets the one that its pairs allow.
    """
    body = values.request(request, fields, kind)
    if request is not None or body.ablation is None or "metric" in fields:
        return body
    return msgspec.structs.replace(body, metric=_ablation_metric(body.pairs))


def _ablation_metric(pairs: Sequence[SweepPair]) -> Metric:
    if any(pair.answer is None for pair in pairs):
        return "kl"
    return "logprob" if any(pair.foil is None for pair in pairs) else "logit_diff"


def sweep_event(event: Event) -> SweepEvent | None:
    """Convert an event to the sweep's type; None for an event that all jobs have."""
    if event.event not in _KINDS:
        return None
    with Translated(
        msgspec.ValidationError,
        lambda error: MidstreamError(
            "version_mismatch", f"the server's event {event.event} cannot be read: {error}"
        ),
    ):
        return msgspec.convert(event.data, _KINDS[event.event])


def _grid(result: JobResult) -> SweepResult:
    if result.sweep is None:
        raise MidstreamError("not_found", f"job {result.id} is not a sweep")
    grid: SweepResult = result.sweep
    return grid


class Gridded(Calls[M]):
    """What the calls on sweeps and on attributions share."""

    _kind = "sweep"

    async def _awaited_result(
        self, job_id: JobLike, progress: OnSweepEvent | None, cancel: bool
    ) -> JobResult:
        jobs = Jobs[Awaits](self._io)
        try:
            if progress is not None:
                async for sweep_event in self.events(job_id):
                    progress(sweep_event)
            return await jobs._ended(job_id)
        except (KeyboardInterrupt, asyncio.CancelledError) as interrupt:
            if cancel:
                asked = f"{self._kind} {wire.id_of(job_id)}"
                try:
                    await jobs.cancel(job_id)
                    interrupt.add_note(f"{asked} was cancelled")
                except MidstreamError as error:
                    interrupt.add_note(f"{asked} could not be cancelled: {error}")
            raise

    @stream
    async def events(self, job_id: JobLike, after: str = "") -> AsyncIterator[SweepEvent]:
        """Yield the events of a sweep or an attribution, from its start (or after the event
        `after`) to its end; reconnects after a lost connection.
        """
        async with aclosing(Jobs[Awaits](self._io).events(job_id, after)) as events:
            async for event in events:
                item = sweep_event(event)
                if item is not None:
                    yield item


class Sweeps(Gridded[M]):
    """Patching sweeps (docs/client.md#patch-studies)."""

    @call
    async def submit(
        self,
        /,
        request: SweepRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[SweepFields],
    ) -> JobView:
        """Submit a sweep, by struct or by its fields (`model=…, pairs=[…], hooks=[…]`); returns
        immediately. Safe to repeat.
        """
        body = await self._body(request, dict(fields), SweepRequest, sweep_request)
        return await self._submit("/v1/sweeps", body, idempotency_key)

    @call
    async def run(
        self,
        /,
        request: SweepRequest | None = None,
        *,
        progress: OnSweepEvent | None = None,
        **fields: Unpack[SweepFields],
    ) -> SweepResult:
        """Submit a sweep, wait, and return its grids.

        `progress` is called with every event; interrupting the wait cancels the sweep.
        """
        return await self.result((await self.submit(request, **fields)).id, progress, cancel=True)

    @call
    async def result(
        self, job_id: JobLike, progress: OnSweepEvent | None = None, *, cancel: bool = False
    ) -> SweepResult:
        """Wait for a sweep, and return its grids. Raises the sweep's error if it failed, and
        `not_found` for a job that is not a sweep.

        `cancel`: interrupting the wait cancels the sweep.
        """
        return _grid(await self._awaited_result(job_id, progress, cancel))


def paired(request: AttributionRequest | None, fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of an attribution, in which those of one pair are `pairs`. Raises
    MidstreamError naming the field.
    """
    pair = {name: given for name in TEXTS if (given := fields.pop(name, None)) is not None}
    if pair and (fields.get("pairs") is not None or request is not None):
        raise invalid(next(iter(pair)), "is not valid with pairs, which have it")
    if pair:
        fields["pairs"] = [pair]
    return fields


class Attributions(Gridded[M]):
    """Attributions (docs/client.md#attributions)."""

    _kind = "attribution"

    @call
    async def submit(
        self,
        /,
        request: AttributionRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[AttributeFields],
    ) -> JobView:
        """Submit an attribution, by struct or by its fields (`model=…, clean=…, corrupt=…,
        answer=…, foil=…, verify={}`); returns immediately. Safe to repeat.
        """
        body = await self._body(
            request, paired(request, dict(fields)), AttributionRequest, sweep_request
        )
        return await self._submit("/v1/attributions", body, idempotency_key)

    @call
    async def run(
        self,
        /,
        request: AttributionRequest | None = None,
        *,
        progress: OnSweepEvent | None = None,
        **fields: Unpack[AttributeFields],
    ) -> Attribution:
        """Submit an attribution, wait, and return its estimates beside the exact values.

        `clean`, `corrupt`, `answer` and `foil` are those of one pair, instead of `pairs`.
        `verify={}` computes the default cells exactly, and None none. `progress` is called with
        every event; interrupting the wait cancels the attribution.
        """
        return await self.result((await self.submit(request, **fields)).id, progress, cancel=True)

    @call
    async def result(
        self, job_id: JobLike, progress: OnSweepEvent | None = None, *, cancel: bool = False
    ) -> Attribution:
        """Wait for an attribution, and return its estimates beside the exact values. Raises its
        error if it failed, and `not_found` for a job that is not an attribution.

        `cancel`: interrupting the wait cancels the attribution.
        """
        return attribution_of(await self._awaited_result(job_id, progress, cancel))
