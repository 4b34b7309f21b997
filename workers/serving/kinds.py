"""The kinds of jobs that a vLLM worker runs."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import accumulate

import msgspec

from ...broker.ledger.jobs.ledger import Ledger
from ...broker.ledger.recovery.harvests import LedgerHarvests
from ...schemas.artifacts.probes import TokenScores
from ...schemas.base import MidstreamError
from ...schemas.jobs.doses import DoseResult
from ...schemas.jobs.harvest_names import PARTS_PER_WORKER
from ...schemas.jobs.jobs import Event, Job, Output
from ...schemas.jobs.works import DoseWork, HarvestWork, SweepWork
from ...schemas.prompts.images import digest_of
from ...schemas.requests.harvest_work import SHARDS_AT_ONCE
from ...schemas.requests.source_runs import ZEROS, is_row, runs_named
from ..engine.doses import measure
from ..engine.protocol import Engine, GeneratingEngine, NewOutput, StoredArtifact
from ..engine.requests import format_request, prompt_request, tensors_of
from .attempt import Attempt, Bench, Run
from .harvests.attempt import HarvestAttempt
from .redis_retry import patiently
from .source_run_leases import SourceRunLeases
from .sweeps.attempt import SweepAttempt

logger = logging.getLogger(__name__)


async def answers(
    ledger: Ledger, engine: Engine, attempt: Attempt, files: Mapping[str, bytes] | None = None
) -> list[Output]:
    """Run all prompts of the job concurrently: the engine batches them with each other and with
    other jobs. `files`: the job's images by their digests.
    """
    async with asyncio.TaskGroup() as group:
        outputs = [
            group.create_task(_answer(ledger, engine, attempt, request, files))
            for request in range(len(attempt.job.prompts))
        ]
    return [output.result() for output in outputs]


async def _answer(
    ledger: Ledger,
    engine: Engine,
    attempt: Attempt,
    request: int,
    files: Mapping[str, bytes] | None,
) -> Output:
    output: Output | None = None
    ask = prompt_request(
        attempt.job, request, attempt.number, attempt.progress.span.traceparent, files
    )
    with attempt.progress.prompt(request, len(ask.token_ids)) as report:
        async with aclosing(engine.generate(ask)) as stream:
            async for progress in stream:
                attempt.check()
                report.add_generated(len(progress.token_ids))
                output = progress.finished
                if not attempt.job.stream:
                    continue
                for event in score_events(progress, attempt.job, attempt.number):
                    await attempt.emit(ledger, event)
                if progress.text or progress.token_ids or output:
                    await attempt.emit(ledger, _token_event(progress, attempt.number))
    if output is None:
        raise MidstreamError(
            "engine_failed", f"the engine ended prompt {request} without an output"
        )
    data = {"index": request, "first_token": report.first}
    event = Event(event="output", data=data, attempt=attempt.number)
    attempt.finished += 1
    if attempt.finished == len(attempt.job.prompts):
        attempt.last = event  # stored together with the outputs
    else:
        await attempt.emit(ledger, event)
    return output


async def answer_prompts(
    bench: Bench[GeneratingEngine], sources: SourceRunLeases, attempt: Attempt
) -> list[Output]:
    """Run a job of prompts, with the tensors and source runs that it names."""
    job = attempt.job
    engine = bench.engine
    await engine.check(format_request(job, job.sampling))
    steered = {name for entries in job.steering for entry in entries for name in entry.tensors}
    names = sorted(
        {name for name in steered if not is_row(name) and name != ZEROS} | tensors_of(job)
    )
    files = {
        image.digest: await _image(bench.ledger, image.digest)
        for prompt in job.prompts
        for image in prompt.images
    }
    async with sources.holding(job.id, runs_named(steered), job.runs):
        await engine.hold_vectors(names, bench.fetch, users=job.steering)
        try:
            attempt.check()
            return await answers(bench.ledger, engine, attempt, files)
        finally:
            await engine.release_vectors(names)


async def _image(ledger: Ledger, name: str) -> bytes:
    data = await patiently(lambda: ledger.get_blob(name), f"image {name[:12]}")
    if data is None or digest_of(data) != name:
        raise MidstreamError(
            "internal",
            f"image {name[:12]} is no longer stored, or its content does not match its hash",
        )
    return data


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
        surveys = await patiently(lambda: self._harvests.surveys(job_id), f"look at {job_id}")
        if not surveys and self._held >= PARTS_PER_WORKER:
            yield False
            return
        held, surveying = (0, 1) if surveys else (1, 0)
        self._bench.surveys += surveying
        self._held += held
        try:
            yield True
        finally:
            self._bench.surveys -= surveying
            self._held -= held

    async def ended(self, job: Job) -> None:
        """Submit what follows a part; if that fails, the reaper does it."""
        harvest_id = job.work_as(HarvestWork).part.harvest
        try:
            await self._harvests.advance(harvest_id)
        except MidstreamError as error:
            logger.warning("harvest %s: %s", harvest_id, error)


def runs_of(bench: Bench[GeneratingEngine]) -> dict[str, Run]:
    """Return kind of job → how a vLLM worker runs it."""
    tuning = bench.ledger.settings.tuning
    parts = _Parts(bench)
    sources = SourceRunLeases(bench.ledger, bench.engine, bench.worker)
    bench.renewals.append(sources.renew)
    cells = bench.slots(tuning.sweep_cells_in_flight, SweepWork)  # of all sweeps
    sequences = bench.slots(tuning.harvest_requests_in_flight, HarvestWork)  # of all harvests
    shards = asyncio.Semaphore(SHARDS_AT_ONCE)

    async def prompts(attempt: Attempt) -> list[Output]:
        async with _artifacts(bench.engine, attempt.job):
            return await answer_prompts(bench, sources, attempt)

    async def dose(attempt: Attempt) -> DoseResult:
        return measure(attempt.job.work_as(DoseWork).dose, await prompts(attempt))

    async def sweep(attempt: Attempt) -> list[Output]:
        async with _artifacts(bench.engine, attempt.job):
            await SweepAttempt(bench, sources, attempt, cells).run()
        return []  # its cells are stored

    async def part(attempt: Attempt) -> list[Output]:
        async with _artifacts(bench.engine, attempt.job):
            await HarvestAttempt(bench, attempt, sequences, shards).run()
        return []  # its results are stored

    return {
        **dict.fromkeys(("generate", "completion", "chat"), Run(prompts)),
        **dict.fromkeys(("sweep", "attribution"), Run(sweep)),
        "dose": Run(dose),
        "harvest": Run(part, parts.room, parts.ended),
    }


@asynccontextmanager
async def _artifacts(engine: GeneratingEngine, job: Job) -> AsyncIterator[None]:
    """Hold the job's registered artifacts on the ranks, kind by kind, inside the block."""
    async with AsyncExitStack() as held:
        for artifacts in _artifacts_of(job):
            await engine.hold_artifacts(artifacts)
            held.push_async_callback(engine.release_artifacts, artifacts)
        yield


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


def score_events(progress: NewOutput, job: Job, attempt: int) -> list[Event]:
    """Return one event per token in `progress`, with the scores of the probes that the job named;
    policies' are left out.
    """
    ends = accumulate(len(probe.content.labels) for probe in job.probes)
    named = [
        (probe, end - len(probe.content.labels))
        for probe, end in zip(job.probes, ends, strict=True)
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


def _token_event(progress: NewOutput, attempt: int) -> Event:
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
