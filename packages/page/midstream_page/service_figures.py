"""Figures of the page's top bar: read and rendered once every few seconds per process, however
many pages are open.
"""

import asyncio
import logging
import shutil
import time
from collections import deque
from collections.abc import Iterable

import anyio.to_thread
import msgspec

from midstream.api.context import AppContext
from midstream.broker.ledger.jobs.ledger import reachable
from midstream.schemas.access.keys import Caller, TenantView
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now, to_json
from midstream.schemas.jobs.models import WorkerInfo
from midstream.schemas.service.compatibility import judged

from .job_feed import event
from .records import FeedHistory, FeedModel, FeedService

log = logging.getLogger("midstream.api")

#: Seconds for which the figures are cached.
FRESH_S = 2.0
#: Seconds between two points of the history, and how many are kept: an hour.
STEP_S = 10.0
POINTS = 360


def _speed(workers: Iterable[WorkerInfo]) -> float:
    """Return the tokens per second that the workers generate."""
    return sum(worker.stats.generated_tokens_s for worker in workers if worker.stats is not None)


class ServiceFigures:
    """Belongs to one event loop."""

    def __init__(self, context: AppContext) -> None:
        self._context = context
        self._ledger = context.ledger
        self._lock = asyncio.Lock()
        self._due = 0.0
        self._known: FeedService | None = None
        # (tenant, whether the caller may observe) → the event, while `_known` is cached
        self._rendered: dict[tuple[str, bool], bytes] = {}
        self._points: deque[tuple[float, float, int]] = deque(maxlen=POINTS)

    async def record(self) -> None:
        """Add a point to the history every `STEP_S`; none while it cannot be read."""
        while True:
            try:
                speed = _speed(await self._ledger.workers())
                queued, _ = await self._counts()
                self._points.append((now(), speed, queued))
            except MidstreamError as error:  # Redis is unreachable
                log.debug("cannot read a point of the history; will retry: %s", error)
            except Exception:  # the next points must still be recorded
                log.exception("cannot read a point of the history; next one in %s s", STEP_S)
            await asyncio.sleep(STEP_S)

    def history(self) -> bytes:
        """Return the points of the last hour, as the event `history` of a feed."""
        return event(b"history", to_json(FeedHistory(points=[*self._points])))

    async def rendered(self, caller: Caller) -> bytes:
        """Return the figures that the caller may see, as the event `service` of a feed.

        Raises `unavailable`.
        """
        shown = caller.tenant, caller.may("observe")
        async with self._lock:
            if self._known is None or time.monotonic() >= self._due:
                self._known = await self._read(await self._tenant(caller.tenant))
                self._due = time.monotonic() + FRESH_S
                self._rendered.clear()
            if shown not in self._rendered:
                known = msgspec.structs.replace(
                    self._known, tenant=await self._tenant(caller.tenant)
                )
                if not caller.may("observe"):
                    known = FeedService(at=known.at, models=known.models, tenant=known.tenant)
                self._rendered[shown] = event(b"service", to_json(known))
            return self._rendered[shown]

    async def _tenant(self, name: str) -> TenantView:
        return await self._ledger.tenants.view(name)

    async def _read(self, tenant: TenantView) -> FeedService:
        workers = [judged(worker) for worker in await self._ledger.workers()]
        models = []
        for info in await self._ledger.models():
            steering = await self._context.steering.current(info.name)
            serving = [worker for worker in workers if worker.model == info.name]
            models.append(
                FeedModel(
                    name=info.name,
                    workers=len(serving),
                    healthy=sum(worker.healthy for worker in serving),
                    steered=bool(steering.entries),
                    steering_entries=len(steering.entries),
                    steering_version=steering.version,
                )
            )
        queued, live = await self._counts()
        free, total = await anyio.to_thread.run_sync(self._disk)
        of_disks = await self._context.disks.troubles()
        troubles = [f"{name}: {trouble}" for name, trouble in of_disks.items()]
        troubles += [
            f"worker {worker.worker}: {worker.detail or 'is not healthy'}"
            for worker in workers
            if not worker.healthy
        ]
        return FeedService(
            at=now(),
            models=models,
            tenant=tenant,
            tokens_s=_speed(workers),
            queued=queued,
            live=live,
            disk_free=free,
            disk_total=total,
            quota_left=await anyio.to_thread.run_sync(self._context.quota.usage.left),
            troubles=troubles,
        )

    @reachable
    async def _counts(self) -> tuple[int, int]:
        async with self._ledger.redis.pipeline(transaction=False) as pipe:
            pipe.hget("ms:usage", "/queued").zcard("ms:live")
            queued, live = await pipe.execute()
        return int(queued or 0), int(live)

    def _disk(self) -> tuple[int | None, int | None]:
        """Return free and total bytes of the disk for captures; None if it is elsewhere."""
        folder = self._context.settings.artifacts
        if "://" in folder:
            return None, None
        try:
            result = shutil.disk_usage(folder)
        except OSError:  # not on this machine, or not created yet
            return None, None
        return result.free, result.total
