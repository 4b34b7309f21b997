"""Does a run end rightly when the engine misbehaves? Real ledger, and an engine that misbehaves on
purpose.

And do jobs get the source runs that they are patched with, on two workers of two tensor-parallel
ranks in each of two pipeline stages, whatever becomes of processes and files?
"""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ledger_kit import enqueue, sent, worker_info
from midstream_fake_engine.engine import FakeEngine
from midstream_fake_engine.model import HIDDEN_SIZE, NUM_LAYERS, identity_of
from stack import Stack, stack_with
from wait_kit import holding, wait_until

from midstream.broker.ledger.core.reachable import Unreachable
from midstream.broker.ledger.jobs import inputs
from midstream.broker.ledger.jobs.ledger import Ledger, Renewal, new_job_id
from midstream.broker.ledger.named.source_runs import LedgerRuns
from midstream.broker.ledger.named.steering import LedgerSteering
from midstream.schemas.base.errors import MidstreamError
from midstream.schemas.base.records import now, to_msgpack
from midstream.schemas.base.tensors import content_hash, from_numpy
from midstream.schemas.jobs.jobs import Job, JobView, Output, Sampling, State, StoredPrompt
from midstream.schemas.prompts.selectors import HOOKS
from midstream.schemas.requests.source_runs import RunRow, RunView, row_name, run_key
from midstream.schemas.requests.specs import StoredCapture, StoredSteering
from midstream.schemas.requests.steering import SteeringTemplate
from midstream.schemas.settings.settings import Settings, load_settings
from midstream.workers.engine.prompts.format_check import FormatsBusy
from midstream.workers.engine.protocol import EngineRequest, NewOutput
from midstream.workers.engine.ranks.collective import Quarantined
from midstream.workers.serving.attempt import AttemptOutcome, JobFailed
from midstream.workers.serving.attempts import Attempts
from midstream.workers.serving.heartbeat import Heartbeat
from midstream.workers.serving.host import EngineHost
from midstream.workers.serving.rank_watch import RankWatch
from midstream.workers.serving.redis_retry import end_tasks

TENSOR = from_numpy(np.ones(HIDDEN_SIZE, np.float32))
VECTOR = content_hash(TENSOR)
PACKED = to_msgpack(TENSOR)
SHIFT = SteeringTemplate(
    layers=[1], hook="post_block", positions="all", family="add", tensors=[VECTOR]
)
#: Only ends what hangs.
TIMEOUT_S = 40


class Harness:
    """Attempts over a real ledger; a test replaces `engine.generate`."""

    def __init__(self, redis_url: str, directory: Path, **settings: Any):
        self.settings = load_settings(
            {},
            redis_url=redis_url,
            data_dir=str(directory),
            model="fake-model",
            worker_id="w1",
            engine="fake",
            relay_url="tcp://127.0.0.1:9",
            engine_options={"token_s": 0.01},
            **settings,
        )
        self.ledger = Ledger.connect(self.settings)
        self.engine = FakeEngine(self.settings)
        self.died = asyncio.Event()
        self.aborted: list[tuple[str, int]] = []
        self.engine.abort = self._abort  # type: ignore[method-assign]
        self.watch = RankWatch(
            LedgerSteering(self.ledger), self.engine, self.settings, "boot", self._tell
        )
        self.runs = Attempts(self.ledger, self.engine, self.watch, "w1", "boot", self.died)

    async def sent_again(self) -> list[tuple[str, int]]:
        """Job and attempts made of each message that a job was sent with after its first."""
        return [
            (message.job_id, message.attempt)
            for message in await sent(self.ledger, "fake-model")
            if message.attempt
        ]

    async def _tell(self) -> None:
        """Nobody has to know whether the worker serves."""

    async def _published(self) -> bool:
        return True

    async def _abort(self, job_id: str, attempt: int) -> None:
        self.aborted.append((job_id, attempt))

    async def submit(
        self, prompts: int = 1, max_tokens: int = 4, capture: bool = False, length: int = 2
    ) -> str:
        wanted = StoredCapture(sites={"post_block": [0]}, positions="last_prompt", tag="t")
        job = Job(
            id=new_job_id(),
            kind="generate",
            model="fake-model",
            prompts=[StoredPrompt(token_ids=[1] * length)] * prompts,
            sampling=Sampling(max_tokens=max_tokens),
            created=now(),
            captures=[[wanted]] * prompts if capture else [],
            identity=identity_of(self.settings),
        )
        await self.ledger.submit(job, {})
        return job.id

    async def running(self, job_id: str) -> "asyncio.Task[AttemptOutcome]":
        task = asyncio.create_task(self.runs.run_job(job_id))
        await holding(lambda: job_id in self.runs.held)
        return task

    async def view(self, job_id: str) -> JobView:
        return await self.ledger.view(job_id)


async def brought(at: Harness, monkeypatch: pytest.MonkeyPatch) -> Job:
    """An accepted job whose vector is in the artifact store."""
    monkeypatch.setattr(inputs, "LARGE", 1)
    job = Job(
        id=new_job_id(),
        kind="generate",
        model="fake-model",
        prompts=[StoredPrompt(token_ids=[1, 1])],
        sampling=Sampling(max_tokens=4),
        created=now(),
        steering=[[SHIFT.stored("all")]],
        identity=identity_of(at.settings),
    )
    store = inputs.LedgerInputs(at.ledger)
    await at.ledger.heartbeat(worker_info("w1", "boot", model="fake-model"))
    await store.sign("w1", "boot")
    async with store.kept(job, {VECTOR: PACKED}) as (kept, blobs):
        await at.ledger.submit(kept, blobs)
    assert await at.ledger.get_blob(VECTOR) is None
    return kept


@pytest.fixture
async def at(
    redis_url: str, tmp_path: Path, request: pytest.FixtureRequest
) -> AsyncIterator[Harness]:
    harness = Harness(redis_url, tmp_path, **getattr(request, "param", {}))
    await harness.engine.start()
    await harness.watch.start()
    yield harness
    await harness.engine.shutdown()
    await harness.ledger.close()


# field case 38
async def test_a_cancellation_that_something_swallowed_still_stops_the_run(at: Harness) -> None:
    async def deaf(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        with contextlib.suppress(asyncio.CancelledError):
            # once, or a failure of this test would never end
            await asyncio.sleep(60)
        while True:
            await asyncio.sleep(0.01)
            yield NewOutput(ask.request, "a", [1])

    at.engine.generate = deaf  # type: ignore[method-assign]
    job_id = await at.submit(prompts=2)
    task = await at.running(job_id)
    await at.ledger.request_cancel(job_id)
    at.runs.stop([job_id], AttemptOutcome.CANCELLED)
    assert await task is AttemptOutcome.CANCELLED
    assert (await at.view(job_id)).state is State.CANCELLED
    assert at.aborted == [(job_id, 1)]


# field case 21
async def test_one_failing_prompt_fails_the_job_and_stops_the_others(at: Harness) -> None:
    stopped: list[int] = []

    async def second_fails(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        if ask.request == 1:
            raise MidstreamError("capture_failed", "rank 0: no space")
        try:
            await asyncio.sleep(60)
        finally:
            stopped.append(ask.request)
        yield NewOutput(ask.request, "", [])

    at.engine.generate = second_fails  # type: ignore[method-assign]
    job_id = await at.submit(prompts=3)
    with pytest.raises(JobFailed, match="no space"):
        await at.runs.run_job(job_id)
    view = await at.view(job_id)
    assert view.state is State.FAILED
    assert view.error.type == "urn:midstream:capture_failed"
    assert sorted(stopped) == [0, 2]
    assert at.runs.held == {}


async def test_a_job_gets_what_it_brought_in_the_store_in_each_attempt(
    at: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await brought(at, monkeypatch)
    lost = await at.running(job.id)
    at.runs.stop([job.id], AttemptOutcome.RELEASED)
    assert await lost is AttemptOutcome.RELEASED
    other = Attempts(at.ledger, at.engine, at.watch, "w1", "boot", at.died)
    assert await other.run_job(job.id) is AttemptOutcome.GENERATED


@pytest.mark.parametrize("damage", ["gone", "changed"])
async def test_a_job_without_what_it_brought_fails_with_a_type(
    at: Harness, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    job = await brought(at, monkeypatch)
    path = Path(at.settings.artifacts) / inputs.FOLDER / job.id / "tensors"
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(JobFailed, match=job.id):
        await at.runs.run_job(job.id)
    assert (await at.view(job.id)).error.type == "urn:midstream:intervention_failed"


async def test_a_job_waits_for_the_store_that_has_what_it_brought(
    at: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = await brought(at, monkeypatch)
    path = Path(at.settings.artifacts) / inputs.FOLDER / job.id / "tensors"
    content = path.read_bytes()
    path.unlink()
    path.mkdir()  # which cannot be read
    assert await at.runs.run_job(job.id) is AttemptOutcome.STORE_UNAVAILABLE
    assert (await at.view(job.id)).state is State.QUEUED
    path.rmdir()
    path.write_bytes(content)
    assert await at.runs.run_job(job.id) is AttemptOutcome.GENERATED


@pytest.mark.parametrize("at", [{"engine.max_model_len": 8}], indirect=True)
async def test_a_prompt_accepted_for_a_longer_model_fails_with_its_length(at: Harness) -> None:
    """The worker was started again with a smaller `max_model_len` while the job waited."""
    job_id = await at.submit(length=30)
    with pytest.raises(JobFailed, match="max_model_len is 8"):
        await at.runs.run_job(job_id)
    error = (await at.view(job_id)).error
    assert error.type == "urn:midstream:prompt_too_long"
    assert error.field == "prompts[0]"


# field case 21
async def test_a_request_that_ends_without_output_fails_the_job(
    at: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.workers.serving.attempts.VERDICT_S", 0.05)

    async def silent(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        yield NewOutput(ask.request, "a", [1])

    at.engine.generate = silent  # type: ignore[method-assign]
    job_id = await at.submit()
    with pytest.raises(JobFailed, match="without an output"):
        await at.runs.run_job(job_id)
    assert (await at.view(job_id)).state is State.FAILED


async def test_jobs_of_a_dead_engine_are_released_and_resent(at: Harness) -> None:
    async def dying(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        raise MidstreamError("engine_failed", "gone")
        yield

    at.engine.generate = dying  # type: ignore[method-assign]
    job_id = await at.submit()
    task = await at.running(job_id)
    await asyncio.sleep(0.05)
    at.died.set()  # the verdict comes after the request saw the death
    assert await task is AttemptOutcome.RELEASED
    assert (await at.view(job_id)).state is State.QUEUED
    assert await at.sent_again() == [(job_id, 1)]
    assert await at.runs.run_job(job_id) is AttemptOutcome.NOT_OURS, "a dead engine claims nothing"


async def test_an_attempt_that_finds_redis_away_is_followed_by_another(at: Harness) -> None:
    async def asks_the_ledger(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        raise Unreachable("the job ledger is unavailable")
        yield

    at.engine.generate = asks_the_ledger  # type: ignore[method-assign]
    job_id = await at.submit(prompts=2)
    assert await at.runs.run_job(job_id) is AttemptOutcome.RELEASED
    assert await at.sent_again() == [(job_id, 1)]


async def test_a_worker_that_stops_begins_no_job(at: Harness) -> None:
    job_id = await at.submit(prompts=1)
    await at.runs.give_back(0)
    assert await at.runs.run_job(job_id) is AttemptOutcome.PUT_BACK
    assert (await at.ledger.view(job_id)).attempt == 0


# field case 38
async def test_a_job_that_may_not_wait_for_its_format_comes_again_later(
    at: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds no place of the worker meanwhile, and the attempt does not count."""
    busy = [True]

    async def check(engine: FakeEngine, ask: EngineRequest) -> None:
        if busy.pop():
            busy.append(True)
            raise FormatsBusy("2 jobs of the tenant wait")
        busy.append(False)

    monkeypatch.setattr(FakeEngine, "check", check)
    job_id = await at.submit()
    for _ in range(at.settings.max_attempts + 1):
        assert await at.runs.run_job(job_id) is AttemptOutcome.BUSY
        assert (await at.view(job_id)).state == State.QUEUED
        assert at.runs.held == {}
    assert await at.sent_again() == [], "it is sent when it is due"
    busy[:] = [False]
    assert await at.runs.run_job(job_id) is AttemptOutcome.SUCCEEDED


async def test_the_late_outputs_of_a_lost_attempt_change_nothing(at: Harness) -> None:
    job_id = await at.submit(max_tokens=20)
    task = await at.running(job_id)
    await at.ledger.release(job_id, 1)
    assert await at.ledger.claim(job_id, "w2", "boot", 1, identity_of(at.settings)) is not None
    assert await task is AttemptOutcome.LOST
    view = await at.view(job_id)
    assert view.state == State.RUNNING
    assert view.attempt == 2
    assert view.worker == "w2"
    assert (await at.ledger.result(job_id)).outputs == []


# field case 38
async def test_a_late_lost_notice_does_not_stop_the_next_attempt(at: Harness) -> None:
    beaten = asyncio.Event()

    async def lasting(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        if ask.attempt == 1:
            await asyncio.sleep(600)  # until the next one stops it
        await beaten.wait()
        yield NewOutput(
            ask.request, "a", [1], Output(ask.request, "a", [1], "length", len(ask.token_ids))
        )

    at.engine.generate = lasting  # type: ignore[method-assign]
    job_id = await at.submit()
    tasks = [await at.running(job_id)]
    heartbeat = Heartbeat(
        at.settings, at.runs, lambda: worker_info("w1", "boot"), at._tell, at._published
    )
    renew = heartbeat._ledger.renew

    async def late(worker: str, boot: str, held: Mapping[str, int]) -> Renewal:
        await at.ledger.release(job_id, 1)
        renewal = await renew(worker, boot, held)
        tasks.append(asyncio.create_task(at.runs.run_job(job_id)))
        await holding(lambda: at.runs.held.get(job_id) == 2)
        return renewal

    heartbeat._ledger.renew = late  # type: ignore[method-assign]
    await heartbeat.beat()
    await heartbeat.close()
    beaten.set()
    assert [await task for task in tasks] == [AttemptOutcome.LOST, AttemptOutcome.SUCCEEDED]
    view = await at.view(job_id)
    assert view.state == State.SUCCEEDED
    assert view.attempt == 2


async def test_when_ranks_disagree_only_the_affected_requests_run_again(at: Harness) -> None:
    captured = await at.submit(max_tokens=100, capture=True)
    plain = await at.submit(max_tokens=20)
    tasks = [await at.running(captured), await at.running(plain)]
    assert at.watch.stop_runs("rank 1 differs"), "until its end is recorded"
    assert await tasks[0] is AttemptOutcome.OUT_OF_STEP
    assert not at.watch.stop_runs("rank 1 differs")
    assert (await at.view(captured)).state is State.QUEUED
    assert await at.sent_again() == [(captured, 1)]
    assert at.aborted == [(captured, 1)]
    assert (await at.ledger.desync_release(captured, 1, "again")) is None, "its attempt is over"
    assert await tasks[1] is AttemptOutcome.SUCCEEDED


async def test_a_resync_waits_for_claims_and_for_attempts_under_global_steering(
    at: Harness,
) -> None:
    check = await LedgerSteering(at.ledger).open_check("fake-model", [SHIFT], {VECTOR: PACKED})
    await LedgerSteering(at.ledger).set_global("fake-model", check, [SHIFT])
    claim = at.ledger.claim
    asked = asyncio.Event()
    goes_on = asyncio.Event()

    async def slow(*arguments: Any, **options: Any) -> Any:
        claimed = await claim(*arguments, **options)
        asked.set()
        await goes_on.wait()
        return claimed

    at.ledger.claim = slow  # type: ignore[method-assign]
    task = asyncio.create_task(at.runs.run_job(await at.submit(max_tokens=100)))
    await asked.wait()
    assert at.watch.stop_runs("rank 1 differs")
    assert not at.runs.held
    goes_on.set()
    await holding(lambda: at.runs.held)
    assert at.watch.stop_runs("rank 1 differs")
    assert await task is AttemptOutcome.OUT_OF_STEP
    assert not at.watch.stop_runs("rank 1 differs")


async def test_a_possibly_desynced_rank_costs_one_attempt(at: Harness) -> None:
    async def unsure(ask: EngineRequest) -> AsyncGenerator[NewOutput, None]:
        raise Quarantined("rank 1 kept what it should have dropped")
        yield

    at.engine.generate = unsure  # type: ignore[method-assign]
    job_id = await at.submit()
    assert await at.runs.run_job(job_id) is AttemptOutcome.OUT_OF_STEP
    assert (await at.view(job_id)).state is State.QUEUED


async def test_a_job_waits_for_a_quarantined_worker_then_is_requeued(
    at: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("midstream.workers.serving.attempts.CLAIM_PATIENCE_S", 0.2)
    job_id = await at.submit()
    at.watch.quarantine("the ranks may differ")
    assert await at.runs.run_job(job_id) is AttemptOutcome.PUT_BACK
    assert (await at.view(job_id)).state == State.QUEUED
    assert (await at.view(job_id)).attempt == 0


async def test_a_task_that_swallows_a_cancellation_still_ends() -> None:
    async def deaf_once() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    task = asyncio.create_task(deaf_once())
    await asyncio.sleep(0)
    await asyncio.wait_for(end_tasks([task]), TIMEOUT_S)
    assert task.cancelled()


MODEL = "fake-model"
TEXT = "The Eiffel Tower is in the city of"


# One worker, of which a rank once fails to load a run; a second one comes later.
stack = stack_with(
    **{"engine.tensor_parallel_size": 2, "engine.pipeline_parallel_size": 2},
    engine_options={"token_s": 0.02},
    fault="put_run:rank=3,times=1",
    callbacks=False,
)


def make_run(stack: Stack, name: str) -> str:
    """The job whose captures, at every site and position, have this name from now on."""
    everywhere = StoredCapture(
        sites={hook: list(range(NUM_LAYERS)) for hook in HOOKS}, positions="all_prompt", tag="t"
    )
    job = stack.submit([TEXT], max_tokens=1, capture=everywhere, run=name)
    assert stack.wait(job).state is State.SUCCEEDED
    return job


def patch(job: str, layer: int = 2, position: int = 3) -> list[StoredSteering]:
    """A row of the run into the same place."""
    return [
        StoredSteering(
            layers=[layer],
            hook="post_block",
            positions=[position],
            family="replace",
            tensors=[row_name(RunRow(run_key(job, 0, "t"), "post_block", layer, position))],
            numbers=[1.0],
        ),
    ]


def patched(stack: Stack, name: str, job: str, *, max_tokens: int = 4, send: bool = True) -> str:
    return stack.submit(
        ["The Colosseum"], max_tokens=max_tokens, steering=patch(job), runs={name: job}, send=send
    )


def text(stack: Stack, job: str) -> str:
    """Of a job that must have succeeded, with every rank's word for it."""
    view = stack.wait(job)
    assert view.state is State.SUCCEEDED, view.error
    result = stack.result(job)
    assert result.determinism.consistent
    stage_0, stage_1 = result.determinism.stages
    assert [rank.applied for rank in (*stage_0.ranks, *stage_1.ranks)] == [0, 0, 1, 1], (
        "layer 2 is the second stage's"
    )
    return result.outputs[0].text


def refused(stack: Stack, job: str) -> tuple[str, str]:
    """The error of a job that must have failed without an output."""
    view = stack.wait(job)
    assert view.state is State.FAILED
    assert stack.result(job).outputs == []
    return view.error.type.removeprefix("urn:midstream:"), view.error.detail


def ended(stack: Stack, job: str) -> float:
    finished = stack.view(job).finished
    assert finished is not None
    return finished


def view(stack: Stack, name: str) -> RunView:
    return stack.do(lambda ledger: LedgerRuns(ledger).view(MODEL, name))


def delete(stack: Stack, name: str) -> None:
    stack.do(lambda ledger: LedgerRuns(ledger).delete(MODEL, name))


def until(stack: Stack, name: str, holds: Callable[[RunView], bool]) -> RunView:
    wait_until(lambda: holds(view(stack, name)))
    return view(stack, name)


# field case 28
def test_a_rank_that_cannot_read_a_run_fails_that_job_and_serves_the_next(stack: Stack) -> None:
    job = make_run(stack, "unreadable")
    kind, detail = refused(stack, patched(stack, "unreadable", job))
    assert kind == "intervention_failed"
    assert "run 'unreadable'" in detail
    assert "rank 3: injected fault" in detail
    assert text(stack, patched(stack, "unreadable", job))


def test_source_runs_are_loaded_on_every_rank_of_any_worker(stack: Stack) -> None:
    stack.add("worker-2", fault="")
    job = make_run(stack, "eiffel")
    found = view(stack, "eiffel")
    assert found.state == "ready"
    assert found.job == job
    assert found.prompts[0].sites == {hook: [0, 1, 2, 3] for hook in HOOKS}, "of both stages"
    assert found.prompts[0].positions == list(range(len(TEXT)))
    views = []
    texts = set()
    deadline = time.monotonic() + 60
    while {each.worker for each in views} != {"w1", "w1-2"}:
        # a worker may have been quick enough to take several
        assert time.monotonic() < deadline, views
        jobs = [patched(stack, "eiffel", job) for _ in range(12)]
        texts |= {text(stack, job) for job in jobs}
        views += [stack.view(job) for job in jobs]
    assert len(texts) == 1
    assert views[0].runs == {"eiffel": job}
    until(stack, "eiffel", lambda found: found.held_by == ["w1", "w1-2"] and found.in_use == 0)


# field case 31, 36
@pytest.mark.slow("a job runs for seconds")
def test_a_run_deleted_while_a_job_uses_it_stays_with_that_job_and_serves_no_other(
    stack: Stack,
) -> None:
    job = make_run(stack, "in-use")
    running = patched(stack, "in-use", job, max_tokens=250)
    assert until(stack, "in-use", lambda found: found.in_use == 1).state == "ready"
    following = [patched(stack, "in-use", job, send=False) for _ in range(4)]
    delete(stack, "in-use")
    assert stack.do(lambda ledger: LedgerRuns(ledger).lookup(MODEL, "in-use")) is None
    for each in following:
        enqueue(stack.app, each, "generate", MODEL)
    why = f"run 'in-use': source run {run_key(job, 0, 't')}: its captures were deleted"
    assert {refused(stack, each) for each in following} == {("intervention_failed", why)}, (
        "also where it is still in memory"
    )
    assert text(stack, running)
    assert max(ended(stack, each) for each in following) < ended(stack, running), (
        "or nothing was tried here"
    )


def test_a_stop_does_not_wait_for_an_engine_that_is_being_made(
    redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its config may come from a hub that does not answer."""
    begun = threading.Event()
    goes_on = threading.Event()
    gave_up = threading.Event()

    def make(settings: Settings) -> FakeEngine:
        begun.set()
        if not goes_on.wait(20):
            gave_up.set()
        raise MidstreamError("engine_failed", "the hub does not answer")

    def interrupt() -> None:
        if begun.is_set():
            raise KeyboardInterrupt

    monkeypatch.setattr("midstream.workers.serving.host.make_engine", make)
    engine_host = EngineHost(
        load_settings({}, redis_url=redis_url, data_dir=str(tmp_path), model="m"), lambda _: None
    )
    with pytest.raises(KeyboardInterrupt):
        engine_host.start(interrupt)
    assert not gave_up.is_set()
    goes_on.set()
