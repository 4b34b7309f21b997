"""Do the two queues of a model stay apart, and does a job that passes from one to the other count,
wait and end as it should? And does a sweep wait its turn by what it costs?

Decided in a real Redis without a worker.
"""

from collections import Counter
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import msgspec
import pytest
from edge import model_info
from ledger_kit import (
    BOOT,
    IDENTITY,
    MODEL,
    make_job,
    open_ledger,
    relay_beat,
    worker_info as worker,
)
from line_of_jobs import opened
from msgspec.structs import replace
from refusal_kit import refuses
from sweep_rig import sweep, sweep_job

from midstream.broker.ledger.jobs.ledger import Claim, Ledger
from midstream.broker.ledger.jobs.status import read_status
from midstream.broker.ledger.recovery.reaper import Reaper
from midstream.broker.queue.celery_app import lists_of, queue_of
from midstream.schemas.base.records import now
from midstream.schemas.jobs.jobs import Job, Sampling, State
from midstream.schemas.jobs.models import GradientInfo
from midstream.schemas.jobs.queues import GRADIENTS, Queue
from midstream_lab.records.estimates import StoredAttribution, Verify
from midstream_lab.records.sweep_units import Units
from midstream_lab.records.sweeps import StoredSweep


async def test_a_sweep_is_scheduled_by_its_token_count(redis_url: str) -> None:
    async with opened(redis_url, **{"tuning.dispatch_window": 1}) as line:
        await line.submit(1, tenant="first")  # it fills the window
        for _ in range(8):
            await line.ledger.submit(
                msgspec.structs.replace(
                    sweep_job(sweep(), MODEL), tenant="grids", identity=IDENTITY
                ),
                {},
            )
        tenth = Units(sweep()).tokens // 10
        await line.submit(
            70, tenant="plain", sampling=Sampling(max_tokens=tenth - 3)
        )  # and three tokens of prompt
        served = Counter((await line.serve(56))[1:])
        assert served["grids"] == pytest.approx(5, abs=1), "ten jobs for each sweep"


ASKED: StoredSweep = sweep(
    attribution=StoredAttribution(
        method="attribution", steps=1, seed=1, keep=1, verify=Verify(top=3, random=2, doubtful=0)
    )
)


class Queues(NamedTuple):
    """Ledgers as a worker of each queue has one."""

    vllm: Ledger
    gradients: Ledger

    async def messages(self, queue: Queue = "") -> int:
        names = lists_of(queue_of(MODEL, queue))
        return sum([await self.vllm.redis.llen(name) for name in names])

    async def lose_messages(self) -> None:
        for queue in ("", GRADIENTS):
            await self.vllm.redis.delete(*lists_of(queue_of(MODEL, queue)))

    async def submit(self, **changes: Any) -> Job:
        job = sweep_job(ASKED, MODEL)
        changes = {"kind": "attribution", "queue": GRADIENTS, "identity": IDENTITY} | changes
        job = replace(job, **changes)
        await self.vllm.submit(job, {})
        return job

    async def estimated(self) -> Job:
        """A job that a gradient worker has handed on, with four cells to compute."""
        job = await self.submit()
        claim = await claimed(self.gradients, job)
        assert await self.gradients.hand_on(job.id, claim.attempt, "", 4) == "handed_on"
        return job


async def claimed(ledger: Ledger, job: Job, name: str = "w") -> Claim | None:
    return await ledger.claim(job.id, name, BOOT, 1, IDENTITY)


@pytest.fixture
async def queues(redis_url: str, request: pytest.FixtureRequest) -> AsyncIterator[Queues]:
    settings = getattr(request, "param", {})
    async with (
        open_ledger(redis_url, **settings) as vllm,
        open_ledger(redis_url, engine="gradients-fake", **settings) as gradients,
    ):
        yield Queues(vllm, gradients)


async def test_a_job_is_claimed_by_workers_of_its_queue_alone(queues: Queues) -> None:
    job = await queues.submit()
    assert await queues.messages() == 0
    assert await queues.messages(GRADIENTS) == 1
    assert await claimed(queues.vllm, job) is None
    claim = await claimed(queues.gradients, job)
    assert await queues.gradients.hand_on(job.id, 1, "", 4) == "handed_on"
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1
    assert await claimed(queues.gradients, job) is None, "a former message"
    claim = await claimed(queues.vllm, job)
    assert claim.attempt == 2


@pytest.mark.parametrize("queues", [{"max_attempts": 2}], indirect=True)
async def test_a_hand_on_uses_up_no_attempt_and_may_be_repeated(queues: Queues) -> None:
    job = await queues.estimated()
    assert await queues.gradients.hand_on(job.id, 1, "", 4) == "handed_on"
    view = await queues.vllm.view(job.id)
    assert view.state == State.QUEUED
    assert view.queue == ""
    assert view.cells_expected == 4
    assert (await queues.vllm.tenants.usage("default")).sweep_cells == 4
    for attempt, state in ((2, State.QUEUED), (3, State.FAILED)):
        assert await claimed(queues.vllm, job) is not None
        assert await queues.vllm.release(job.id, attempt) is state
    assert (await queues.vllm.tenants.usage("default")).sweep_cells == 0


async def test_a_stale_attempt_and_a_cancelled_job_are_not_handed_on(queues: Queues) -> None:
    job = await queues.submit()
    other = await queues.submit()
    for each in (job, other):
        assert await claimed(queues.gradients, each) is not None
    await queues.gradients.release(job.id, 1)
    assert await claimed(queues.gradients, job) is not None
    assert await queues.gradients.hand_on(job.id, 1, "", 4) == "stale"
    await queues.vllm.request_cancel(other.id)
    assert await queues.gradients.hand_on(other.id, 1, "", 4) == "cancelling"
    assert (await queues.vllm.view(other.id)).queue == GRADIENTS


async def test_a_job_that_was_handed_on_is_cancelled_while_it_waits(queues: Queues) -> None:
    job = await queues.estimated()
    assert (await queues.vllm.request_cancel(job.id)).state is State.ABORTED
    assert await claimed(queues.vllm, job) is None
    assert (await queues.vllm.tenants.usage("default")).sweep_cells == 0


async def test_a_lost_message_is_sent_again_to_the_queue_that_the_job_is_in(queues: Queues) -> None:
    await relay_beat(queues.vllm)
    reaper = Reaper(queues.vllm)
    waits = await queues.submit()
    passed = await queues.estimated()
    await queues.lose_messages()
    assert {*(await reaper.sweep(now() + 30)).resent} == {waits.id, passed.id}
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1
    assert not await reaper.sweep(now() + 60)


async def test_an_expired_lease_requeues_the_job_in_its_queue(queues: Queues) -> None:
    await relay_beat(queues.vllm)
    job = await queues.submit()
    assert await claimed(queues.gradients, job) is not None
    await queues.lose_messages()
    report = await Reaper(queues.vllm).sweep(now() + 60)
    assert report.requeued == [job.id]
    assert await queues.messages() == 0
    assert await queues.messages(GRADIENTS) == 1


@pytest.mark.parametrize("queues", [{"tuning.dispatch_window": 1}], indirect=True)
async def test_windows_of_the_queues_are_apart_and_the_status_names_them(queues: Queues) -> None:
    for _ in range(3):
        await queues.submit()
        await queues.vllm.submit(make_job(), {})
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1
    shown = (await read_status(queues.vllm)).queues
    lines = [(each.queue, each.priority, each.sent, sum(each.waiting.values())) for each in shown]
    assert lines == [("", "batch", 1, 2), (GRADIENTS, "batch", 1, 2)]
    # as if processes of another version had let jobs end without sending the next
    await queues.lose_messages()
    for line in ("6", "6.gradients"):
        await queues.vllm.redis.delete(f"ms:sent:{MODEL}:{line}")
    await Reaper(queues.vllm).sweep()
    assert await queues.messages() == 1
    assert await queues.messages(GRADIENTS) == 1


@pytest.mark.parametrize("queues", [{"tuning.dispatch_window": 1}], indirect=True)
async def test_a_job_that_was_handed_on_waits_its_turn_among_tenants(queues: Queues) -> None:
    """A tenant with many attributions does not get ahead of the others by their first phase."""
    await queues.vllm.submit(make_job(), {})
    await queues.vllm.submit(make_job(tenant="other"), {})
    for job in [await queues.submit(tenant="busy") for _ in range(3)]:
        assert await claimed(queues.gradients, job) is not None
        assert await queues.gradients.hand_on(job.id, 1, "", 4) == "handed_on"
    assert await queues.messages() == 1, "the window"
    shown = [line for line in (await read_status(queues.vllm)).queues if not line.queue]
    assert shown[0].waiting == {"other": 1, "busy": 3}


async def test_gradient_workers_are_no_workers_of_the_model(queues: Queues) -> None:
    ledger = queues.vllm
    await ledger.heartbeat(worker("w1"))
    info = GradientInfo(model=MODEL, identity=IDENTITY, dtype="float32", device="cpu")
    await ledger.publish_model(info, worker("g1", queue=GRADIENTS))
    names = [[each.worker for each in await ledger.workers(of)] for of in ("", GRADIENTS, None)]
    assert names == [["w1"], ["g1"], ["g1", "w1"]]
    assert await ledger.gradients(MODEL) == info


@pytest.mark.parametrize("queues", [{"lease_s": 60}], indirect=True)
async def test_gradient_workers_of_another_model_are_refused(queues: Queues) -> None:
    ledger = queues.vllm
    other = "b" * 64

    async def publish(name: str, identity: str) -> None:
        info = GradientInfo(model=MODEL, identity=identity, dtype="float32", device="cpu")
        await ledger.publish_model(info, worker(name, queue=GRADIENTS, identity=identity))

    async def refused(name: str, identity: str, by: str) -> None:
        with refuses(match=f"the live worker '{by}' serves", kind="model_changed"):
            await publish(name, identity)

    async def known(identity: str) -> bool:
        info = await ledger.gradients(MODEL)
        return info is not None and info.identity == identity

    await ledger.publish_model(model_info(name=MODEL), worker())
    await publish("g1", IDENTITY)
    await refused("g2", other, by="w1")
    assert await known(IDENTITY)
    await ledger.redis.delete("ms:alive:w1")
    await refused("g2", other, by="g1")
    await ledger.publish_model(model_info(name=MODEL, identity=other), worker("w2", identity=other))
    await publish("g2", other)
    await refused("g1", IDENTITY, by="w2")
    assert await known(other)
    for gone in ("w2", "g1", "g2"):
        await ledger.redis.delete(f"ms:alive:{gone}")
    await Reaper(ledger).sweep()
    assert await known(other), "jobs of the model wait for its gradient worker"
    await ledger.publish_model(model_info(name=MODEL), worker())
    await publish("g2", IDENTITY)
    await ledger.publish_model(model_info(name=MODEL, identity=other), worker(identity=other))
    await ledger.redis.delete("ms:alive:g2")
    await Reaper(ledger).sweep()
    assert not await ledger.redis.hlen("ms:gradients")
