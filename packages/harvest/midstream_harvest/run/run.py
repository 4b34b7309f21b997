"""Parts of harvests, as a kind of jobs that a vLLM worker runs."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.jobs.jobs import Job, Output
from midstream.workers.engine.protocol import GeneratingEngine
from midstream.workers.serving.attempt import Attempt, Bench, Run
from midstream.workers.serving.prompts import holding_artifacts
from midstream.workers.serving.redis_retry import patiently

from ..ledger.harvests import LedgerHarvests
from ..names import PARTS_PER_WORKER
from ..records.harvests import HarvestWork
from ..records.work import SHARDS_AT_ONCE
from .attempt import HarvestAttempt

logger = logging.getLogger(__name__)


class _Parts:
    """The parts of harvests that run on a worker, or are about to run."""

    def __init__(self, bench: Bench[GeneratingEngine]) -> None:
        self._bench = bench
        self._harvests = LedgerHarvests(bench.ledger)
        self._held = 0

    @asynccontextmanager
    async def room(self, job_id: str) -> AsyncIterator[bool]:
        """Hold one of `PARTS_PER_WORKER` places. Surveys take no part's place: as many may be here,
        and the ledger keeps the others.
        """
        surveys = await patiently(self._harvests.surveys, job_id)
        if not surveys and self._held >= PARTS_PER_WORKER:
            yield False
            return
        held, surveying = (0, 1) if surveys else (1, 0)
        self._bench.side_jobs += surveying
        self._held += held
        try:
            yield True
        finally:
            self._bench.side_jobs -= surveying
            self._held -= held

    async def ended(self, job: Job) -> None:
        """Submit what follows a part; if that fails, the reaper does it."""
        harvest_id = job.work_as(HarvestWork).part.harvest
        try:
            await self._harvests.advance(harvest_id)
        except MidstreamError as error:
            logger.warning("harvest %s: %s", harvest_id, error)


def run(bench: Bench[GeneratingEngine]) -> Run:
    parts = _Parts(bench)
    limit = bench.ledger.settings.tuning.harvest_requests_in_flight
    sequences = bench.slots(limit, "harvest")  # of all harvests
    shards = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def part(attempt: Attempt) -> list[Output]:
        async with holding_artifacts(bench.engine, attempt.job):
            await HarvestAttempt(bench, attempt, sequences, shards).run()
        return []  # its results are stored

    return Run(part, parts.room, parts.ended)
