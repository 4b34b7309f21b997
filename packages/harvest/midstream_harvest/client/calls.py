"""Calls on harvests: submit, follow, stream, pause, resume, cancel, delete."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Unpack

from midstream.client import values
from midstream.client.sdk import wire
from midstream.client.sdk.calls import Awaits, Calls, M, call, stream
from midstream.client.sdk.jobs import Jobs
from midstream.client.sdk.wire import HttpCall, JobLike
from midstream.schemas.base.errors import MidstreamError, error_of

from ..files.surveys import Surveyed
from ..names import OVER
from ..records.harvests import (
    HarvestPage,
    HarvestRequest,
    HarvestView,
    StreamCursor,
    StreamPage,
    SurveyRequest,
)
from .fields import HarvestFields, SurveyFields

if TYPE_CHECKING:
    from ..files.shards import StreamedUnit

_HARVESTS = "/v1/harvests"
#: Seconds between two polls while waiting for a harvest.
POLL_S = 1.0

OnHarvestView = Callable[[HarvestView], None]
HarvestLike = str | HarvestView


def _path(harvest: HarvestLike, *more: str) -> str:
    """Return `/v1/harvests/<id>/<more>`."""
    return wire.path("harvests", harvest.id if isinstance(harvest, HarvestView) else harvest, *more)


def _ended(view: HarvestView) -> HarvestView:
    """Return a harvest that succeeded; raise the error of one that did not."""
    if view.error is not None:
        raise error_of(view.error)
    if view.state != "succeeded":
        raise MidstreamError("conflict", f"harvest {view.id} was {view.state}")
    return view


class Harvests(Calls[M]):
    """Harvests (docs/harvest.md), their streams, and surveys of their features
    (docs/read.md#features-in-context).
    """

    @call
    async def submit(
        self,
        /,
        request: HarvestRequest | None = None,
        *,
        idempotency_key: str | None = None,
        **fields: Unpack[HarvestFields],
    ) -> HarvestView:
        """Submit a harvest, by struct or by its fields (`model=…, source={…}, layers=[…]`); returns
        immediately. Safe to repeat.
        """
        body = await self._body(request, dict(fields), HarvestRequest)
        return await self._ask_patiently(
            wire.submission(_HARVESTS, body, idempotency_key), HarvestView
        )

    @call
    async def get(self, harvest: HarvestLike) -> HarvestView:
        """Return a harvest's state and counts. Raises `not_found`."""
        return await self._get(_path(harvest), HarvestView)

    @call
    async def list(self, *, limit: int | None = None, surveyed: str | None = None) -> HarvestPage:
        """Return the newest harvests. With `surveyed`, an autoencoder's name: only those with
        finished surveys of its features, which they list under `surveys`.
        """
        return await self._get(_HARVESTS, HarvestPage, limit=limit, surveyed=surveyed)

    @call
    async def wait(
        self,
        harvest: HarvestLike,
        progress: OnHarvestView | None = None,
        timeout: float | None = None,
    ) -> HarvestView:
        """Wait until a harvest has succeeded, and return it; `midstream.harvest.open(view.uri)`
        reads it.

        `progress` is called at every poll.

        Raises the error of a harvest that failed, `conflict` for one that was cancelled,
        TimeoutError after `timeout` seconds. Survives an API restart.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        call = HttpCall("GET", _path(harvest))
        while True:
            view = await self._ask_patiently(call, HarvestView, wire.PATIENCE_S)
            if progress is not None:
                progress(view)
            if view.state in OVER:
                return _ended(view)
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the harvest has not ended after {timeout} s")
            await self._io.sleep(POLL_S)

    @call
    async def survey(self, harvest: HarvestLike, **fields: Unpack[SurveyFields]) -> Surveyed:
        """Survey a finished harvest (`sae=…, top=…, context=…`): the density of each feature of an
        autoencoder, and its strongest examples, of different documents, in context. Waits, and
        opens the result in the harvest's store.

        Raises the error of a survey that failed.
        """
        jobs = Jobs[Awaits](self._io)
        body = values.request(None, dict(fields), SurveyRequest)
        view = await jobs.wait(await self._submit(_path(harvest, "surveys"), body, None))
        await jobs.result(view)
        return await self.surveyed(harvest, view)

    @call
    async def surveyed(self, harvest: HarvestLike, job: JobLike) -> Surveyed:
        """Open a finished survey by its job; `get(harvest).surveys` lists them. Raises
        `not_found`.
        """
        return Surveyed.of(await self.get(harvest), wire.id_of(job))

    @call
    async def pause(self, harvest: HarvestLike) -> HarvestView:
        """Stop computing; finished shards are kept. Raises `conflict` for one that has ended."""
        return await self._act(harvest, "pause")

    @call
    async def resume(self, harvest: HarvestLike) -> HarvestView:
        """Continue with the unfinished shards. Raises `conflict` for one that has ended."""
        return await self._act(harvest, "resume")

    @call
    async def cancel(self, harvest: HarvestLike) -> HarvestView:
        """Cancel a harvest; it cannot be resumed. Raises `conflict` for one that has ended."""
        return await self._act(harvest, "cancel")

    async def _act(self, harvest: HarvestLike, act: str) -> HarvestView:
        return await self._ask(HttpCall("POST", _path(harvest, act)), HarvestView)

    @call
    async def delete(self, harvest: HarvestLike) -> None:
        """Delete a harvest's files and record. Raises `conflict` for one that has not ended."""
        await self._do(HttpCall("DELETE", _path(harvest)))

    @stream
    async def stream(
        self,
        harvest: HarvestLike,
        *,
        consumer: str = "trainer",
        after: int | None = None,
        acknowledge: bool = True,
    ) -> AsyncIterator[StreamedUnit]:
        """Yield the units of a harvest that was submitted with `to="stream"`, each with its rows,
        in order and to the end of the harvest.

        Begins after the units that the consumer has acknowledged, or after the first `after`, which
        count as acknowledged. A unit is acknowledged when the next one is asked for; with
        `acknowledge=False`, all are by calls of `acknowledge`. Survives an API restart. Their files
        are read from the harvest's store, a folder or bucket. Raises what `next_units` raises.
        """
        from ..files.shards import StreamedUnit

        # else consumers that are killed before they acknowledge fill the window
        if acknowledge and after:
            await self.acknowledge(harvest, after, consumer=consumer)
        while True:
            page = await self.next_units(harvest, consumer=consumer, after=after)
            if page.ended:
                return
            for entry in page.units:
                unit = StreamedUnit(entry, page.uri)
                yield unit
                after = unit.cursor
                if acknowledge:
                    await self.acknowledge(harvest, after, consumer=consumer)

    @call
    async def next_units(
        self,
        harvest: HarvestLike,
        *,
        consumer: str = "trainer",
        after: int | None = None,
        wait: float = wire.POLL_S,
    ) -> StreamPage:
        """Return the units of a stream that are ready, without rows, after at most `wait` seconds.

        Raises `conflict` for a harvest that is no stream or did not succeed, `gone` for units that
        were dropped, `invalid_request` for an unknown consumer.
        """
        call = HttpCall(
            "GET",
            _path(harvest, "stream"),
            params=wire.given(consumer=consumer, after=after, wait=wait),
            timeout=wire.HELD_S,
        )
        return await self._ask_patiently(call, StreamPage, wire.PATIENCE_S)

    @call
    async def acknowledge(
        self, harvest: HarvestLike, cursor: int, *, consumer: str = "trainer"
    ) -> StreamCursor:
        """Acknowledge the first `cursor` units of a stream: the consumer needs them no more.

        Raises what `next_units` raises.
        """
        call = HttpCall(
            "POST",
            _path(harvest, "stream", "ack"),
            body=StreamCursor(consumer=consumer, cursor=cursor),
        )
        return await self._ask_patiently(call, StreamCursor, wire.PATIENCE_S)
