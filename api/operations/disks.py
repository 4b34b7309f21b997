"""Room for what jobs write: whether this machine's disks for captures and for unsent receipts are
writable, and the quota of captures.
"""

from collections.abc import Callable
from pathlib import Path

import anyio.to_thread

from ...broker.artifacts import global_capture
from ...broker.ledger.core.scripts import stored_tags
from ...broker.ledger.jobs.watch import SharedReads
from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import Job
from ...schemas.jobs.kinds import KINDS
from ...schemas.jobs.models import ModelInfo
from ...schemas.settings.settings import Settings
from ...storage.capture_usage import CaptureUsage
from ...storage.disk import probe
from ...storage.store import ArtifactStore

#: Seconds for which a result is cached.
CACHE_S = 1.0


class Disks:
    """Checks folders of this machine; a worker reports those of its own machine."""

    def __init__(self, settings: Settings, store: ArtifactStore) -> None:
        outbox = Path(settings.data_dir) / "outbox"
        self._probes: dict[str, Callable[[], str]] = {
            "captures": store.trouble,
            "outbox": lambda: probe(outbox),
        }
        self._looks: SharedReads[dict[str, str]] = SharedReads(CACHE_S)

    async def troubles(self) -> dict[str, str]:
        """Return why `captures` or `outbox` cannot be written, by name; empty if both can."""
        return await self._looks.of("disks", lambda: anyio.to_thread.run_sync(self._look))

    async def check(self, job: Job) -> None:
        """Raises MidstreamError("unavailable") for a job whose captures or receipts could not be
        kept.
        """
        needed = {"captures"} if stored_tags(job) else set()
        reported = any(job.captures) or any(job.steering) or KINDS[job.kind].grid
        needed |= {"outbox"} if reported else set()
        result = await self.troubles() if needed else {}
        for name in sorted(needed & result.keys()):
            raise MidstreamError("unavailable", result[name])

    def _look(self) -> dict[str, str]:
        return {name: trouble for name, look in self._probes.items() if (trouble := look())}


class CaptureQuota:
    """The quota for files of captures. `quota`: bytes; 0: no limit."""

    def __init__(self, store: ArtifactStore, quota: int) -> None:
        self._quota = quota
        self.usage = CaptureUsage(store, quota)

    async def within(self, job: Job, info: ModelInfo) -> Job:
        """Return the job, without global capture if the quota has no room for it.

        Raises `quota_exceeded` if there is no room for the captures that its user requested.
        """
        tags = set(stored_tags(job))
        operator_tags = {spec.tag for spec in info.global_captures}
        # Without these captures, the status `ok` would be false.
        if tags - operator_tags:
            await anyio.to_thread.run_sync(self.usage.take, [1])
        # Left out while some of the quota remains: global capture must not block requests that
        # capture nothing themselves.
        if tags & operator_tags:
            try:
                await anyio.to_thread.run_sync(
                    self.usage.take,
                    [1],
                    self._quota // global_capture.QUOTA_SPARE,
                )
            except MidstreamError as error:
                return global_capture.without(job, info, "quota", error.detail)
        return job
