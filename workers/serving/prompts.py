"""Jobs that answer prompts, on a vLLM worker; and what jobs of every kind need there."""

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from itertools import accumulate

import msgspec

from ...broker.ledger.jobs.ledger import Ledger
from ...schemas.artifacts.probes import TokenScores
from ...schemas.base.errors import MidstreamError
from ...schemas.jobs.jobs import Event, Job, Output
from ...schemas.prompts.images import digest_of
from ...schemas.requests.source_runs import ZEROS, is_row, runs_named
from ..engine.protocol import Engine, GeneratingEngine, NewOutput, StoredArtifact
from ..engine.requests import format_request, prompt_request, tensors_of
from .attempt import Attempt, Bench, Run

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


async def answer_prompts(bench: Bench[GeneratingEngine], attempt: Attempt) -> list[Output]:
    """Run a job of prompts, with the artifacts, tensors and source runs that it names."""
    async with holding_artifacts(bench.engine, attempt.job):
        return await _answer_all(bench, attempt)


def run(bench: Bench[GeneratingEngine]) -> Run:
    """Return what runs jobs that answer their prompts, and no more."""
    return Run(lambda attempt: answer_prompts(bench, attempt))


async def _answer_all(bench: Bench[GeneratingEngine], attempt: Attempt) -> list[Output]:
    job = attempt.job
    engine = bench.engine
    await engine.check(format_request(job, job.sampling))
    steered = {name for entries in job.steering for entry in entries for name in entry.tensors}
    names = sorted(
        {name for name in steered if not is_row(name) and name != ZEROS} | tensors_of(job)
    )
    files = {
        image.digest: await _image(bench, image.digest)
        for prompt in job.prompts
        for image in prompt.images
    }
    async with (
        bench.sources.holding(job.id, runs_named(steered), job.runs),
        engine.holding_vectors(names, bench.fetch, users=job.steering),
    ):
        attempt.check()
        return await answers(bench.ledger, engine, attempt, files)


async def _image(bench: Bench[GeneratingEngine], name: str) -> bytes:
    data = await bench.blob(name)
    if data is None or digest_of(data) != name:
        raise MidstreamError(
            "internal",
            f"image {name[:12]} is no longer stored, or its content does not match its hash",
        )
    return data


@asynccontextmanager
async def holding_artifacts(engine: GeneratingEngine, job: Job) -> AsyncIterator[None]:
    """Hold the job's registered artifacts on the ranks, kind by kind, inside the block."""
    async with AsyncExitStack() as held:
        for artifacts in _artifacts_of(job):
            await held.enter_async_context(engine.holding_artifacts(artifacts))
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
