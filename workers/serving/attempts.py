"""Attempts: a worker takes one job from claim to stored outputs, through failures in between.

Every outcome is written to the ledger: outputs, a typed problem, a cancellation, or a release to
another attempt. The ledger rejects writes of an attempt that lost its lease.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping

from ...broker.ledger.core.reachable import Unreachable
from ...broker.ledger.jobs.inputs import LedgerInputs
from ...broker.ledger.jobs.ledger import Claim, ClaimRefused, Ledger
from ...schemas.base.errors import MidstreamError, Problem
from ...schemas.base.records import now
from ...schemas.jobs.jobs import Job, State
from ...schemas.settings.faults import crash_point
from ..engine.protocol import Engine, check_lengths
from .attempt import (
    Attempt,
    AttemptOutcome,
    Bench,
    JobFailed,
    ending_for_retry,
    leaves_of,
)
from .kinds import runs_of
from .progress import AttemptProgress, Totals
from .rank_watch import RankWatch
from .receipt_reader import ReceiptReader
from .redis_retry import patiently
from .source_run_leases import StoreUnavailable

logger = logging.getLogger(__name__)

#: A request may see the engine's death before the watch on the engine does: wait this long for the
#: watch.
VERDICT_S = 5.0
#: A job's message waits this long for the worker to serve; then it goes back to the queue.
CLAIM_PATIENCE_S = 20.0
#: If another worker serves the model, the message goes back after this time instead.
ELSEWHERE_S = 1.0
REDIS_PAUSE_S = 0.5
#: Side jobs that a worker holds, of which one is computed; beyond these it takes no other.
MOST_SIDE_JOBS = 2
#: Cancelled jobs that a worker remembers although it does not run them.
UNWANTED = 256


class Attempts:
    """The attempts that this worker holds. Used from the engine's event loop only."""

    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        watch: RankWatch,
        worker: str,
        boot: str,
        engine_died: asyncio.Event,
        unreachable: Callable[[], str] = lambda: "",
    ):
        """`unreachable` returns why the artifact store takes no writes; empty while it does."""
        self._ledger = ledger
        self._engine = engine
        self._inputs = LedgerInputs(ledger)
        self._bench = bench = Bench(ledger, engine, worker)
        self._runs = runs_of(bench)
        self._running = bench.running
        self.renewals = bench.renewals
        self._watch = watch
        watch.stop_runs = self._stop_reported
        self._worker = worker
        self._boot = boot
        self._engine_died = engine_died
        self._unreachable = unreachable
        #: Attempts that have not ended, also those whose job a later one runs here.
        self._begun: set[Attempt] = set()
        self._claiming = 0  # number of claims under way
        self._leaving = False  # no job begins any more
        #: Cancelled jobs that do not run here; the answer to their claim may still arrive.
        self._unwanted: deque[str] = deque(maxlen=UNWANTED)
        self.totals = Totals()

    @property
    def held(self) -> dict[str, int]:
        """Job id → number of its attempt, for the renewal of leases."""
        return {job_id: attempt.number for job_id, attempt in self._running.items()}

    def stop(
        self, job_ids: Iterable[str], ending: AttemptOutcome, held: Mapping[str, int] | None = None
    ) -> None:
        """Stop these jobs' attempts; with `held` (job id → number), only those with that number."""
        for job_id in job_ids:
            if job_id in self._running:
                attempt = self._running[job_id]
                if held is None or held.get(job_id) == attempt.number:
                    attempt.stop(ending)
            elif ending is AttemptOutcome.CANCELLED:
                self._unwanted.append(job_id)

    def _stop_reported(self, why: str) -> bool:
        """Stop attempts that expect receipts: while the ranks disagree, results are unreliable.
        Return whether one is left, or may come of a claim.
        """
        reported = [attempt for attempt in self._begun if attempt.reported]
        for attempt in reported:
            attempt.stop(AttemptOutcome.OUT_OF_STEP, why)
        return bool(reported) or self._claiming > 0

    async def drain(self) -> None:
        """Wait until every attempt is over."""
        while self._running:
            await asyncio.wait([attempt.task for attempt in self._running.values()])

    async def give_back(self, grace_s: float) -> None:
        """Begin no job any more; give back those that have not ended after `grace_s` seconds."""
        self._leaving = True
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.drain(), grace_s)
        self.stop(list(self._running), AttemptOutcome.STOPPED)

    async def run(self, job_id: str, kind: str) -> AttemptOutcome:
        """Run a job of this kind like `run_job`; put it back while this worker has no room."""
        async with self._runs[kind].room(job_id) as room:
            if room:
                return await self.run_job(job_id)
        await asyncio.sleep(ELSEWHERE_S)
        return AttemptOutcome.PUT_BACK

    async def run_job(self, job_id: str) -> AttemptOutcome:
        """Claim and run a job. Raises JobFailed when it ended with a problem."""
        crash_point("worker.received")
        patience = time.monotonic() + CLAIM_PATIENCE_S
        while not self._engine_died.is_set() and await self._may_begin(patience):
            try:
                claim = await self._claim(job_id)
                return AttemptOutcome.NOT_OURS if claim is None else await self._run(claim)
            except ClaimRefused as error:
                logger.info("job %s waiting: %s", job_id, error)
                self._watch.quarantine(error.detail)
            except Unreachable as error:
                logger.warning("claim of %s waiting for Redis: %s", job_id, error)
                await asyncio.sleep(REDIS_PAUSE_S)
                patience = time.monotonic() + CLAIM_PATIENCE_S
            if time.monotonic() > patience:
                break
        return AttemptOutcome.NOT_OURS if self._engine_died.is_set() else AttemptOutcome.PUT_BACK

    async def _may_begin(self, patience: float) -> bool:
        """Wait until a job may begin; return False if this worker does not serve by `patience`
        (monotonic seconds), or within `ELSEWHERE_S` while another worker serves.
        """
        while True:
            if self._leaving:
                return False
            remaining = patience - time.monotonic()
            serves = await self._watch.may_begin(min(remaining, ELSEWHERE_S))
            if (
                serves
                or remaining <= ELSEWHERE_S
                or self._engine_died.is_set()
                or await self._another_serves()
            ):
                return serves

    async def _another_serves(self) -> bool:
        try:
            workers = await self._ledger.workers(self._ledger.settings.queue)
        except Unreachable:
            return False
        model = self._engine.info.name
        return any(
            worker.healthy and worker.model == model and worker.worker != self._worker
            for worker in workers
        )

    async def _run(self, claim: Claim) -> AttemptOutcome:
        task = asyncio.current_task()
        assert task is not None, "run_job runs as a task"
        progress = AttemptProgress(claim, self._worker, self.totals)
        receipts = ReceiptReader(self._ledger, claim.job.id, self._engine.world)
        attempt = Attempt(claim.job, claim.attempt, task, progress, receipts)
        self._begun.add(attempt)
        job_id = claim.job.id
        # of this worker, which lost its lease in a stall
        if (earlier := self._running.get(job_id)) is not None:
            earlier.stop(AttemptOutcome.LOST)
        self._running[job_id] = attempt
        if job_id in self._unwanted:
            attempt.stop(AttemptOutcome.CANCELLED)
        if self._leaving:
            attempt.stop(AttemptOutcome.STOPPED)
        crash_point("worker.claimed")
        try:
            outcome = await self._perform(attempt)
            attempt.progress.outcome = outcome
            return outcome
        finally:
            attempt.progress.close()
            self._begun.discard(attempt)
            if self._running.get(job_id) is attempt:
                del self._running[job_id]
            if (ended := self._runs[attempt.job.kind].ended) is not None:
                await ended(attempt.job)

    async def _claim(self, job_id: str) -> Claim | None:
        """Returns the claimed job, or None when there is nothing to run.

        Raises JobFailed for a job that cannot be read, and ClaimRefused.
        """
        self._claiming += 1
        try:
            return await self._ledger.claim(
                job_id,
                self._worker,
                self._boot,
                self._engine.world,
                self._engine.info.identity,
                unreachable=self._unreachable(),
                crowded=self._bench.side_jobs > MOST_SIDE_JOBS,
            )
        except (ClaimRefused, Unreachable):
            raise
        except MidstreamError as error:
            if error.kind == "not_found":  # deleted, or lost in a crash of Redis
                logger.warning("message for %s, which is not in the ledger", job_id)
                return None
            problem = error.problem()
            # The claim may have succeeded nevertheless: end the job, for those who wait for it.
            view = await patiently(self._ledger.view, job_id)
            if view.worker == self._worker and job_id not in self._running:
                await patiently(self._ledger.fail, job_id, view.attempt, problem)
            raise JobFailed(f"{job_id}: {error}") from error
        finally:
            self._claiming -= 1

    async def _perform(self, attempt: Attempt) -> AttemptOutcome:
        try:
            check_lengths(attempt.job, self._engine.info)
            attempt.inputs = await self._inputs_of(attempt.job)
            if (outputs := await self._runs[attempt.job.kind].work(attempt)) is None:
                attempt.closed = True
                return AttemptOutcome.HANDED_ON
            attempt.check()
            crash_point("worker.generated")
            began = now()
            stored = await patiently(
                self._ledger.store_outputs,
                attempt.job.id,
                attempt.number,
                outputs,
                attempt.last,
                attempt.emitted,
            )
            attempt.closed = True
            crash_point("worker.stored")
            attempt.progress.stored(stored, attempt.reported, began)
            if stored is None:
                return AttemptOutcome.LOST
            return (
                AttemptOutcome.SUCCEEDED if stored is State.SUCCEEDED else AttemptOutcome.GENERATED
            )
        except asyncio.CancelledError:
            if attempt.ending is None:
                raise  # the event loop itself is going down
            return await self._abandon(attempt, attempt.ending)
        except (Exception, BaseExceptionGroup) as error:
            if attempt.ending is not None:
                logger.info(
                    "job %s attempt %d failed while it was being stopped: %r",
                    attempt.job.id,
                    attempt.number,
                    error,
                )
                return await self._abandon(attempt, attempt.ending)
            if (ending := ending_for_retry(error)) is not None:
                attempt.detail = str(error)
                if not self._engine_died.is_set():
                    # the job's other prompts still run
                    await self._engine.abort(attempt.job.id, attempt.number)
                return await self._abandon(attempt, ending)
            attempt.closed = True
            return await self._give_up(attempt, problem_of(error))

    async def _inputs_of(self, job: Job) -> Mapping[str, bytes]:
        try:
            return await self._inputs.read(job)
        except OSError as error:
            raise StoreUnavailable(f"the job's tensors cannot be read: {error}") from error

    async def _abandon(self, attempt: Attempt, ending: AttemptOutcome) -> AttemptOutcome:
        """Stop the attempt in the engine, and record its ending in the ledger."""
        attempt.closed = True
        # A task that cancelled itself gets a CancelledError at its next await, despite `uncancel`.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while attempt.task.cancelling():
            attempt.task.uncancel()
        logger.info("job %s attempt %d stops: %s", attempt.job.id, attempt.number, ending)
        ledger = self._ledger
        job_id = attempt.job.id
        number = attempt.number
        # An attempt with another ending is recorded by those who ended it.
        records: dict[AttemptOutcome, Callable[[], Awaitable[object]]] = {
            AttemptOutcome.RELEASED: lambda: patiently(ledger.release, job_id, number),
            AttemptOutcome.STOPPED: lambda: patiently(ledger.release, job_id, number, stopped=True),
            AttemptOutcome.STORE_UNAVAILABLE: lambda: patiently(
                ledger.release, job_id, number, unreachable=attempt.detail
            ),
            AttemptOutcome.BUSY: lambda: patiently(ledger.release, job_id, number, later=True),
            AttemptOutcome.OUT_OF_STEP: lambda: patiently(
                ledger.desync_release, job_id, number, attempt.detail
            ),
            AttemptOutcome.CANCELLED: lambda: patiently(ledger.finish_cancel, job_id, number),
        }
        if ending is not AttemptOutcome.RELEASED:
            await self._engine.abort(job_id, number)
        if ending is AttemptOutcome.CANCELLED:
            crash_point("worker.aborted")
        if ending in records:
            await records[ending]()
        if ending is AttemptOutcome.RELEASED:
            crash_point("worker.released")
        return ending

    async def _give_up(self, attempt: Attempt, problem: Problem) -> AttemptOutcome:
        """End the job with a problem; if the engine died, release it to another attempt instead."""
        if problem.type.endswith(":engine_failed") and await self._engine_is_dead():
            return await self._abandon(attempt, AttemptOutcome.RELEASED)
        await self._engine.abort(attempt.job.id, attempt.number)
        await patiently(self._ledger.fail, attempt.job.id, attempt.number, problem)
        raise JobFailed(f"{problem.title}: {problem.detail}")

    async def _engine_is_dead(self) -> bool:
        try:
            await asyncio.wait_for(self._engine_died.wait(), VERDICT_S)
        except TimeoutError:
            return False
        return True


def problem_of(error: BaseException) -> Problem:
    """Returns the typed problem behind an exception; for a group, that of its first MidstreamError,
    else of its first exception.
    """
    leaves = list(leaves_of(error))
    for leaf in leaves:
        if isinstance(leaf, MidstreamError):
            return leaf.problem()
    logger.error("unexpected %s while running a job", type(leaves[0]).__name__, exc_info=leaves[0])
    return MidstreamError("internal", f"{type(leaves[0]).__name__}: {leaves[0]}").problem()
