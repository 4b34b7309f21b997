"""Attempts: a worker takes one job from claim to stored outputs, through failures in between.

Every outcome is written to the ledger: outputs, a typed problem, a cancellation, or a release to
another attempt. The ledger rejects writes of an attempt that lost its lease.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from types import MappingProxyType

import msgspec

from ...broker.ledger.jobs.ledger import Claim, ClaimRefused, EventsLost, Ledger
from ...broker.ledger.recovery.harvests import PARTS_PER_WORKER, Harvests
from ...schemas.artifacts.probes import TokenScores, label_starts
from ...schemas.base.errors import MidstreamError, Problem
from ...schemas.base.faults import crash_point
from ...schemas.base.records import now
from ...schemas.base.tensors import Tensor, content_hash
from ...schemas.jobs.jobs import Event, Job, Outcome, Output, State
from ...schemas.prompts.images import digest_of
from ...schemas.requests.harvest_work import SHARDS_AT_ONCE
from ...schemas.requests.source_runs import ZEROS, is_row, runs_named
from ...schemas.requests.steering import GlobalSteering
from ..engine.admission import CellSlots, CrowdedOut
from ..engine.doses import measure
from ..engine.protocol import Engine, Fetch, NotYet, Progress, StoredArtifact, check_lengths
from ..engine.ranks.collective import Quarantined
from ..engine.requests import format_request, prompt_request, tensors_of
from .attempt import Attempt, AttemptOutcome, JobFailed, StoreUnavailable
from .harvests.attempt import HarvestAttempt
from .progress import AttemptProgress, Totals
from .receipts import ReceiptReader
from .redis_retry import UNAVAILABLE, patiently
from .source_run_leases import SourceRunLeases
from .steering import SteeringReconciler
from .steering_leases import SteeringLease
from .sweeps.attempt import SweepAttempt

logger = logging.getLogger(__name__)

#: Runs a claimed job of a kind to its outputs; None: it has handed the job on to another queue.
Work = Callable[[Ledger, Engine, Attempt, Fetch], Awaitable[Outcome | None]]

#: A request may see the engine's death before the watch on the engine does: wait this long for the
#: watch.
VERDICT_S = 5.0
#: A job's message waits this long for the worker to serve; then it goes back to the queue.
CLAIM_PATIENCE_S = 20.0
#: If another worker serves the model, the message goes back after this time instead.
ELSEWHERE_S = 1.0
REDIS_PAUSE_S = 0.5
#: Cancelled jobs that a worker remembers although it does not run them.
UNWANTED = 256
#: While other jobs run, a sweep's or harvest's limit of requests in the engine is divided by this.
SHARED_DIVISOR = 16


class Attempts:
    """The attempts that this worker holds. Used from the engine's event loop only."""

    def __init__(
        self,
        ledger: Ledger,
        engine: Engine,
        reconciler: SteeringReconciler,
        worker: str,
        boot: str,
        engine_died: asyncio.Event,
        unreachable: Callable[[], str] = lambda: "",
        works: Mapping[str, Work] = MappingProxyType({}),
    ):
        """`unreachable` returns why the artifact store takes no writes; empty while it does.

        `works`: kind of job → what runs it here, instead of the engine's requests.
        """
        self._ledger = ledger
        self._engine = engine
        self._works = works
        self._reconciler = reconciler
        reconciler.stop_runs = self._stop_reported
        self._worker = worker
        self._boot = boot
        self._engine_died = engine_died
        self._unreachable = unreachable
        self._running: dict[str, Attempt] = {}
        #: Cancelled jobs that do not run here; the answer to their claim may still arrive.
        self._unwanted: deque[str] = deque(maxlen=UNWANTED)
        self.sources = SourceRunLeases(ledger, engine, worker)
        self._cells = CellSlots(self._cells_at_once)  # of all sweeps
        self._harvests = Harvests(ledger)
        #: Parts of harvests and surveys that run or are about to run, by whether they are surveys.
        self._parts = Counter[bool]()
        self._sequences = CellSlots(self._sequences_at_once)  # of all harvests
        self._shards = asyncio.Semaphore(SHARDS_AT_ONCE)
        self.totals = Totals()

    @property
    def held(self) -> dict[str, int]:
        """Job id → number of its attempt, for the renewal of leases."""
        return {job_id: attempt.number for job_id, attempt in self._running.items()}

    def _cells_at_once(self) -> int:
        """Returns how many cells may be in the engine: few while other jobs run, because a step
        with an ordinary request in it computes every cell from the first layer.
        """
        limit = self._ledger.settings.tuning.sweep_cells_in_flight
        alone = all(attempt.job.sweep is not None for attempt in self._running.values())
        return limit if alone else max(1, limit // SHARED_DIVISOR)

    def _sequences_at_once(self) -> int:
        """Returns how many sequences may be in the engine: few while other jobs run, which get
        most of each step.
        """
        limit = self._ledger.settings.tuning.harvest_requests_in_flight
        alone = all(attempt.job.harvest is not None for attempt in self._running.values())
        return limit if alone else max(1, limit // SHARED_DIVISOR)

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

    def _stop_reported(self, why: str) -> None:
        """Stop attempts that expect receipts: while the ranks disagree, results are unreliable."""
        for attempt in self._running.values():
            if attempt.reported:
                attempt.stop(AttemptOutcome.OUT_OF_STEP, why)

    async def drain(self) -> None:
        """Wait until every attempt is over."""
        while self._running:
            await asyncio.wait([attempt.task for attempt in self._running.values()])

    async def run_part(self, job_id: str) -> AttemptOutcome:
        """Run a part of a harvest like `run_job`; put it back while `PARTS_PER_WORKER` run here.
        Surveys take no part's place: as many may be here, and the ledger keeps the others.
        """
        surveys = await patiently(lambda: self._harvests.surveys(job_id), f"look at {job_id}")
        if not surveys and self._parts[surveys] >= PARTS_PER_WORKER:
            await asyncio.sleep(ELSEWHERE_S)
            return AttemptOutcome.PUT_BACK
        self._parts[surveys] += 1
        try:
            return await self.run_job(job_id)
        finally:
            self._parts[surveys] -= 1

    async def run_job(self, job_id: str) -> AttemptOutcome:
        """Claim and run a job. Raises JobFailed when it ended with a problem."""
        crash_point("worker.received")
        patience = time.monotonic() + CLAIM_PATIENCE_S
        while not self._engine_died.is_set():
            lease = await self._lease(patience)
            if lease is None:
                break
            try:
                claim = await self._claim(job_id, lease.steering)
                return AttemptOutcome.NOT_OURS if claim is None else await self._run(claim, lease)
            except ClaimRefused as error:
                logger.info("job %s waiting: %s", job_id, error)
            except MidstreamError as error:
                if error.kind != UNAVAILABLE:
                    raise
                logger.warning("claim of %s waiting for Redis: %s", job_id, error)
                await asyncio.sleep(REDIS_PAUSE_S)
                patience = time.monotonic() + CLAIM_PATIENCE_S
            finally:
                lease.end()
            if time.monotonic() > patience:
                break
            await self._reconciler.catch_up(patience - time.monotonic())
        return AttemptOutcome.NOT_OURS if self._engine_died.is_set() else AttemptOutcome.PUT_BACK

    async def _lease(self, patience: float) -> SteeringLease | None:
        """Returns a steering lease; None if this worker does not serve by `patience` (monotonic
        seconds), or within `ELSEWHERE_S` while another worker serves.
        """
        while True:
            remaining = patience - time.monotonic()
            lease = await self._reconciler.lease(min(remaining, ELSEWHERE_S))
            if (
                lease is not None
                or remaining <= ELSEWHERE_S
                or self._engine_died.is_set()
                or await self._another_serves()
            ):
                return lease

    async def _another_serves(self) -> bool:
        try:
            workers = await self._ledger.workers(self._ledger.settings.queue)
        except MidstreamError as error:
            if error.kind != UNAVAILABLE:
                raise
            return False
        model = self._engine.info.name
        return any(
            worker.healthy and worker.model == model and worker.worker != self._worker
            for worker in workers
        )

    async def _run(self, claim: Claim, lease: SteeringLease) -> AttemptOutcome:
        task = asyncio.current_task()
        assert task is not None, "run_job runs as a task"
        attempt = Attempt(
            claim.job,
            claim.attempt,
            task,
            lease,
            AttemptProgress(claim, self._worker, self.totals),
            ReceiptReader(self._ledger, claim.job.id, self._engine.world),
        )
        if not attempt.reported:
            lease.end()  # a resync need not wait for this attempt
        job_id = claim.job.id
        earlier = self._running.get(job_id)
        if earlier is not None:  # of this worker, which lost its lease in a stall
            earlier.stop(AttemptOutcome.LOST)
        self._running[job_id] = attempt
        if job_id in self._unwanted:
            attempt.stop(AttemptOutcome.CANCELLED)
        crash_point("worker.claimed")
        try:
            outcome = await self._perform(attempt)
            attempt.progress.set_outcome(outcome)
            return outcome
        finally:
            attempt.progress.close()
            if self._running.get(job_id) is attempt:
                del self._running[job_id]
            if attempt.job.harvest is not None:
                await self._advance(attempt.job.harvest.harvest)

    async def _advance(self, harvest_id: str) -> None:
        """Submit what follows a part; if that fails, the reaper does it."""
        try:
            await self._harvests.advance(harvest_id)
        except MidstreamError as error:
            logger.warning("harvest %s: %s", harvest_id, error)

    async def _claim(self, job_id: str, global_steering: GlobalSteering) -> Claim | None:
        """Returns the claimed job, or None when there is nothing to run.

        Raises JobFailed for a job that cannot be read, and ClaimRefused.
        """
        try:
            return await self._ledger.claim(
                job_id,
                self._worker,
                self._boot,
                self._engine.world,
                self._engine.info.identity,
                global_version=global_steering.version,
                everyone=bool(global_steering.entries),
                unreachable=self._unreachable(),
                crowded=self._parts[True] > PARTS_PER_WORKER,
            )
        except MidstreamError as error:
            if isinstance(error, ClaimRefused) or error.kind == UNAVAILABLE:
                raise
            if error.kind == "not_found":  # deleted, or lost in a crash of Redis
                logger.warning("message for %s, which is not in the ledger", job_id)
                return None
            problem = error.problem()
            # The claim may have succeeded nevertheless: end the job, for those who wait for it.
            view = await patiently(lambda: self._ledger.view(job_id), f"view of {job_id}")
            if view.worker == self._worker and job_id not in self._running:
                await patiently(
                    lambda: self._ledger.fail(job_id, view.attempt, problem), f"failure of {job_id}"
                )
            raise JobFailed(f"{job_id}: {error}") from error

    async def _perform(self, attempt: Attempt) -> AttemptOutcome:
        try:
            check_lengths(attempt.job, self._engine.info)
            async with self._artifacts(attempt.job):
                outputs = await self._work(attempt)
            if outputs is None:
                attempt.closed = True
                return AttemptOutcome.HANDED_ON
            attempt.check()
            crash_point("worker.generated")
            began = now()
            stored = await patiently(
                lambda: self._ledger.store_outputs(
                    attempt.job.id, attempt.number, outputs, attempt.last, attempt.emitted
                ),
                f"outputs of {attempt.job.id}",
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
            if (ending := _ending_for_retry(error)) is not None:
                attempt.detail = str(error)
                if not self._engine_died.is_set():
                    # the job's other prompts still run
                    await self._engine.abort(attempt.job.id, attempt.number)
                return await self._abandon(attempt, ending)
            attempt.closed = True
            return await self._give_up(attempt, problem_of(error))

    @asynccontextmanager
    async def _artifacts(self, job: Job) -> AsyncIterator[None]:
        """Hold the job's registered artifacts on the ranks, kind by kind, inside the block."""
        async with contextlib.AsyncExitStack() as held:
            for artifacts in _artifacts_of(job):
                await self._engine.hold_artifacts(artifacts)
                held.push_async_callback(self._engine.release_artifacts, artifacts)
            yield

    async def _generate(self, attempt: Attempt) -> list[Output]:
        """Run all prompts of the job concurrently: the engine batches them with each other and with
        other jobs.
        """
        job = attempt.job
        await self._engine.check(format_request(job, job.sampling))
        steered = {name for entries in job.steering for entry in entries for name in entry.tensors}
        names = sorted(
            {name for name in steered if not is_row(name) and name != ZEROS}
            | tensors_of(job, attempt.lease.steering)
        )
        files = {
            image.digest: await self._fetch_image(image.digest)
            for prompt in job.prompts
            for image in prompt.images
        }
        async with self.sources.holding(job.id, runs_named(steered), job.runs):
            await self._engine.hold_vectors(names, self._fetch, users=job.steering)
            try:
                attempt.check()
                async with asyncio.TaskGroup() as group:
                    outputs = [
                        group.create_task(self._prompt(attempt, request, files))
                        for request in range(len(job.prompts))
                    ]
            finally:
                await self._engine.release_vectors(names)
        return [output.result() for output in outputs]

    async def _work(self, attempt: Attempt) -> Outcome | None:
        if (work := self._works.get(attempt.job.kind)) is not None:
            return await work(self._ledger, self._engine, attempt, self._fetch)
        if attempt.job.harvest is not None:
            return await self._harvest(attempt)
        if attempt.job.sweep is not None:
            return await self._sweep(attempt)
        outputs = await self._generate(attempt)
        return outputs if attempt.job.dose is None else measure(attempt.job.dose, outputs)

    async def _harvest(self, attempt: Attempt) -> list[Output]:
        """Run a part of a harvest; the part stores its results itself, so there are no outputs."""

        await HarvestAttempt(
            self._ledger,
            self._engine,
            attempt,
            self._sequences,
            self._shards,
            self._fetch,
            attempt.refused,
        ).run()
        return []

    async def _sweep(self, attempt: Attempt) -> list[Output]:
        """Run a sweep; it stores its cells itself, so there are no outputs."""
        await SweepAttempt(
            self._ledger,
            self._engine,
            self.sources,
            attempt,
            self._cells,
            self._fetch,
            attempt.refused,
        ).run()
        return []

    async def _prompt(self, attempt: Attempt, request: int, files: Mapping[str, bytes]) -> Output:
        output: Output | None = None
        ask = prompt_request(
            attempt.job, request, attempt.number, attempt.progress.span.traceparent, files
        )
        with attempt.progress.prompt(request, len(ask.token_ids)) as report:
            async with aclosing(attempt.submit(self._engine, ask)) as stream:
                async for progress in stream:
                    attempt.check()
                    report.add_generated(len(progress.token_ids))
                    output = progress.finished
                    for event in (
                        score_events(progress, attempt.job, attempt.number)
                        if attempt.job.stream
                        else ()
                    ):
                        await attempt.emit(self._ledger, event)
                    if attempt.job.stream and (progress.text or progress.token_ids or output):
                        await attempt.emit(self._ledger, _token_event(progress, attempt.number))
        if output is None:
            raise MidstreamError(
                "engine_failed", f"the engine ended prompt {request} without an output"
            )
        event = Event(event="output", data={"index": request}, attempt=attempt.number)
        attempt.finished += 1
        if attempt.finished == len(attempt.job.prompts):
            attempt.last = event  # stored together with the outputs
        else:
            await attempt.emit(self._ledger, event)
        return output

    async def _fetch(self, name: str) -> Tensor:
        tensor = await patiently(lambda: self._ledger.get_tensor(name), f"vector {name[:12]}")
        if content_hash(tensor) != name:
            raise MidstreamError(
                "intervention_failed", f"vector {name[:12]}: content does not match its hash"
            )
        return tensor

    async def _fetch_image(self, name: str) -> bytes:
        data = await patiently(lambda: self._ledger.get_blob(name), f"image {name[:12]}")
        if data is None or digest_of(data) != name:
            raise MidstreamError(
                "internal",
                f"image {name[:12]} is no longer stored, or its content does not match its hash",
            )
        return data

    async def _abandon(self, attempt: Attempt, ending: AttemptOutcome) -> AttemptOutcome:
        """Stop the attempt in the engine, and record its ending in the ledger."""
        attempt.closed = True
        # A task that cancelled itself gets a CancelledError at its next await, despite `uncancel`.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(0)
        while attempt.task.cancelling():
            attempt.task.uncancel()
        logger.info("job %s attempt %d stops: %s", attempt.job.id, attempt.number, ending)
        ledger, job_id, number = self._ledger, attempt.job.id, attempt.number
        # An attempt with another ending is recorded by those who ended it.
        records: dict[AttemptOutcome, Callable[[], Awaitable[object]]] = {
            AttemptOutcome.RELEASED: lambda: ledger.release(job_id, number),
            AttemptOutcome.STORE_UNAVAILABLE: lambda: ledger.release(
                job_id, number, unreachable=attempt.detail
            ),
            AttemptOutcome.BUSY: lambda: ledger.release(job_id, number, later=True),
            AttemptOutcome.OUT_OF_STEP: lambda: ledger.desync_release(
                job_id, number, attempt.detail
            ),
            AttemptOutcome.CANCELLED: lambda: ledger.finish_cancel(job_id, number),
        }
        if ending is not AttemptOutcome.RELEASED:
            await self._engine.abort(job_id, number)
        if ending is AttemptOutcome.CANCELLED:
            crash_point("worker.aborted")
        if ending in records:
            what = "cancel" if ending is AttemptOutcome.CANCELLED else "release"
            await patiently(records[ending], f"{what} of {job_id}")
        if ending is AttemptOutcome.RELEASED:
            crash_point("worker.released")
        return ending

    async def _give_up(self, attempt: Attempt, problem: Problem) -> AttemptOutcome:
        """End the job with a problem; if the engine died, release it to another attempt instead."""
        if problem.type.endswith(":engine_failed") and await self._engine_is_dead():
            return await self._abandon(attempt, AttemptOutcome.RELEASED)
        await self._engine.abort(attempt.job.id, attempt.number)
        await patiently(
            lambda: self._ledger.fail(attempt.job.id, attempt.number, problem),
            f"failure of {attempt.job.id}",
        )
        raise JobFailed(f"{problem.title}: {problem.detail}")

    async def _engine_is_dead(self) -> bool:
        try:
            await asyncio.wait_for(self._engine_died.wait(), VERDICT_S)
        except TimeoutError:
            return False
        return True


def _artifacts_of(job: Job) -> list[Sequence[StoredArtifact]]:
    """Return the artifacts that ranks hold for the job: its adapter, then those of its readings.
    All jobs take the kinds in this order, so that no two wait for each other's space.
    """
    readings = (capture.reading for captures in job.captures for capture in captures)
    of_readings = {
        reading.artifact.digest: reading.artifact
        for reading in readings
        if reading is not None and reading.artifact is not None
    }
    adapters = [] if job.lora is None else [job.lora]
    return [artifacts for artifacts in (adapters, list(of_readings.values())) if artifacts]


def _ending_for_retry(error: BaseException) -> AttemptOutcome | None:
    """Return how an attempt ends whose failure was not the job's fault, so that another attempt
    follows; None if it was."""
    leaves = list(_leaves(error))
    if any(isinstance(leaf, Quarantined) for leaf in leaves):
        return AttemptOutcome.OUT_OF_STEP
    if any(isinstance(leaf, StoreUnavailable) for leaf in leaves):
        return AttemptOutcome.STORE_UNAVAILABLE
    if any(isinstance(leaf, NotYet) for leaf in leaves):
        return AttemptOutcome.BUSY
    return (
        AttemptOutcome.RELEASED
        if any(isinstance(leaf, CrowdedOut | EventsLost) for leaf in leaves)
        else None
    )


def problem_of(error: BaseException) -> Problem:
    """Returns the typed problem behind an exception; for a group, that of its first MidstreamError,
    else of its first exception.
    """
    leaves = list(_leaves(error))
    for leaf in leaves:
        if isinstance(leaf, MidstreamError):
            return leaf.problem()
    logger.error("unexpected %s while running a job", type(leaves[0]).__name__, exc_info=leaves[0])
    return MidstreamError("internal", f"{type(leaves[0]).__name__}: {leaves[0]}").problem()


def _leaves(error: BaseException) -> Iterable[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def score_events(progress: Progress, job: Job, attempt: int) -> list[Event]:
    """Return one event per token in `progress`, with the scores of the probes that the job named;
    policies' are left out.
    """
    named = [
        (probe, start)
        for probe, start in zip(job.probes, label_starts(job.probes), strict=True)
        if probe.policy is None
    ]

    def by_label(values: Sequence[float]) -> dict[str, dict[str, float]]:
        return {
            probe.name: dict(zip(probe.content.labels, values[start:], strict=False))
            for probe, start in named
        }

    scores = (
        TokenScores(
            index=progress.request,
            position=score.position,
            scores=by_label(score.scores),
            aggregates=by_label(score.aggregates),
        )
        for score in progress.scores
    )
    return [
        Event(event="score", data=msgspec.structs.asdict(score), attempt=attempt)
        for score in scores
    ]


def _token_event(progress: Progress, attempt: int) -> Event:
    data = {
        "index": progress.request,
        "text": progress.text,
        "token_ids": progress.token_ids,
        "finish_reason": progress.finished.finish_reason if progress.finished else None,
    }
    if progress.said is not None:
        data["delta"] = msgspec.to_builtins(progress.said)
    if progress.logprobs:
        data["logprobs"] = msgspec.to_builtins(progress.logprobs)
    if progress.prompt is not None:
        data["prompt"] = msgspec.to_builtins(progress.prompt)
    return Event(event="token", data=data, attempt=attempt)
